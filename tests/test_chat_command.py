"""`tinyvllm chat` without a terminal: one prompt, turns on standard input, and what is refused."""

import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from chats import Nowhere, answered, chat_model, session, talk
from command import TINYVLLM, run_apart, write_lines

from tinyvllm_cli.chat import repl
from tinyvllm_cli.chat.keys import Keys
from tinyvllm_cli.cli.signals import Interrupted, Interrupts
from tinyvllm_cli.errors import EXIT_FAILED, EXIT_OK, EXIT_PIPE, EXIT_SOME_FAILED, EXIT_USAGE, DeviceError
from tinyvllm_cli.io.conversations import read_conversation
from tinyvllm_cli.load import LoadedModel
from tinyvllm_cli.types import Message

pytestmark = pytest.mark.usefixtures("own_cache")

FORM = ("--max-tokens", "8", "--set", "ignore_eos=true", "--set", "regex=[a-z ]{200}")
FIELDS = {"regex": "[a-z ]{200}", "temperature": 0.7}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tmp_path_factory.mktemp("models") / "chat", max_position_embeddings=512)


def chat(model: Path, *words: str | Path, stdin: bytes = b"") -> tuple[int, str, str]:
    """Exit code, standard output and standard error."""
    ended = run_apart("chat", "-m", model, *FORM, *words, stdin=stdin)
    return ended.returncode, ended.stdout.decode(), ended.stderr.decode()


CUT = "note: the answer is cut at max_tokens 8: --max-tokens allows more\n"


UNREAD = "note: standard input was not read: a - behind the prompt puts it there\n"

# ---------------------------------------------------------------- one prompt


def test_the_answer_to_one_prompt_is_that_of_a_first_turn_and_nothing_else(loaded: LoadedModel, model: Path):
    (wanted,) = talk(loaded, session(loaded, **FIELDS), ["Hello"])
    assert chat(model, "Hello") == (EXIT_OK, f"{wanted}\n", CUT)
    system = session(loaded, Message("system", "Be brief."), **FIELDS)
    (other,) = talk(loaded, system, ["Hello"])
    assert chat(model, "Hello", "-s", "Be brief.") == (EXIT_OK, f"{other}\n", CUT) and other != wanted


def test_standard_input_goes_behind_the_prompt_or_is_the_prompt(model: Path):
    text = "ä\n+ b\n"
    wanted = chat(model, "What changed?\n\nä\n+ b")
    assert wanted[0] == EXIT_OK
    assert chat(model, "What changed?", "-", stdin=text.encode()) == wanted
    assert chat(model, "-", stdin=f"What changed?\n\n{text}".encode()) == wanted
    assert chat(model, "What changed?\n\nä\n+ b", stdin=b"nobody asked for this") == (*wanted[:2], CUT + UNREAD)


def test_an_input_that_nobody_reads_is_mentioned_where_it_holds_something(model: Path, tmp_path: Path):
    command = [*TINYVLLM, "chat", "-m", str(model), "Hello", *FORM]
    (tmp_path / "text").write_text("text")
    (tmp_path / "empty").touch()
    for name, wanted in ("text", CUT + UNREAD), ("empty", CUT), ("/dev/null", CUT):
        with (tmp_path / name).open("rb") as stdin:
            ended = subprocess.run(command, stdin=stdin, capture_output=True, check=False)
        assert ended.stderr.decode() == wanted


def test_a_seed_gives_the_same_answer_and_another_another(model: Path):
    first, again, other = (chat(model, "Hello", "--seed", seed) for seed in ("0", "0", "1"))
    assert first == again != other


def test_the_models_own_sampling_is_where_a_chat_starts_from(tmp_path: Path):
    cold = chat_model(tmp_path / "cold", generation={"do_sample": True, "temperature": 0.000001})
    greedy = chat(cold, "Hello", "--temperature", "0")
    assert greedy[0] == EXIT_OK and chat(cold, "Hello", "--seed", "5") == greedy
    assert chat(cold, "Hello", "--temperature", "2") != greedy, "options win"


