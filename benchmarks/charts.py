"""Lines and bars between axes, on pictures with paper of their own: they can be read on light pages and dark ones."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "docs"))
from kv_pictures.svg import COLOURS, GREY, INK, Picture, tint

__all__ = ["COLOURS", "GREY", "INK", "Axis", "Picture", "Plot", "draw_bars", "draw_legend", "tint"]

MARK = 6  # pixels of a side of a point
BAR, BESIDE, GAP = 20, 12, 12  # pixels: a bar, the one of a peer below it, and to the next
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Axis:
    """From values to pixels, between low at `start` and high at `end`."""

    low: float
    high: float
    start: float
    end: float
    ticks: Sequence[float]
    name: str  # with its unit
    log: bool = False

    def at(self, value: float) -> float:
        low, high, here = (math.log2(each) if self.log else each for each in (self.low, self.high, value))
        return self.start + (self.end - self.start) * (here - low) / (high - low)


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2, 5, 10, ... around the values, so that all lie between the first and the last."""
    steps = [factor * 10.0**power for power in range(-3, 10) for factor in (1, 2, 5)]
    first = max(i for i, step in enumerate(steps) if step <= low)
    last = min(i for i, step in enumerate(steps) if step >= high)
    return steps[first : max(last, first + 1) + 1]


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1 else f"{value:g}"


class Plot:
    """Axes with a line and a number at each tick, then what is drawn between them."""

    def __init__(self, picture: Picture, x: Axis, y: Axis, shown: Callable[[float], str] = number) -> None:
        self._picture, self._x, self._y = picture, x, y
        for value in y.ticks:
            level = y.at(value)
            picture.line(x.start, level, x.end, level, tint(GREY, 0.7))
            picture.text(x.start - 8, level + 4, shown(value), colour=GREY, anchor="end")
        for value in x.ticks:
            picture.text(x.at(value), y.start + 18, number(value), colour=GREY, anchor="middle")
        picture.text((x.start + x.end) / 2, y.start + 38, x.name, colour=GREY, anchor="middle")
        picture.text(x.start, y.end - 12, y.name, bold=True)

    def series(self, points: Points, colour: str) -> None:
        places = self._places(points)
        self._picture.polyline(places, colour)
        for x, y in places:
            self._picture.rect(x - MARK / 2, y - MARK / 2, MARK, MARK, colour)

    def dashed(self, points: Points, colour: str) -> None:
        self._picture.polyline(self._places(points), colour, width=1, dashes="3 4")

    def _places(self, points: Points) -> list[tuple[float, float]]:
        return [(self._x.at(x), self._y.at(y)) for x, y in points]


def draw_legend(picture: Picture, y: float, names: Iterable[tuple[str, str]], *, x: float, step: float) -> None:
    """(name, colour) side by side."""
    for name, colour in names:
        picture.rect(x, y - 10, 12, 12, colour)
        picture.text(x + 18, y, name)
        x += step


@dataclass(frozen=True, slots=True)
class Bar:
    """A share of a limit with the words behind it, and below it that of a peer, where there is one."""

    name: str
    share: float
    words: str
    peer: float | None = None
    peer_words: str = ""

    @property
    def height(self) -> float:
        return BAR + (BESIDE if self.peer is not None else 0) + GAP


def draw_bars(picture: Picture, bars: Sequence[Bar], x: Axis, y: float) -> float:
    """One below the other from y on, along a linear axis; where the next thing may stand."""
    bottom = y + sum(bar.height for bar in bars)
    for value in x.ticks:
        picture.line(x.at(value), y - 6, x.at(value), bottom, tint(GREY, 0.7))
        picture.text(x.at(value), bottom + 14, f"{100 * value:.0f} %", colour=GREY, anchor="middle")
    for bar in bars:
        picture.text(x.start - 10, y + 15, bar.name, anchor="end")
        picture.rect(x.start, y, x.at(bar.share) - x.start, BAR, COLOURS[0])
        picture.text(x.at(bar.share) + 6, y + 15, bar.words)
        if bar.peer is not None:
            picture.rect(x.start, y + BAR, x.at(bar.peer) - x.start, BESIDE, tint(GREY, 0.4))
            picture.text(x.at(bar.peer) + 6, y + BAR + 11, bar.peer_words, colour=GREY)
        y += bar.height
    picture.text((x.start + x.end) / 2, bottom + 32, x.name, colour=GREY, anchor="middle")
    return bottom + 48
