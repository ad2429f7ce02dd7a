"""`tinyvllm chat` in a real terminal: how it ends, what it survives, and one prompt there."""

import os
import re
import resource
import signal
import sys
import termios
import time
from pathlib import Path

import pexpect
import pytest
from chat_terminal import (
    END,
    ENTER,
    FIELDS,
    QUIT,
    SHORT,
    WORDS,
    ChatTerminal,
    saved,
    words_of,
)
from chats import answered, chat_model, session
from command import write_lines

from tinyvllm_cli.chat.repl import HINTS
from tinyvllm_cli.errors import EXIT_FAILED, EXIT_OK
from tinyvllm_cli.load import LoadedModel
from tinyvllm_cli.types import Message

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tmp_path_factory.mktemp("models") / "chat")


def test_notes_and_errors_are_divided_between_words(model: Path, tmp_path: Path):
    with ChatTerminal(model, tmp_path, *SHORT, columns=37) as chat:
        chat.wait_for_prompt()
        chat.type(f"/sett{ENTER}/nonsense of mine{ENTER}")
        chat.wait_for("a space before it")
        said = " ".join(line.strip() for line in chat.screen.lines())
        assert HINTS in said and "and a turn that begins with / has a space before it" in said


def test_an_output_that_takes_no_more_ends_no_conversation(model: Path, tmp_path: Path):
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "x"}]
    file = write_lines(tmp_path / "before", [{"messages": messages}])
    with ChatTerminal(model, tmp_path, *SHORT, "--load", file, log=Path("/dev/full")) as chat:
        chat.wait_for_prompt()
        chat.type(f"Go on{ENTER}")
        chat.wait_for("error: cannot write to standard output")
        assert [message.content for message in saved(chat, tmp_path / "talk")] == ["Hello", "x"]
        assert chat.end() == EXIT_OK


STUCK = """
import time
from tinyvllm_cli.chat.editor import Editor
from tinyvllm_cli.chat.keys import Keys
from tinyvllm_cli.cli import signals
signals.GRACE_S = 0.2
interrupts = signals.Interrupts()
interrupts.install()
keys = Keys(interrupts)
with keys.quiet():
    Editor(keys, print, lambda line: time.sleep(60), interrupts).read()
"""


def test_a_prompt_that_is_stuck_ends_at_a_signal_and_leaves_the_terminal_as_it_was(tmp_path: Path):
    child = pexpect.spawn(sys.executable, ["-c", STUCK], env={**os.environ, "XDG_STATE_HOME": str(tmp_path)})
    before = termios.tcgetattr(child.fileno())
    child.expect(">.*h")
    child.send("a\t")
    time.sleep(0.3)
    child.kill(signal.SIGTERM)
    child.expect(pexpect.EOF, timeout=5)
    assert termios.tcgetattr(child.fileno()) == before
    child.close()
    assert child.exitstatus == 128 + signal.SIGTERM


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("answering", [True, False])
def test_a_signal_leaves_the_terminal_as_it_was(model: Path, tmp_path: Path, signum: signal.Signals, answering: bool):
    with ChatTerminal(model, tmp_path, "--max-tokens", "4000", "--set", f"regex={WORDS}") as chat:
        before = termios.tcgetattr(chat.child.fileno())
        chat.wait_for_prompt()
        assert termios.tcgetattr(chat.child.fileno()) != before
        chat.type("some")
        if answering:
            chat.type(ENTER)
            chat.until(lambda: len(words_of(chat.screen.lines())) > 20)
        os.kill(chat.child.pid, signum)
        chat.until_dead()
        assert termios.tcgetattr(chat.child.fileno()) == before
        assert chat.wait() == 128 + signum
        assert "Traceback" not in chat.text()


@pytest.mark.parametrize("answering", [True, False])
def test_a_terminal_that_is_closed_ends_the_chat(model: Path, tmp_path: Path, answering: bool):
    with ChatTerminal(model, tmp_path, "--max-tokens", "4000", "--set", f"regex={WORDS}") as chat:
        chat.wait_for_prompt()
        if answering:
            chat.type(f"Hello{ENTER}")
            chat.until(lambda: len(words_of(chat.screen.lines())) > 20)
        chat.child.ptyproc.fileobj.close()
        chat.until_dead()
        # Writing to it may fail before the signal comes.
        assert chat.child.exitstatus in {128 + signal.SIGHUP, EXIT_FAILED}


def test_a_quit_from_the_keyboard_leaves_the_terminal_as_it_was(model: Path, tmp_path: Path):
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    with ChatTerminal(model, tmp_path, "--max-tokens", "4000", "--set", f"regex={WORDS}") as chat:
        before = termios.tcgetattr(chat.child.fileno())
        chat.wait_for_prompt()
        chat.type(f"some{ENTER}")
        chat.until(lambda: len(words_of(chat.screen.lines())) > 20)
        chat.type(QUIT)
        chat.until_dead()
        assert termios.tcgetattr(chat.child.fileno()) == before
        assert chat.wait() == 128 + signal.SIGQUIT


def test_answers_go_into_a_pipe_while_the_talk_is_at_the_terminal(loaded: LoadedModel, model: Path, tmp_path: Path):
    log = tmp_path / "log"
    one = session(loaded, **FIELDS)
    one.ask("Hello")
    wanted = answered(loaded, one)
    with ChatTerminal(model, tmp_path, *SHORT, log=log) as chat:
        chat.ask("Hello")
        assert chat.end() == EXIT_OK
        assert wanted not in chat.text()
    assert log.read_text() == f"{wanted}\n"


def test_a_conversation_that_waits_for_an_answer_gets_it_at_once(loaded: LoadedModel, model: Path, tmp_path: Path):
    file = write_lines(tmp_path / "talk", [{"messages": [{"role": "user", "content": "Hello"}]}])
    one = session(loaded, Message("user", "Hello"), **FIELDS)
    with ChatTerminal(model, tmp_path, *SHORT, "--load", file) as chat:
        chat.wait_for(answered(loaded, one))
        assert chat.end() == EXIT_OK


def test_one_prompt_at_a_terminal_is_drawn_and_measured(model: Path, tmp_path: Path):
    with ChatTerminal(model, tmp_path, "Which?", "--choice", "**bold**", "--choice", "**brave**") as chat:
        assert chat.wait() == EXIT_OK
        assert re.match(r"(bold|brave)\n\d+ tokens, ", chat.text())


def test_a_prompt_that_is_typed_ends_where_it_is_told_to(loaded: LoadedModel, model: Path, tmp_path: Path):
    one = session(loaded, **FIELDS)
    one.ask("Hello")
    with ChatTerminal(model, tmp_path, *SHORT, "-") as chat:
        chat.wait_for("^D on an empty line ends it")
        chat.type(f"Hello{ENTER}{END}")
        chat.wait_for(answered(loaded, one))
        assert chat.wait() == EXIT_OK
