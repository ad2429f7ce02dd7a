"""What a run says: lines that stay lines whatever names they hold, and a bar that leaves the terminal as it was."""

import os
import pty
import sys
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinyvllm_cli.io.progress import Bar, Display, PlainLines
from tinyvllm_cli.io.said import printable
from tinyvllm_cli.io.summary import Progress

NAME = "a\nb\r\x1b[2J\u2028\udcff:smile:[bold]\u00e9\U0001f600"
SHOWN = "a\\nb\\r\\x1b[2J\\u2028\\udcff:smile:[bold]\u00e9\U0001f600"
END = "(end)"


@given(st.text(st.characters(codec=None, exclude_categories=())))
def test_a_printable_text_has_one_line_and_no_control(text: str):
    assert printable(text).isprintable()
    assert text.isprintable() is (printable(text) == text)


def on_terminal(monkeypatch: pytest.MonkeyPatch, say: Callable[[], None]) -> str:
    """What `say` writes to a terminal that is standard error."""
    leader, follower = pty.openpty()
    with os.fdopen(follower, "w", encoding="utf-8") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        monkeypatch.setenv("TERM", "xterm")
        say()
        print(END, end="", file=terminal, flush=True)
        said = b""
        while not said.endswith(END.encode()):  # a terminal hands over what it has, in pieces
            said += os.read(leader, 100_000)
    os.close(leader)
    return said.decode().removesuffix(END)


@pytest.mark.parametrize("display", [Bar, PlainLines])
def test_names_are_said_as_they_are_and_in_one_line(monkeypatch: pytest.MonkeyPatch, display: Callable[[], Display]):
    assert on_terminal(monkeypatch, lambda: display().say(NAME)) == SHOWN + "\r\n"


def test_a_bar_never_hides_the_cursor(monkeypatch: pytest.MonkeyPatch):
    """A run that is killed could not show it again."""

    def show() -> None:
        bar = Bar()
        bar.update(
            Progress(done=1, failed=0, total=2, prompt_tokens=1, completion_tokens=1, made_tokens=1, elapsed_s=1.0)
        )
        bar.say("said meanwhile")
        bar.close()

    said = on_terminal(monkeypatch, show)
    assert "1/2" in said and "said meanwhile" in said and "\x1b[?25l" not in said
