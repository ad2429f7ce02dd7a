"""--resume with another model, options or line, or onto what is no output: refused, with nothing touched."""

import json
import os
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command import read_answers, run_here, write_lines
from tiny import CHAT_TEMPLATE, make_tiny_model
from tiny_gguf import write_gguf_twin

from tinyvllm_cli import load
from tinyvllm_cli.run_resume import resume_command

pytestmark = pytest.mark.usefixtures("own_cache")

LINES = [{"custom_id": i, "prompt": f"Number {i}", "max_tokens": 3} for i in range(3)]
Said = Callable[..., tuple[int, str, str]]


def no_weights(patch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise AssertionError("a model is loaded")

    patch.setattr(load, "load", refuse)


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "chat", chat_template=CHAT_TEMPLATE)


class Begun:
    """An output with two of three answers, and how it looks to those who must not touch it."""

    def __init__(self, folder: Path, model: Path, *options: str | Path) -> None:
        self.source, self.out = write_lines(folder / "in.jsonl", LINES), folder / "out.jsonl"
        self.record = folder / "out.jsonl.run.json"
        self.folder, self.model, self.options = folder, model, options
        assert run_here("run", self.source, "-m", model, "-o", self.out, "-q", "--limit", "2", *options) == 0
        with self.out.open("ab") as file:
            file.write(b'{"custom_id":2,"inde')

    def state(self) -> dict[str, tuple[bytes, int]]:
        files = (path for path in self.folder.iterdir() if path.is_file())
        return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}

    def command(self, *options: str | Path, model: Path | None = None) -> list[str | Path]:
        return ["run", self.source, "-m", model or self.model, "-o", self.out, "--resume", *options]


# ---------------------------------------------------------------- settings


@pytest.mark.parametrize("record", [True, False])
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--temperature", "0.5"], "--temperature was not given and is 0.5"),
        (["--seed", "1"], "--seed was 0 and is 1"),
        (["--stop", "x"], '--stop was not given and is ["x"]'),
        (["--set", "top_k=3"], '--set was not given and is ["top_k=3"]'),
        (["--raw"], "--raw was false and is true"),
        (["-s", "Be brief."], '--system was not given and is "Be brief."'),
        (["-n", "2", "--temperature", "1"], "-n was not given and is 2; --temperature was not given and is 1.0"),
        (["--dtype", "bfloat16"], '--dtype was "auto" and is "bfloat16"; the dtype changed'),
        (["--kv-dtype", "fp8"], '--kv-dtype was "auto" and is "fp8"'),
        (["--truncate", "left"], '--truncate was not given and is "left"'),
        (["--max-model-len", "64"], "--max-model-len was not given and is 64"),
    ],
)
def test_other_options_are_refused_with_the_reason(
    chat: Path,
    tmp_path: Path,
    said: Said,
    monkeypatch: pytest.MonkeyPatch,
    record: bool,
    options: list[str],
    reason: str,
):
    begun = Begun(tmp_path, chat)
    if not record:
        begun.record.unlink()
    before = begun.state()
    with monkeypatch.context() as patch:
        no_weights(patch)
        code, printed, err = said(*begun.command(*options))
    assert (code, printed) == (2, "") and begun.state() == before
    assert err.startswith("error: ") and err.count("\n") == 1
    assert f"{begun.out}: line 1 answers 0 from another line, model or options" in err
    assert (f"({reason})" if record else "run record, which would tell in what, is not there") in err
    assert run_here(*begun.command("-q")) == 0, "with the old ones it goes on"
    assert len(read_answers(begun.out)) == 3


@pytest.mark.parametrize(
    "options",
    [["--slots", "1"], ["--threads", "1"], ["--no-prefix-cache"], ["--ordered"], ["--backend", "cpu"],
     ["--temperature", "0"], ["--max-tokens", "512"], ["--dtype", "float32"], ["--set", "top_p=1"],
     ["--record", "other.json"]],
)  # fmt: skip
def test_what_changes_no_answer_is_no_other_setting(
    chat: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str]
):
    """Nor are the defaults, given by name."""
    monkeypatch.chdir(tmp_path)
    begun = Begun(tmp_path, chat)
    assert run_here(*begun.command("-q", *options)) == 0
    assert len(read_answers(begun.out)) == 3


