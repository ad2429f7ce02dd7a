"""Markdown that is still being written, and the pieces that it falls into: those that are done need no second look."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from markdown_it import MarkdownIt
from markdown_it.token import Token

# What these rules find would not be shown, or not as it was written: its source is.
UNUSED = ["html_block", "html_inline", "autolink", "reference", "image"]
BLOCKS = MarkdownIt("commonmark").enable("table").disable([*UNUSED, "inline", "text_join"])

# A line of which no more is known than this may yet become another block: "-" an item, a rule or an underline.
UNDECIDED = re.compile(r"[-\s\d.)>+*#=_|:`~]*((```|~~~).*)?")

COLOURED_LINES = 50  # of code together: a line costs no more the longer the code is


@dataclass(frozen=True)
class Fence:
    """Fenced code up to a line of it. `code`: that line and those before it that tell its colours."""

    markup: str
    language: str
    indent: int
    code: str = ""
    lines: int = 0

    def closed_by(self, line: str) -> bool:
        return bool(re.fullmatch(rf" {{0,3}}{self.markup[0]}{{{len(self.markup)},}}[ \t]*", line))

    def with_line(self, line: str) -> Fence:
        before = self.code if self.lines % COLOURED_LINES else ""
        return replace(self, code=f"{before}{line}\n", lines=self.lines + 1)


@dataclass(frozen=True)
class Place:
    """Where a piece ends and the next begins: what counts for the next."""

    first: bool = True
    blank: bool = False  # the line before is
    marker: str = ""  # of the list whose item ends here
    number: int = 1  # of its next item
    fence: Fence | None = None


@dataclass(frozen=True)
class Piece:
    """A part of a text that is shown by itself: a block, an item of a list, an end of fenced code, a line of it.

    The sources of the pieces of a text, one after the other, are the text.
    """

    kind: Literal["block", "item", "fence", "code"]
    source: str
    before: Place
    after: Place
    has_table: bool = False

    @property
    def spaced(self) -> bool:
        """A blank row comes before it."""
        if self.before.first or self.before.fence is not None:
            return False
        in_list = self.kind == "item" and self.before.marker == self.after.marker
        return self.before.blank or not in_list


@dataclass
class _Start:
    line: int
    token: Token
    has_table: bool = False


def decided(text: str) -> str:
    """As much of an unfinished text as, but for its last piece, no more text can divide in another way."""
    start = text.rfind("\n") + 1
    return text[:start] if UNDECIDED.fullmatch(text, start) else text


def split(text: str, place: Place) -> Iterator[Piece]:
    """The pieces of a text that begins at `place`; none where it is blank."""
    lines = re.findall("[^\n]*\n|[^\n]+", text)
    begin = 0
    while begin < len(lines) and place.fence is not None:
        yield (piece := _fenced(lines[begin], place, place.fence))
        begin, place = begin + 1, piece.after
    starts = _starts(BLOCKS.parse("".join(lines[begin:])), begin)
    for start, end in zip(starts, [*(start.line for start in starts[1:]), len(lines)], strict=False):
        # From `begin`: blank lines before the first are its own.
        yield (piece := _piece(start, "".join(lines[begin:end]), place))
        begin, place = end, piece.after


def _starts(tokens: list[Token], offset: int) -> list[_Start]:
    starts: list[_Start] = []
    for token in tokens:
        if token.map is None:
            continue
        begin, end = (offset + line for line in token.map)
        if token.level == 0 and token.type == "fence":
            starts += [_Start(line, token) for line in range(begin, end)]
        elif (token.level == 0 and token.tag not in {"ul", "ol"}) or (token.level == 1 and token.tag == "li"):
            starts.append(_Start(begin, token))
        if token.type == "table_open":
            starts[-1].has_table = True
    return starts


def _piece(start: _Start, source: str, place: Place) -> Piece:
    if place.fence is not None:
        return _fenced(source, place, place.fence)
    token = start.token
    after = Place(first=False, blank=bool(re.search(r"\n[ \t]*\n\Z", source)))
    if token.type == "fence":
        line = source.strip("\n")
        fence = Fence(token.markup, token.info.strip().partition(" ")[0], indent=len(line) - len(line.lstrip(" ")))
        return Piece("fence", source, place, replace(after, fence=fence))
    if token.tag == "li":
        number = place.number if place.marker == token.markup else int(token.info or 1)
        after = replace(after, marker=token.markup, number=number + 1)
    return Piece("item" if token.tag == "li" else "block", source, place, after, start.has_table)


def _fenced(source: str, place: Place, fence: Fence) -> Piece:
    line = source.split("\n", 1)[0]  # blank lines may follow the one that closes it
    if fence.closed_by(line):
        return Piece("fence", source, place, Place(first=False))
    code = re.sub(f"^ {{0,{fence.indent}}}", "", line).expandtabs(4)
    return Piece("code", source, place, replace(place, fence=fence.with_line(code)))