def test_a_model_without_a_template_is_given_the_prompt_as_it_is(tiny: Path):
    code, out, err = chat(tiny, "Hello", "--temperature", "0")
    raw = run_apart("run", "-", "-m", tiny, *FORM, "-q", stdin=b'{"prompt": "Hello"}').stdout
    assert (code, out) == (EXIT_OK, json.loads(raw)["choices"][0]["text"] + "\n"), err
    assert chat(tiny, "Hello", "-s", "x")[::2] == (
        EXIT_FAILED,
        "error: a system message needs a chat template, and the model has none\n",
    )
    code, out, err = chat(tiny, stdin=b"Hello\n")
    assert (code, out) == (EXIT_FAILED, "") and 'tinyvllm chat "PROMPT"' in err and err.count("\n") == 1


def test_forms(model: Path, tmp_path: Path):
    schema = tmp_path / "s.json"
    schema.write_text('{"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}')
    own = ["chat", "-m", model, "Hello"]
    assert run_apart(*own, "--choice", "yes", "--choice", "no").stdout in {b"yes\n", b"no\n"}
    found = json.loads(run_apart(*own, "--json-schema", schema, "--max-tokens", "400").stdout)
    assert isinstance(found["a"], bool)
    schema.write_text('{"type": "string", "maxlength": 3}')
    refused = run_apart(*own, "--json-schema", schema)
    assert refused.returncode == EXIT_USAGE and b"did you mean maxLength" in refused.stderr


def test_a_request_that_fails_is_a_sentence_and_no_answer(model: Path):
    code, out, err = chat(model, "long " * 200)
    assert (code, out) == (EXIT_SOME_FAILED, "") and "wanted at most 511" in err and err.count("\n") == 1
    assert err.startswith("error: the conversation has ")


def test_one_prompt_is_the_next_turn_of_a_saved_conversation(
    loaded: LoadedModel, model: Path, tiny: Path, tmp_path: Path
):
    one = session(loaded, **FIELDS)
    talk(loaded, one, ["Hello"])
    messages = [{"role": message.role, "content": message.content} for message in one.messages]
    file = write_lines(tmp_path / "talk", [{"messages": messages}])
    (wanted,) = talk(loaded, one, ["Go on"])
    assert chat(model, "--load", file, "Go on") == (EXIT_OK, f"{wanted}\n", CUT)
    code, out, err = chat(tiny, "--load", file, "Go on")
    assert (code, out) == (EXIT_FAILED, "") and "needs a chat template" in err
    file = write_lines(tmp_path / "waits", [{"messages": messages[:1]}])
    code, out, err = chat(model, "--load", file, "Go on")
    assert (code, out) == (EXIT_USAGE, "") and "leave out the prompt" in err


def test_a_reader_that_goes_away_and_a_full_disk(model: Path):
    command = [*TINYVLLM, "chat", "-m", str(model), "Hello", "--set", "ignore_eos=true"]
    read_end, write_end = os.pipe()
    os.close(read_end)
    gone = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, check=False)
    os.close(write_end)
    assert (gone.returncode, gone.stderr) == (EXIT_PIPE, b"")
    with Path("/dev/full").open("wb") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, check=False)
    assert ended.returncode == EXIT_FAILED and ended.stderr.startswith(b"error: cannot write to standard output")
    assert ended.stderr.count(b"\n") == 1


# ---------------------------------------------------------------- turns on standard input


def test_each_line_is_a_turn_of_one_conversation(loaded: LoadedModel, model: Path):
    turns = ["Hello", "Räume 😀", "/is no command"]
    wanted = talk(loaded, session(loaded, **FIELDS), turns)
    given = "Hello\n\n  \n Räume 😀 \r\n /is no command"
    assert chat(model, stdin=given.encode()) == (EXIT_OK, "\n".join(f"{text}\n" for text in wanted), CUT * 3)


def test_commands_work_in_a_pipe_and_the_end_may_be_one(loaded: LoadedModel, model: Path, tmp_path: Path):
    one = session(loaded, **FIELDS)
    wanted = talk(loaded, one, ["Hello", "Go on"])
    one.retry()
    wanted.append(answered(loaded, one))
    file = tmp_path / "talk.jsonl"
    given = f"Hello\nNo\n/undo\nGo on\n/retry\n/save {file}\n/quit\nnever read\n"
    code, out, err = chat(model, stdin=given.encode())
    answers = out.split("\n\n")
    assert code == EXIT_OK and [answers[0], *answers[2:]] == [*wanted[:2], f"{wanted[2]}\n"]
    assert read_conversation(file)[0] == one.messages
    assert err.count("\n") == 4 + 2


