"""A picture as SVG text: shapes and words on paper of its own, the same bytes each time."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

WIDTH = 800  # pixels: about the column of a page, so that words have the size that is given
PAPER, INK, GREY, FAINT = "#ffffff", "#1f2328", "#59636e", "#edeff1"
COLOURS = BLUE, ORANGE, GREEN, PURPLE, RED = "#2f6fb3", "#d98a00", "#14876a", "#a8529a", "#c4452d"
FONT = "-apple-system, 'Segoe UI', Helvetica, Arial, 'DejaVu Sans', sans-serif"

Point = tuple[float, float]


class Picture:
    """Drawn from back to front."""

    def __init__(self, height: float, title: str, about: str) -> None:
        """about: what can be seen on it, for those who cannot."""
        self._height, self._title, self._about = height, title, about
        self._parts: list[str] = []
        self.text(16, 30, title, size=17, bold=True)

    def rect(self, x: float, y: float, width: float, height: float, fill: str, *, stroke: str = "") -> None:
        box = f'x="{_number(x)}" y="{_number(y)}" width="{_number(width)}" height="{_number(height)}"'
        outline = f' stroke="{stroke}"' if stroke else ""
        self._parts.append(f'<rect {box} fill="{fill}"{outline}/>')

    def polygon(self, points: Sequence[Point], fill: str) -> None:
        self._parts.append(f'<polygon points="{_points(points)}" fill="{fill}"/>')

    def polyline(self, points: Sequence[Point], stroke: str, *, width: float = 2, dashes: str = "") -> None:
        self._parts.append(f'<polyline points="{_points(points)}" fill="none"{_pen(stroke, width, dashes)}/>')

    def line(self, x: float, y: float, to_x: float, to_y: float, stroke: str, *, dashes: str = "") -> None:
        self.polyline([(x, y), (to_x, to_y)], stroke, width=1, dashes=dashes)

    def curve(self, points: Sequence[Point], stroke: str, *, dashes: str = "") -> None:
        """A Bezier curve of four points."""
        first, *others = points
        path = f"M{_points([first])}C{_points(others)}"
        self._parts.append(f'<path d="{path}" fill="none"{_pen(stroke, 1.5, dashes)}/>')

    def text(
        self, x: float, y: float, words: str, *, size: int = 13, colour: str = INK, anchor: str = "", bold: bool = False
    ) -> None:
        """anchor: middle or end, of the words, is at x; else their begin."""
        place = f'x="{_number(x)}" y="{_number(y)}"' + (f' text-anchor="{anchor}"' if anchor else "")
        weight = ' font-weight="bold"' if bold else ""
        self._parts.append(f'<text {place} font-size="{size}" fill="{colour}"{weight}>{escape(words)}</text>')

    def svg(self) -> str:
        size = f'width="{WIDTH}" height="{_number(self._height)}"'
        box = f'viewBox="0 0 {WIDTH} {_number(self._height)}"'
        head = [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} {box} role="img" font-family="{FONT}">',
            f"<title>{escape(self._title)}</title>",
            f"<desc>{escape(self._about)}</desc>",
            f'<rect {size} rx="8" fill="{PAPER}"/>',
        ]
        return "\n".join([*head, *self._parts, "</svg>\n"])


def tint(colour: str, share: float) -> str:
    """A colour with a share of white in it."""
    mixed = [round(255 * share + int(colour[i : i + 2], 16) * (1 - share)) for i in (1, 3, 5)]
    return "#" + "".join(f"{value:02x}" for value in mixed)


def _number(value: float) -> str:
    """To a tenth of a pixel."""
    return f"{round(value, 1):g}"


def _points(points: Sequence[Point]) -> str:
    return " ".join(f"{_number(x)},{_number(y)}" for x, y in points)


def _pen(colour: str, width: float, dashes: str) -> str:
    pattern = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f' stroke="{colour}" stroke-width="{width:g}"{pattern}'
