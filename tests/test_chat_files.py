"""Conversations in files: what is saved goes on as if nothing had been, and no file of others is harmed."""

import json
import os
import re
import shlex
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from chats import answered, chat_model, do, refused, session, stamp, talk
from command import read_answers, run_here, write_lines

from tinyvllm_cli.chat.session import Session
from tinyvllm_cli.errors import UsageError
from tinyvllm_cli.io.conversations import read_conversation
from tinyvllm_cli.load import LoadedModel
from tinyvllm_cli.types import Message


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tmp_path_factory.mktemp("models") / "chat", max_position_embeddings=512)


def test_what_is_saved_and_loaded_goes_on_as_if_nothing_had_been(loaded: LoadedModel, tmp_path: Path):
    one = session(loaded, Message("system", "Räum auf.\n"), temperature=1.5)
    talk(loaded, one, ["Hello 😀\u2028", "Go\non"])
    do(one, f"/save {tmp_path / 'talk.jsonl'}")
    other = session(loaded, *read_conversation(tmp_path / "talk.jsonl")[0], temperature=1.5)
    assert other.messages == one.messages
    assert talk(loaded, other, ["More"]) == talk(loaded, one, ["More"])


def test_run_reads_a_saved_conversation_and_gives_the_same_answer(loaded: LoadedModel, model: Path, tmp_path: Path):
    one = session(loaded, Message("system", "Be brief."), temperature=0)
    talk(loaded, one, ["Hello"])
    one.ask("Go on")
    do(one, f"/save {tmp_path / 'talk.jsonl'}")
    command = ["run", tmp_path / "talk.jsonl", "-m", model, "-o", tmp_path / "out", "-q", "--backend", "cpu"]
    assert run_here(*command, "--max-tokens", "8", "--set", "ignore_eos=true") == 0
    (line,) = read_answers(tmp_path / "out")
    assert line["choices"][0]["text"] == answered(loaded, one)


def test_no_file_of_others_is_written_over(loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    one = session(loaded, Message("user", "a"))
    Path("there").write_text("mine")
    assert "exists" in refused(one, "/save there") and Path("there").read_text() == "mine"
    assert "wanted /save FILE" in refused(one, "/save")
    do(one, "/save new name")
    one.answered("b")
    do(one, "/save")
    assert read_conversation(Path("new name"))[0] == one.messages
    one.keep_in(Path("there").resolve(), stamp("there"))
    do(one, "/save there")
    assert read_conversation(Path("there"))[0] == one.messages
    assert "cannot write" in refused(one, "/save no/such/folder")
    assert "cannot write" in refused(one, "/save ~nobody-of-this-name/x")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new name", "there"]


def test_a_name_that_no_file_can_have_is_an_error_of_the_command(loaded: LoadedModel, tmp_path: Path):
    one = session(loaded, Message("user", "a"))
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name in "a" * 300, f"{tmp_path}/{'a' * 300}/b", f"{tmp_path}/a\0b", f"{tmp_path}/loop", f"{tmp_path}/loop/x":
        assert refused(one, f"/save {name}")
    longest = tmp_path / ("a" * 255)
    do(one, f"/save {longest}")
    assert read_conversation(longest)[0] == one.messages


def test_a_new_file_is_the_users_alone_and_one_that_is_replaced_keeps_its_mode(loaded: LoadedModel, tmp_path: Path):
    one, path = session(loaded, Message("user", "a")), tmp_path / "talk"
    do(one, f"/save {path}")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for mode in 0o644, 0o440:
        path.chmod(mode)
        one.answered("b")
        do(one, "/save")
        assert stat.S_IMODE(path.stat().st_mode) == mode and read_conversation(path)[0] == one.messages


def test_what_is_no_regular_file_is_not_written_over(loaded: LoadedModel, tmp_path: Path):
    one = session(loaded, Message("user", "a"))
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for path in tmp_path / "pipe", tmp_path / "folder", Path("/dev/null"):
        one.keep_in(path, stamp(path))
        assert "is no regular file" in refused(one, f"/save {path}")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


@pytest.mark.parametrize("leave", [Session.clear, lambda one: one.drop(1)])
def test_another_conversation_is_not_written_over_the_one_before(
    loaded: LoadedModel, tmp_path: Path, leave: Callable[[Session], None]
):
    one, path = (
        session(loaded, Message("user", "a"), Message("assistant", "b"), Message("user", "c")),
        tmp_path / "talk",
    )
    do(one, f"/save {path}")
    before = path.read_bytes()
    leave(one)
    one.ask("d")
    assert "wanted /save FILE" in refused(one, "/save") and path.read_bytes() == before


def test_of_two_sessions_with_one_file_the_second_loses_nothing_of_the_first(loaded: LoadedModel, tmp_path: Path):
    path = write_lines(tmp_path / "talk", [{"messages": [GOOD]}])
    messages, found = read_conversation(path)
    first, second = (session(loaded, *messages) for _ in range(2))
    for one, text in (first, "a"), (second, "b"):
        assert found is not None
        one.keep_in(path, found)
        one.ask(text)
    do(first, "/save")
    do(first, "/save")
    kept = path.read_bytes()
    assert "was changed since: give another name" in refused(second, "/save") and path.read_bytes() == kept
    do(second, f"/save {tmp_path / 'other'}")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "talk"]


GOOD = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (b"", "no lines"),
        (b'{"messages": []}', "no messages"),
        (b"{}", "no messages"),
        (b'{"messages": [\n]}', "2 lines"),
        (json.dumps({"messages": [GOOD]}, indent=2).encode(), "`jq -c . "),
        (json.dumps({"messages": [GOOD]}).encode() + b"\n{}", '2 lines, wanted one line {"messages": [...]}'),
        (b'\n{"messages": 1}', "line 2: messages is 1"),
        (b'{"messages": [{"role": "tool", "content": "x"}]}', "messages[0].role"),
        (b'{"messages": [{"role": "user", "content": "x"}, {"role": "user"}]}', "messages[1].content"),
        (json.dumps({"messages": [GOOD], "max_tokens": 3}).encode(), "max_tokens beside"),
        (json.dumps({"messages": [GOOD], "max_token": 3}).encode(), "did you mean max_tokens"),
        (b'{"messages": [\xff]}', "not UTF-8"),
        (b"hello", "not JSON"),
    ],
)
def test_a_file_that_is_no_conversation_is_refused_by_name_and_place(tmp_path: Path, text: bytes, wanted: str):
    path = tmp_path / "bad"
    path.write_bytes(text)
    with pytest.raises(UsageError) as caught:
        read_conversation(path)
    assert str(path) in str(caught.value) and wanted in str(caught.value)


def test_the_command_that_makes_one_line_of_a_conversation_does_so_for_any_name(tmp_path: Path):
    path = tmp_path / "my talk"
    path.write_text(json.dumps({"messages": [GOOD]}, indent=2))
    with pytest.raises(UsageError) as caught:
        read_conversation(path)
    (command,) = re.findall("`(.*)`", str(caught.value))
    assert shlex.split(command) == ["jq", "-c", ".", str(path)]


def test_a_line_of_run_is_a_conversation_as_a_line_reads_it(tmp_path: Path):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    line = {"messages": [{"role": "developer", "content": "s"}, {"role": "user", "content": parts}]}
    assert read_conversation(write_lines(tmp_path / "x", [line]))[0] == (Message("system", "s"), Message("user", "ab"))
