"""How an answer is shown while it comes: as text, or on a terminal as Markdown of which only the end is redrawn."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from itertools import takewhile
from typing import TYPE_CHECKING, Protocol

from tinyvllm_cli.chat.visible import VisibleText
from tinyvllm_cli.said import NO_CURSOR
from tinyvllm_cli.stdout import STDOUT, write_stdout

if TYPE_CHECKING:
    from rich.console import Console

    from tinyvllm_cli.chat.markdown import Row
    from tinyvllm_cli.chat.pieces import Piece, Place

DRAW_EVERY_S = 0.06
MARGIN = 2  # columns left free at the right, where terminals differ in how wide a character is

# rich takes a joiner to widen nothing with what follows it, whatever that is, and cuts rows short for it. Here it has
# another character of no width to measure.
JOINER, STAND_IN = "\u200d", "\u034f"

ERASE_ROW = "\r\x1b[K"

Write = Callable[[bytes], None]


class AnswerDisplay(Protocol):
    def push(self, text: str) -> None:
        """The next piece of the answer; '' asks for nothing."""
        ...

    def working(self, made: int) -> None:
        """So many tokens were made and there is nothing to show yet (a thought): a dim line on a terminal."""
        ...

    def moved(self) -> None:
        """Others have written to the terminal: what was shown is no longer before the cursor."""
        ...

    def close(self) -> None:
        """The answer has ended, or was stopped: all of it is shown, and the cursor is at the start of a new line.

        May be called once more.
        """
        ...


def make_answer_display(*, plain: bool) -> AnswerDisplay:
    """For standard output, whose errors are those of write_stdout()."""
    is_terminal = os.isatty(STDOUT)
    sys.stdout.flush()  # what was printed before stands before
    if plain or not is_terminal or os.environ.get("TERM", "") in NO_CURSOR:
        return PlainDisplay(write_stdout, is_terminal=is_terminal)
    from rich.console import Console

    # Its own size counts, not what the environment says of it: that stays the same when the terminal is resized.
    environ = {name: value for name, value in os.environ.items() if name not in {"COLUMNS", "LINES"}}
    return MarkdownDisplay(Console(_environ=environ), write_stdout)


def _status(made: int) -> str:
    return f"thinking: {made} tokens"


class PlainDisplay:
    """The text as it comes; on a terminal with its controls as escapes."""

    def __init__(self, write: Write, *, is_terminal: bool) -> None:
        self._write = write
        self._text = VisibleText() if is_terminal else None
        self._has_status = False
        self._shown = self._closed = False

    def push(self, text: str) -> None:
        self._show(self._text.push(text) if self._text else text)

    def _show(self, text: str) -> None:
        if text:
            erase = ERASE_ROW if self._has_status else ""
            self._has_status, self._shown = False, True
            self._write((erase + text).encode("utf-8", "replace"))

    def working(self, made: int) -> None:
        if self._text and not self._shown and os.environ.get("TERM", "") not in NO_CURSOR:
            self._has_status = True
            self._write(f"{ERASE_ROW}\x1b[2m{_status(made)}\x1b[0m".encode())

    def moved(self) -> None:
        pass

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._show((self._text.push("", final=True) if self._text else "") + "\n")


class _Bottom:
    """The last rows on the screen, those that can be redrawn, with the cursor at the end of them."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.at_start = True  # the cursor is in a row that holds nothing

    def replaced(self, rows: list[Row], *, live: int) -> str:
        """What puts these rows in the place of those, where they differ. live: as many of the last can be redrawn."""
        old = self.rows
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(old, rows, strict=False)))
        if same < len(old) and rows:
            same = min(same, len(rows) - 1)  # the last is written, so that the cursor comes to its end
        erase = ""
        if same < len(old):
            up = len(old) - 1 - same
            erase = "\r" + (f"\x1b[{up}A" if up else "") + "\x1b[J"
            self.at_start = True
        new = rows[same:]
        self.rows = rows[len(rows) - live :]
        return erase + (self.appended("\n".join(row.text for row in new), new_row=True) if new else "")

    def appended(self, text: str, *, new_row: bool = False) -> str:
        lead = "\n" if new_row and not self.at_start else ""
        self.at_start = False
        return lead + text