def test_another_text_in_the_same_file_is_another_option(chat: Path, tmp_path: Path, said: Said):
    system, template = tmp_path / "system.txt", tmp_path / "template.txt"
    system.write_text("Be brief.")
    begun = Begun(tmp_path, chat, "-s", f"@{system}")
    system.write_text("Be long.")
    code, _, err = said(*begun.command("-s", f"@{system}"))
    assert code == 2 and '(--system was "Be brief." and is "Be long.")' in err
    template.write_text("{{ prompt }}")
    begun.out.unlink()
    begun = Begun(tmp_path, chat, "-t", f"@{template}")
    template.write_text("{{ prompt }}!")
    code, _, err = said(*begun.command("-t", f"@{template}"))
    assert code == 2 and "it is the line, or the file of --template, that changed" in err


def test_another_line_is_refused(chat: Path, tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch):
    begun = Begun(tmp_path, chat)
    for changed in ({"prompt": "Number 7"}, {"max_tokens": 4}, {"max_token": 3}):
        write_lines(begun.source, [LINES[0], LINES[1] | changed, LINES[2]])
        before = begun.state()
        with monkeypatch.context() as patch:
            no_weights(patch)
            code, _, err = said(*begun.command())
        assert code == 2 and begun.state() == before
        assert "line 2 answers 1 from another line" in err
        record = f"all options are as in the run record {begun.record}, so it is the line that changed, unless"
        assert record in err
    write_lines(begun.source, [LINES[2], LINES[1] | {"metadata": "other"}, LINES[0]])
    assert run_here(*begun.command("-q")) == 0, "neither its place nor its metadata is an option"


def test_an_output_of_other_requests_is_refused(chat: Path, tmp_path: Path, said: Said):
    begun = Begun(tmp_path, chat)
    others = write_lines(tmp_path / "others.jsonl", [line | {"custom_id": f"x{line['custom_id']}"} for line in LINES])
    for source, options, scope in (
        (others, (), "this input,"),
        (begun.source, ("--shard", "2/3"), "this input with --shard,"),
    ):
        before = begun.state()
        code, _, err = said("run", source, "-m", chat, "-o", begun.out, "--resume", *options)
        assert code == 2 and begun.state() == before
        assert f"none of its 2 answers belongs to {scope}" in err


@pytest.mark.parametrize("change", ["weights", "template", "format"])
def test_another_model_is_refused_and_a_copy_is_not(chat: Path, tmp_path: Path, said: Said, change: str):
    folder = tmp_path / "run"
    folder.mkdir()
    begun = Begun(folder, chat)
    other = Path(shutil.copytree(chat, tmp_path / "other"))
    if change == "weights":
        make_tiny_model(other, chat_template=CHAT_TEMPLATE, seed=1)
    elif change == "template":
        (other / "chat_template.jinja").write_text(CHAT_TEMPLATE + "\n")
    else:
        other = write_gguf_twin(other, tmp_path / "other.gguf")
    before = begun.state()
    code, _, err = said(*begun.command(model=other))
    assert code == 2 and begun.state() == before
    assert "(--model was " in err and "the model's files changed)" in err
    copy = Path(shutil.copytree(chat, tmp_path / "copy"))
    assert run_here(*begun.command("-q", model=copy)) == 0


