"""The rows that a piece of Markdown is on a terminal, by rich: nothing of its text is left out, however narrow."""

from __future__ import annotations

import re
from functools import lru_cache
from itertools import dropwhile
from typing import Any, ClassVar, NamedTuple

from markdown_it import MarkdownIt
from markdown_it.token import Token
from rich import box
from rich import markdown as rich_markdown
from rich.cells import get_character_cell_size
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.rule import Rule
from rich.segment import Segment, Segments
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from tinyvllm_cli.chat.pieces import UNUSED, Piece
from tinyvllm_cli.chat.visible import visible

PARSER = MarkdownIt("commonmark").enable(["table", "strikethrough"]).disable(UNUSED)
DEEPEST = PARSER.options["maxNesting"] - 2  # what is nested deeper than two levels more, the parser leaves out
LEAST_WIDTH = 8  # of text inside of lists and quotes
MAX_WIDTH = 100_000  # of a table

# Colours by their names and no background: the terminal's own, whether it is dark or light.
CODE: dict[str, Any] = {"theme": "ansi_dark", "background_color": "default", "word_wrap": True}


class Row(NamedTuple):
    """A row of a terminal, with its colours. `columns`: the most that any terminal takes for it."""

    text: str
    columns: int


def rows(piece: Piece, console: Console, width: int, *, whole: bool) -> list[Row]:
    """The rows of a piece, with the blank one before it. whole: nothing of it is to come.

    A whole line of code is one row however long it is, so that it is copied from the terminal as one line.
    """
    if piece.kind == "fence":
        found = drawn(Text(piece.source.strip("\n"), style="dim"), console, width)
    elif piece.kind == "code":
        line = _code_line(piece)
        found = drawn(line, console, max(width, line.cell_len)) if whole else _fitting(line, console, width)
    else:
        found = _fitting(_block(piece, width), console, width)
        found = list(dropwhile(lambda row: not row.text, found))  # rich puts one before a list
    return [Row("", 0)] * piece.spaced + found


def _fitting(shown: RenderableType, console: Console, width: int) -> list[Row]:
    """In rows so narrow that they fit any terminal of this width, if there can be such rows."""
    found = drawn(shown, console, width)
    excess = max((row.columns for row in found), default=0) - width
    return _fitting(shown, console, width - excess) if excess > 0 and width - excess >= LEAST_WIDTH else found


def drawn(shown: RenderableType, console: Console, width: int) -> list[Row]:
    options = console.options.update(width=width, height=None)
    lines = [_trimmed(line) for line in Segment.split_lines(console.render(shown, options))]
    with console.capture() as capture:
        console.print(Segments([part for line in lines for part in (*line, Segment.line())]), soft_wrap=True, end="")
    texts = ("".join(part.text for part in line) for line in lines)
    return [Row(ansi, _columns(text)) for text, ansi in zip(texts, capture.get().split("\n"), strict=False)]


def _trimmed(line: list[Segment]) -> list[Segment]:
    """Without the blanks at its end: more text may be appended to it."""
    while line and not line[-1].text.rstrip():
        line = line[:-1]
    return [*line[:-1], line[-1]._replace(text=line[-1].text.rstrip())] if line else []


def _columns(text: str) -> int:
    return len(text) if text.isascii() else sum(map(_most_columns, text))


def _most_columns(char: str) -> int:
    """A terminal joins the parts of an emoji (flags, tones of skin, variants), or it does not."""
    if char == "\ufe0f":
        return 1
    return 2 if "\U0001f000" <= char <= "\U0001ffff" else get_character_cell_size(char)


def _code_line(piece: Piece) -> Text:
    fence = piece.after.fence
    assert fence is not None, "a line of code is followed by one, or by the end of its fence"
    lines = fence.code.split("\n")
    coloured = _syntax(fence.language).highlight(fence.code).split("\n", allow_blank=True)
    same = [line.plain for line in coloured] == lines  # as it is unless a lexer drops some of what it reads
    return coloured[-2] if same else Text(lines[-2])


@lru_cache(maxsize=32)
def _syntax(language: str) -> Syntax:
    lexer = Syntax("", language).lexer  # by its name it would be looked up for each line
    return Syntax("", lexer or "text", **CODE)


