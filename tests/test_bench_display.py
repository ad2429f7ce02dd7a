"""What `tinyvllm bench` says while it measures: to a terminal only, and seldom enough to cost the figures nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command import run_here
from test_io_progress import on_terminal

from tinyvllm_cli.bench import bench, display
from tinyvllm_cli.bench.start import StartTimes
from tinyvllm_cli.io.summary import Progress

CPU = ("--backend", "cpu", "--threads", "1")


class Drawn:
    """In the place of a bar: what it is given."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.shown: list[Progress] = []
        self.closed = False
        BARS.append(self)

    def update(self, progress: Progress) -> None:
        self.shown.append(progress)

    def close(self) -> None:
        self.closed = True


BARS: list[Drawn] = []


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> list[Drawn]:
    monkeypatch.setattr(display, "Bar", Drawn)
    monkeypatch.setenv("TERM", "xterm")
    BARS.clear()
    return BARS


def test_a_bar_is_drawn_once_a_second_however_many_steps_there_are(bars: list[Drawn]):
    steps = [(tokens, tokens / 1000) for tokens in range(1, 3501)]
    with display.Display(shown=True).bar("trial 2 of 3", 4000) as watch:
        assert len(bars[0].shown) == 1, "before the trial begins"
        for tokens, seconds in steps:
            watch(tokens, seconds)
    found = [(progress.done, progress.total, progress.elapsed_s) for progress in bars[0].shown]
    assert found == [(0, 4000, 0.0), (1000, 4000, 1.0), (2000, 4000, 2.0), (3000, 4000, 3.0)]
    assert bars[0].shown[1].tokens_per_s == 1000 and bars[0].shown[1].seconds_left == 3
    assert bars[0].title.startswith("trial 2 of 3") and bars[0].closed


def test_a_bar_goes_with_what_ends_the_trial(bars: list[Drawn]):
    with pytest.raises(KeyError), display.Display(shown=True).bar("warm-up", None):
        raise KeyError
    assert bars[0].closed


@pytest.mark.parametrize(("shown", "term"), [(False, "xterm"), (True, "dumb")])
def test_where_nobody_could_see_a_bar_there_is_none(bars: list[Drawn], monkeypatch, shown: bool, term: str):
    monkeypatch.setenv("TERM", term)
    with display.Display(shown=shown).bar("warm-up", 10) as watch:
        watch(5, 5.0)
    assert bars == []


@pytest.mark.usefixtures("own_cache")
def test_a_terminal_is_told_what_is_measured_before_it_is(tiny: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any):
    monkeypatch.setattr(bench, "time_start", lambda *arguments: StartTimes(2.5, 1.25))
    command: Callable[[], None] = lambda: run_here("bench", "-m", tiny, "--trials", "2", *CPU)  # noqa: E731
    said = on_terminal(monkeypatch, command)
    parts = ["opening the model", "float32 on the CPU, 32 slots", "measuring the rates", "warm-up, output tokens"]
    parts += [part for number in "12" for part in (f"trial {number} of 2, output tokens", f"latency, trial {number}")]
    places = [said.index(part) for part in parts]
    assert places == sorted(places), said
    assert "32 slots" in capfd.readouterr().out, "and it heads the table"
