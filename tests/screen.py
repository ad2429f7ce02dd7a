"""A terminal emulator with its scrollback, fed with what a program writes."""

from __future__ import annotations

import pyte
from pyte import modes
from wcwidth import wcwidth


class _Grid(pyte.Screen):
    """pyte's screen with scrollback, and with characters of no width and wide ones at the edge as terminals do them."""

    def __init__(self, columns: int, rows: int) -> None:
        self.scrolled: list[str] = []  # what left the screen at its top
        self.replies: list[str] = []
        super().__init__(columns, rows)
        self.set_mode(modes.LNM)  # what the terminal driver makes of a line feed

    def index(self) -> None:
        if self.cursor.y == self.lines - 1:
            self.scrolled.append(self.row(0))
        super().index()

    def row(self, y: int, until: int | None = None) -> str:
        """Without blanks at its end, or all of it before column `until`."""
        line = self.buffer[y]
        text = "".join(line[x].data for x in range(self.columns if until is None else until))
        return text.rstrip() if until is None else text  # the cell behind a wide character is empty

    def draw(self, data: str) -> None:
        if data.isascii():
            return super().draw(data)
        for char in data:
            width = wcwidth(char)
            if width == 0 and self.cursor.x:
                self._join(char)
                continue
            if width == 2 and self.cursor.x == self.columns - 1:
                self.cursor.x = self.columns
            super().draw(char)
        return None

    def _join(self, char: str) -> None:
        line, x = self.buffer[self.cursor.y], self.cursor.x - 1
        x -= not line[x].data
        line[x] = line[x]._replace(data=line[x].data + char)

    def write_process_input(self, data: str) -> None:
        self.replies.append(data)


class Screen:
    def __init__(self, columns: int, rows: int) -> None:
        self._grid = _Grid(columns, rows)
        self._stream = pyte.ByteStream(self._grid)

    @property
    def cursor(self) -> tuple[int, int]:
        """Row, counted from the first line(), and column, both from 0."""
        return len(self._grid.scrolled) + self._grid.cursor.y, self._grid.cursor.x

    @property
    def replies(self) -> list[str]:
        """What the terminal has answered to the program's questions (where is the cursor?), oldest first."""
        return self._grid.replies

    def feed(self, data: bytes) -> None:
        self._stream.feed(data)

    def lines(self) -> list[str]:
        """All that scrolled off and all that is visible, without blanks at the right and blank lines at the end."""
        lines = [*self._grid.scrolled, *map(self._grid.row, range(self._grid.lines))]
        while lines and not lines[-1]:
            lines.pop()
        return lines

    def visible(self) -> list[str]:
        """The rows on the screen alone, blank ones too."""
        return [self._grid.row(y) for y in range(self._grid.lines)]

    def resize(self, columns: int, rows: int) -> None:
        """As terminals that reflow do: a row that is too long now goes on in the next one. No colours are kept."""
        old, (row, column) = self._grid, self.cursor
        above = self.lines()[:row]
        above += [""] * (row - len(above))
        before = old.row(old.cursor.y, until=column)
        behind = [old.row(old.cursor.y)[len(before) :], *map(old.row, range(old.cursor.y + 1, old.lines))]
        self._grid = _Grid(columns, rows)
        self._grid.replies = old.replies
        self._stream = pyte.ByteStream(self._grid)
        self.feed("".join(f"{text}\n" for text in above).encode() + before.encode())
        row, column = self.cursor
        self.feed("\n".join(behind).rstrip("\n").encode())
        self._grid.cursor.y, self._grid.cursor.x = max(row - len(self._grid.scrolled), 0), column