class MarkdownDisplay:
    """Markdown on a terminal. What is finished is written once; of what is not, the rows at the end are redrawn.

    Rows that can be redrawn no more (they would leave the screen, the terminal has a new size and may have moved them,
    others have written below them) stay as they are, and the rest of their block is appended to them as it was written.
    So nothing is ever shown twice or lost, whatever the terminal does.
    """

    def __init__(self, console: Console, write: Write, *, every_s: float = DRAW_EVERY_S) -> None:
        """console: of the terminal that `write` writes to. every_s: seconds at least between two drawings."""
        from tinyvllm_cli.chat.pieces import Place

        self._console = console
        self._write = write
        self._every_s = every_s
        self._drawn_at = -every_s
        self._size = console.size
        self._text = VisibleText()
        self._rest = ""  # of the text, from the first piece that is not finished
        self._place = Place()  # where that begins
        self._shown = 0  # characters of the rest that are on the screen
        self._fixed = 0  # those of them in rows that cannot be redrawn
        self._bottom = _Bottom()
        self._moved = self._closed = False

    def push(self, text: str) -> None:
        if text:
            self._take(text)
            if self._is_time():
                self._draw()

    def working(self, made: int) -> None:
        from rich.text import Text

        from tinyvllm_cli.chat.markdown import drawn

        if not self._rest.strip() and self._is_time():
            self._notice_size()
            line = drawn(Text(_status(made), style="dim"), self._console, self._width)
            self._send(self._bottom.replaced(line, live=len(line)))

    def moved(self) -> None:
        self._moved = True  # no more: it may be called while something is drawn

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._take("", final=True)
            self._draw(final=True)
            self._send("" if self._bottom.at_start else "\n")

    def _is_time(self) -> bool:
        now = time.monotonic()
        if now - self._drawn_at < self._every_s:
            return False
        self._drawn_at = now
        return True

    def _take(self, text: str, *, final: bool = False) -> None:
        self._rest += self._text.push(text, final=final).replace(JOINER, STAND_IN)

    def _send(self, text: str) -> None:
        if text:
            self._write(text.replace(STAND_IN, JOINER).encode("utf-8", "replace"))

    @property
    def _width(self) -> int:
        return max(self._console.width - MARGIN, 2)  # a wide character has no room in less

    def _notice_size(self) -> None:
        """Fix the rows that a new size of the terminal may have moved; a single one is where the cursor is."""
        size, rows = self._console.size, self._bottom.rows
        if self._moved or (size != self._size and (len(rows) > 1 or any(row.columns > size.width for row in rows))):
            self._moved = False
            self._fix()
        self._size = size

    def _fix(self) -> None:
        self._fixed, self._bottom.rows = self._shown, []

    def _draw(self, *, final: bool = False) -> None:
        from tinyvllm_cli.chat.pieces import decided, split

        self._notice_size()
        known = len(self._rest if final else decided(self._rest))
        done = list(split(self._rest[:known], self._place))
        if not final:
            del done[-1:]
        end = _length(done)
        place = done[-1].after if done else self._place
        coming = [] if self._fixed > end else _coming(self._rest[end:], place)
        rows = self._rows(coming, whole=False)
        fits = len(rows) < self._console.height and all(row.columns <= self._console.width for row in rows)
        if not fits and self._shown > end:
            self._fix()
        if self._fixed > end:
            out = self._as_written(known)
        else:
            out, finished = self._finished(done)
            out += self._bottom.replaced([*finished, *(rows if fits else [])], live=len(rows) if fits else 0)
            self._shown = end + _length(coming)
            if not fits:
                self._fixed = end
                out += self._bottom.appended("\n" if coming[0].spaced else "", new_row=True) + self._as_written(known)
        self._rest, self._place = self._rest[end:], place
        self._shown, self._fixed = max(self._shown - end, 0), max(self._fixed - end, 0)
        self._send(out)  # after all else: a signal that ends the process while this waits finds the state as drawn

    def _finished(self, done: list[Piece]) -> tuple[str, list[Row]]:
        """What comes after the fixed rows: the rest of the piece that they are of, and the rows of those behind it."""
        end, fixed_end = 0, 0
        behind: list[Piece] = []
        for piece in done:
            if end >= self._fixed:
                behind.append(piece)
            end += len(piece.source)
            if not behind:
                fixed_end = end
        rows = self._rows(behind, whole=True)
        return self._as_written(fixed_end), rows

    def _as_written(self, end: int) -> str:
        """The text behind the fixed rows, up to `end` of the rest; blanks wait for what they divide."""
        text = self._rest[self._fixed : end].rstrip()
        self._fixed += len(text)
        self._shown = self._fixed
        return self._bottom.appended(text) if text else ""

    def _rows(self, pieces: list[Piece], *, whole: bool) -> list[Row]:
        from tinyvllm_cli.chat.markdown import rows

        return [row for piece in pieces for row in rows(piece, self._console, self._width, whole=whole)]


def _coming(text: str, place: Place) -> list[Piece]:
    """The pieces of a text that is not finished, as far as they can be shown."""
    from tinyvllm_cli.chat.pieces import split

    pieces = list(split(text.rstrip(), place))
    if pieces and pieces[-1].has_table:  # more text is appended behind its last row, but not into a cell
        pieces = list(split(text[: text.rfind("\n") + 1].rstrip(), place))
    return pieces


def _length(pieces: list[Piece]) -> int:
    return sum(len(piece.source) for piece in pieces)