# ---------------------------------------------------------------- outputs


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"my notes\n", 1),
        (b"my notes", 1),
        (b"[1, 2]", 1),
        (b'{"custom_id": 1, "prompt": "an input"}\n', 1),
        (b'{"custom_id": 1, "prompt": "an input"}', 1),
        (b"\xff\xfe\x00", 1),
        (b"\n", 1),
        (b'{"custom_id":0,"choices":[]}\nnotes', 2),
        (b'{"custom_id":0,"choices":[]}\n\n', 2),
        (b'{"custom_id":0,"choices":[]}\n{"custom_id":1,"cho{"custom_id":1,"choices":[]}\n', 2),
    ],
)
def test_what_is_no_output_is_neither_resumed_nor_touched(
    tiny: Path, tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch, content: bytes, line: int
):
    source, out = write_lines(tmp_path / "in.jsonl", LINES), tmp_path / "out.jsonl"
    out.write_bytes(content)
    os.utime(out, (5, 5))
    no_weights(monkeypatch)
    code, _, err = said("run", source, "-m", tiny, "-o", out, "--resume")
    assert code == 2 and f"out.jsonl: line {line} is " in err and err.count("\n") == 1
    assert line == 1 or f"take it away (sed -i {line}d keeps the rest)" in err
    assert out.read_bytes() == content and out.stat().st_mtime == 5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


@pytest.mark.parametrize("content", [None, b""])
def test_where_there_is_nothing_it_begins(tiny: Path, tmp_path: Path, content: bytes | None):
    source, out = write_lines(tmp_path / "in.jsonl", LINES), tmp_path / "out.jsonl"
    if content is not None:
        out.write_bytes(content)
    assert run_here("run", source, "-m", tiny, "-o", out, "-q", "--resume") == 0
    assert len(read_answers(out)) == 3


def test_what_cannot_be_resumed(tiny: Path, tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch):
    no_weights(monkeypatch)
    source = write_lines(tmp_path / "in.jsonl", LINES)
    os.mkfifo(tmp_path / "pipe")
    for options, reason in (
        (["-o", "-"], "the output is standard output: give -o FILE"),
        ([], "the output is standard output: give -o FILE"),
        (["-o", "/dev/null"], "no regular file"),
        (["-o", tmp_path / "pipe"], "no regular file"),
        (["-o", tmp_path], "is a directory"),
        (["-o", source], "is the input itself"),
        (["-o", tmp_path / "out", "--overwrite"], "give one of them"),
        (["-o", tmp_path / "out", "--format", "text"], "leave out --format text"),
    ):
        code, _, err = said("run", source, "-m", tiny, "--resume", *options)
        assert code == 2 and reason in err and err.count("\n") == 1, options
    assert read_lines(source) == LINES and not (tmp_path / "out").exists()


def read_lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_an_output_that_exists_is_refused_with_both_ways_out(tiny: Path, tmp_path: Path, said: Said):
    begun = Begun(tmp_path, tiny)
    before = begun.state()
    code, _, err = said(*begun.command()[:-1])
    assert code == 2 and "--resume" in err and "--overwrite" in err and begun.state() == before


def test_two_answers_with_one_id(tiny: Path, tmp_path: Path, said: Said):
    begun = Begun(tmp_path, tiny)
    answers = begun.out.read_bytes().split(b"\n")[0] + b"\n"
    begun.out.write_bytes(answers * 2)
    code, _, err = said(*begun.command())
    assert code == 2 and "lines 1 and 2 answer the same custom_id: take one of them away" in err
    assert begun.out.read_bytes() == answers * 2


# ---------------------------------------------------------------- the way back


@pytest.mark.parametrize(
    ("command", "wanted"),
    [
        (["x", "run", "in.jsonl", "-o", "out"], ["run", "--resume", "in.jsonl", "-o", "out"]),
        (["x", "run", "in.jsonl", "--overwrite", "-o", "o"], ["run", "--resume", "in.jsonl", "-o", "o"]),
        (["x", "run", "--resume", "in.jsonl", "-o", "o"], ["run", "--resume", "in.jsonl", "-o", "o"]),
        (["x", "run", "-o", "it's $HOME\n", "--", "-a b.jsonl"],
         ["run", "--resume", "-o", "it's $HOME\n", "--", "-a b.jsonl"]),
        (["x"], ["--resume"]),
    ],
)  # fmt: skip
def test_the_command_that_goes_on(command: list[str], wanted: list[str]):
    assert shlex.split(resume_command(command)) == ["tinyvllm", *wanted]
