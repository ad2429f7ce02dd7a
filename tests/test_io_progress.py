"""What a run says: lines that stay lines whatever names they hold, and a bar that leaves the terminal as it was."""

import math
import os
import pty
import sys
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinyvllm_cli.io.progress import Bar, Display, PlainLines, duration, make_display
from tinyvllm_cli.io.summary import Progress
from tinyvllm_cli.said import printable

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
    assert "1 of 2 done" in said and "said meanwhile" in said and "\x1b[?25l" not in said


@pytest.mark.parametrize(("term", "bar"), [("xterm", True), ("", False), ("dumb", False), ("unknown", False)])
@pytest.mark.parametrize("answers_there", [False, True])
def test_a_bar_is_for_terminals_with_a_cursor(
    monkeypatch: pytest.MonkeyPatch, term: str, bar: bool, answers_there: bool
):
    made: list[Display] = []

    def make() -> None:
        monkeypatch.setenv("TERM", term)
        made.append(make_display(quiet=False, answers_on_terminal=answers_there))

    on_terminal(monkeypatch, make)
    assert isinstance(made[0], Bar) is (bar and not answers_there)


@given(st.floats(0, 1e9))
def test_a_duration_is_right_to_its_second_unit(seconds: float):
    words = duration(seconds).split()
    numbers, units = list(map(int, words[::2])), words[1::2]
    in_seconds = {"d": 86_400, "h": 3600, "min": 60, "s": 1}
    assert units in (["d", "h"], ["h", "min"], ["min", "s"], ["s"])
    said = sum(number * in_seconds[unit] for number, unit in zip(numbers, units, strict=True))
    assert -0.5 <= seconds - said < in_seconds[units[-1]]
    assert numbers[0] > 0 or units == ["s"], "the largest unit that there is"
    less_than = {"d": math.inf, "h": 24, "min": 60, "s": 60}
    assert all(number < less_than[unit] for number, unit in zip(numbers, units, strict=True))