def test_nothing_to_say_needs_no_model(tmp_path: Path):
    assert run_apart("chat", "-m", tmp_path / "none").returncode == EXIT_OK
    ended = run_apart("chat", "-m", tmp_path / "none", stdin=b"\n \n")
    assert (ended.returncode, ended.stdout, ended.stderr) == (EXIT_OK, b"", b"")


def test_a_turn_that_fails_leaves_no_trace_but_its_error(loaded: LoadedModel, model: Path):
    wanted = talk(loaded, session(loaded, **FIELDS), ["Hello", "Go on"])
    bad = [b"\xff\xfe", b"/sav x", b"long " * 200, b"/set top_p 2"]
    code, out, err = chat(model, stdin=b"\n".join([b"Hello", *bad, b"Go on"]))
    assert (code, out) == (EXIT_SOME_FAILED, "\n".join(f"{text}\n" for text in wanted))
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert [line.split(":")[1].strip() for line in errors] == ["line 2", "line 3", "line 4", "line 5"]
    for part, line in zip(["not UTF-8", "/save", "at most 511", "top_p is 2"], errors, strict=True):
        assert part in line


def test_a_full_context_is_said_and_never_cut_in_silence(model: Path):
    turns = b"".join(b"%d %s\n" % (i, b"word " * 15) for i in range(8))
    code, out, err = chat(model, stdin=turns)
    failed = [line for line in err.splitlines() if "wanted at most 511" in line]
    assert code == EXIT_SOME_FAILED and failed and len(out.split("\n\n")) + len(failed) == 8
    cut = chat(model, "x" * 480, "--max-tokens", "100")
    assert cut[0] == EXIT_OK and cut[2] == "note: the answer is cut: the context of 512 tokens is full\n"


def test_a_conversation_goes_on_where_it_was_saved(loaded: LoadedModel, model: Path, tmp_path: Path):
    file = write_lines(tmp_path / "talk", [{"messages": [{"role": "user", "content": "Hello"}]}])
    one = session(loaded, **FIELDS)
    wanted = talk(loaded, one, ["Hello", "Go on"])
    assert chat(model, "--load", file, stdin=b"Go on\n") == (EXIT_OK, f"{wanted[0]}\n\n{wanted[1]}\n", CUT * 2)
    assert chat(model, "--load", file)[:2] == (EXIT_OK, f"{wanted[0]}\n"), "the user waits for it"
    assert chat(model, "--load", file, "-s", "Be brief.")[0] == EXIT_OK


def test_a_pipe_is_no_file_to_save_in(model: Path, tmp_path: Path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    line = json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]})
    writer = threading.Thread(target=pipe.write_text, args=[line], daemon=True)
    writer.start()
    code, _, err = chat(model, "--load", pipe, stdin=b"/save\n")
    writer.join(10)
    assert code == EXIT_SOME_FAILED and "wanted /save FILE" in err and pipe.is_fifo()


