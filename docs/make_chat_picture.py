"""Draw docs/chat.svg: a real conversation with the default model, as a terminal shows it.

    python docs/make_chat_picture.py
"""

import sys
import tempfile
from pathlib import Path

import pyte
from pyte import modes
from pyte.screens import Char
from rich.style import Style
from rich.text import Text
from terminal_picture import draw

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))
from chat_terminal import ENTER, ChatTerminal  # noqa: E402

COLUMNS, ROWS = 96, 60  # so many that nothing scrolls away
COMMAND = "tinyvllm chat --temperature 0"
DIM, GREY = b"\x1b[2m", b"\x1b[90m"  # pyte knows no dim text
COLOURS = {"brown": "yellow", "default": None}  # what pyte calls them


def converse() -> bytes:
    """All that the terminal got."""
    with tempfile.TemporaryDirectory() as home:
        model, options = Path("smollm2-135m-instruct"), COMMAND.split()[2:]
        with ChatTerminal(model, Path(home), *options, columns=COLUMNS, rows=ROWS) as chat:
            chat.wait_for_prompt()
            chat.ask("Name three rivers, as a Markdown list.")
            chat.type(f"/sett max_tokens 56{ENTER}")
            chat.wait_for("did you mean")
            chat.type(f"/set max_tokens 56{ENTER}")
            chat.wait_for("max_tokens 56, ")
            chat.ask("Write a Python function that adds two numbers.")
            return chat.raw


def lines(data: bytes) -> list[Text]:
    """The rows of a terminal that got this, with their colours."""
    screen = pyte.Screen(COLUMNS, ROWS)
    screen.set_mode(modes.LNM)
    pyte.ByteStream(screen).feed(data.replace(DIM, GREY))
    rows = [Text.assemble(*((char.data, style(char)) for char in row(screen, y))) for y in range(ROWS)]
    for text in rows:
        text.rstrip()
    while not rows[-1].plain:
        rows.pop()
    return rows


def row(screen: pyte.Screen, y: int) -> list[Char]:
    return [screen.buffer[y][x] for x in range(COLUMNS)]


def style(char: Char) -> Style:
    name = char.fg.replace("bright", "bright_")
    return Style(color=COLOURS.get(name, name), bold=char.bold, italic=char.italics, underline=char.underscore)


if __name__ == "__main__":
    draw(ROOT / "docs" / "chat.svg", [Text(f"$ {COMMAND}", style="bold"), *lines(converse())], COLUMNS)