def _block(piece: Piece, width: int) -> RenderableType:
    source = piece.source.strip("\n").expandtabs(4)  # which means the same, and rich breaks lines at tabs
    tokens = PARSER.parse(source)
    if _room(tokens, width) < LEAST_WIDTH:
        return Text(source)
    for token in tokens:
        if token.level == 0 and token.tag == "ol":
            token.attrs["start"] = piece.after.number - 1
        for child in token.children or []:
            child.content = visible(child.content)  # it may stand for an entity
            if child.type == "link_open":
                title = f' "{child.attrs["title"]}"' if "title" in child.attrs else ""
                child.attrs["href"] = visible(f"{child.attrs['href']}{title}")
    return _Markdown(source, tokens)


def _room(tokens: list[Token], width: int) -> int:
    """The columns left for text where lists and quotes take the most; 0 where the parser has left text out."""
    left, least = [width], width
    for token in tokens:
        if token.level >= DEEPEST:
            return 0
        if token.tag in {"blockquote", "li"} and token.nesting == 1:
            left.append(left[-1] - 4 - len(token.info))
            least = min(least, left[-1])
        elif token.tag in {"blockquote", "li"}:
            left.pop()
    return least


class _Heading(rich_markdown.Heading):
    LEVEL_ALIGN: ClassVar[dict[str, Any]] = {}  # all at the left


class _Rule(rich_markdown.HorizontalRule):
    new_line = True

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Rule(style="markdown.hr")


class _Code(rich_markdown.CodeBlock):
    """Code inside of a list or a quote, or indented. No end of it is shown before it is written."""

    def __init__(self, token: Token, source: str) -> None:
        super().__init__(token.info.partition(" ")[0], CODE["theme"])
        self._opening = token.markup + token.info
        _, line_end, last = source.rpartition("\n")
        last = last.strip("> ")
        self._closing = last if line_end and token.markup and re.fullmatch(f"{token.markup}[`~]*", last) else ""

    @classmethod
    def create(cls, markdown: rich_markdown.Markdown, token: Token) -> _Code:
        return cls(token, _source(markdown, token))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self._opening:
            yield Text(self._opening, style="dim")
        yield Padding.indent(Syntax(str(self.text).rstrip(), self.lexer_name, **CODE), 0 if self._opening else 4)
        if self._closing:
            yield Text(self._closing, style="dim")


class _Table(rich_markdown.TableElement):
    """In columns where all of its text has room in them, else as it was written."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self._source = source

    @classmethod
    def create(cls, markdown: rich_markdown.Markdown, token: Token) -> _Table:
        return cls(_source(markdown, token))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        head = [cell.content for cell in self.header.row.cells] if self.header and self.header.row else []
        body = [[cell.content for cell in row.cells] for row in self.body.rows] if self.body else []
        table = Table(box=box.SIMPLE, pad_edge=False, show_edge=False, style="markdown.table.border")
        for text in head:
            table.add_column(
                text, header_style="markdown.table.header", overflow="fold", justify=text.justify or "default"
            )
        for row in body:
            table.add_row(*row)
        # Markdown drops the cells of a row that has more than the head.
        lost = _letters("".join(text.plain for row in [head, *body] for text in row)) != _letters(self._source)
        narrow = Measurement.get(console, options.update(width=MAX_WIDTH), table).minimum > options.max_width
        yield Text(self._source) if lost or narrow else table


def _source(markdown: rich_markdown.Markdown, token: Token) -> str:
    start, end = token.map or (0, 0)
    return "\n".join(markdown.markup.split("\n")[start:end]).rstrip()


def _letters(text: str) -> str:
    return "".join(filter(str.isalnum, text))


class _Markdown(rich_markdown.Markdown):
    """rich's, of tokens that were parsed already."""

    elements: ClassVar[dict[str, type[rich_markdown.MarkdownElement]]] = {
        **rich_markdown.Markdown.elements,
        "heading_open": _Heading,
        "hr": _Rule,
        "fence": _Code,
        "code_block": _Code,
        "table_open": _Table,
    }

    def __init__(self, source: str, tokens: list[Token]) -> None:
        super().__init__("", hyperlinks=False)
        self.markup, self.parsed = source, tokens