def test_an_interrupt_ends_turns(model: Path):
    command = [*TINYVLLM, "chat", "-m", str(model)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stdin is not None and running.stdout is not None and running.stderr is not None
        running.stdin.write(b"Hello\n")
        running.stdin.flush()
        assert running.stdout.read(1)
        running.send_signal(signal.SIGINT)
        assert running.wait(15) == 128 + signal.SIGINT
        assert b"Traceback" not in running.stderr.read()


@pytest.fixture
def interrupts() -> Iterator[Interrupts]:
    """The handlers of a process."""
    found = Interrupts()
    before = {signum: signal.getsignal(signum) for signum in (2, 15, 1, signal.SIGALRM)}
    found.install()
    yield found
    signal.setitimer(signal.ITIMER_REAL, 0)
    for signum, handler in before.items():
        signal.signal(signum, handler)


def test_of_two_that_listen_for_an_interrupt_the_inner_one_is_told(interrupts: Interrupts):
    told: list[str] = []
    with interrupts.tell(lambda: told.append("outer")):
        with interrupts.tell(lambda: told.append("inner")):
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    with pytest.raises(Interrupted):
        signal.raise_signal(signal.SIGINT)
    assert told == ["inner", "outer"]


def test_an_interrupt_that_comes_between_answer_and_prompt_ends_no_conversation(
    loaded: LoadedModel, interrupts: Interrupts, monkeypatch: pytest.MonkeyPatch
):
    turns = iter(["Hello", None])

    def read() -> str | None:
        signal.raise_signal(signal.SIGINT)
        return next(turns)

    monkeypatch.setattr(repl, "Editor", lambda *arguments: SimpleNamespace(read=read, confirm=None))
    one = session(loaded)
    assert repl.talk_at_terminal(one, loaded, Nowhere, interrupts, Keys) == EXIT_OK  # type: ignore[arg-type]
    assert len(one.messages) == 2


def test_what_ends_a_conversation_does_not_lose_it(
    loaded: LoadedModel,
    interrupts: Interrupts,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    def fail() -> None:
        raise DeviceError("the device is gone")

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(repl, "Editor", lambda *arguments: SimpleNamespace(read=lambda: "Go on", confirm=None))
    one = session(loaded)
    talk(loaded, one, ["Hello"])
    with monkeypatch.context() as broken, pytest.raises(DeviceError):
        broken.setattr(loaded.engine, "step", fail)
        repl.talk_at_terminal(one, loaded, Nowhere, interrupts, Keys)  # type: ignore[arg-type]
    (file,) = (tmp_path / "tinyvllm").iterdir()
    assert read_conversation(file)[0] == one.messages and len(one.messages) == 2
    assert file.stat().st_mode & 0o077 == 0 and f"`tinyvllm chat --load {file}`" in capsys.readouterr().err


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["Tell", "me", "a joke"], "tinyvllm chat 'Tell me a joke'"),
        (["Tell", "me", "-"], "tinyvllm chat 'Tell me' -"),
        (["-", "Tell"], "tinyvllm chat Tell -"),
        ([""], "the prompt is empty"),
        (["-"], "standard input is empty"),
        (["Hi", "-"], "standard input is empty"),
        (["--load", "no-such-file"], "--load: cannot read no-such-file"),
        (["--set", "n=3"], "n is not for a chat, where a turn has one answer: `tinyvllm run -n`"),
        (["--temp", "1"], "did you mean --temperature?"),
        (["--set", "logprobs=1"], "logprobs is not for a chat"),
        (["--max-tokens", "0"], "max_tokens is 0, wanted an integer >= 1"),
        (["--max-tokens", "-1"], "--max-tokens is -1, wanted an integer >= 1"),
        (["--temperature", "-1"], "--temperature is -1"),
        (["--seed", "-1"], "--seed is -1"),
        (["--slots", "2"], "No such option"),
        (["-s", "@/dev/stdin"], "standard input"),
    ],
)
def test_a_command_line_that_cannot_be_is_refused_before_there_is_a_model(
    said, words: list[str], wanted: str, monkeypatch: pytest.MonkeyPatch
):
    with Path("/dev/null").open() as nothing:
        stdin = os.dup(0)
        os.dup2(nothing.fileno(), 0)
        try:
            code, out, err = said("chat", "-m", "no-such-model", *words)
        finally:
            os.dup2(stdin, 0)
            os.close(stdin)
    assert (code, out) == (EXIT_USAGE, "") and wanted in err and err.count("\n") == 1


def test_input_that_is_no_text(model: Path):
    code, out, err = chat(model, "-", stdin=b"abc\xff")
    assert (code, out) == (EXIT_USAGE, "") and "byte 4 of standard input is not UTF-8 (0xff)" in err


def test_two_system_messages_are_one_too_many(model: Path, tmp_path: Path):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "x"}]
    file = write_lines(tmp_path / "talk", [{"messages": messages}])
    code, out, err = chat(model, "--load", file, "-s", "Be brief.")
    assert (code, out) == (EXIT_USAGE, "") and "leave out --system" in err


def test_a_model_that_is_not_there(tmp_path: Path):
    ended = run_apart("chat", "-m", tmp_path / "none", "Hello")
    assert ended.returncode == EXIT_FAILED and ended.stderr.count(b"\n") == 1
