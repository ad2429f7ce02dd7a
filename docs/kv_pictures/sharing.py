"""The picture of sharing and copy-on-write: block tables that point to the same blocks, at four steps of a run."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from kv_pictures import svg
from kv_pictures.runs import Memory, memories, request, text
from kv_pictures.svg import GREY, Picture, tint

from tinyvllm_cli.config import BLOCK_SIZE

NUM_BLOCKS = 12
PROMPT = text(1, 40)
BEGIN = PROMPT[:32]
COLOURS = dict(zip(("P1", "P2", "P3", "Q", "R"), svg.COLOURS, strict=True))
PANELS = (
    "Three samples of a prompt of 40 tokens: P1 computes it, all draw from its last row.",
    "Each writes on: P2 and P3 get copies of the block that the prompt ends in.",
    "Q begins with the same 32 tokens: it finds two blocks and computes 12 tokens.",
    "R's prompt is these 32 tokens: it computes the last row, in a copy of block 2.",
)

LEFT, TOP, PANEL, ARROWS = 16, 52, 164, 30  # pixels, as all below
ENTRY, ENTRY_HEIGHT, TABLE = 27, 20, 154
BLOCK, CELL = 64, 6.5


@dataclass(frozen=True)
class Panel:
    step: int
    memory: Memory
    writers: dict[tuple[int, int], str]  # by block and offset: who computed what is there


def panels() -> list[Panel]:
    """The four steps that are shown."""
    arrivals = [
        (0, request(0, "P", PROMPT, 30, n=3)),
        (4, request(1, "Q", [*BEGIN, *text(2, 12)], 20)),
        (6, request(2, "R", BEGIN, 20)),
    ]
    steps = memories(arrivals, num_blocks=NUM_BLOCKS, slots=6, max_batch_tokens=64)
    names = [{table.name for table in memory.tables} for memory in steps]
    copying = next(i for i, memory in enumerate(steps) if memory.copies)
    shown = [0, copying, *(next(i for i, found in enumerate(names) if name in found) for name in "QR")]
    writers: dict[tuple[int, int], str] = {}
    found = []
    for i, memory in enumerate(steps):
        _write(writers, memory)
        if i in shown:
            found.append(Panel(i, memory, writers.copy()))
    return found


def _write(writers: dict[tuple[int, int], str], memory: Memory) -> None:
    """What a step copies, and then computes."""
    for source, target in memory.copies:
        writers |= {(target, i): writers[source, i] for i in range(BLOCK_SIZE) if (source, i) in writers}
    for table in memory.tables:
        for position in range(table.written - table.rows, table.written):
            place, offset = divmod(position, BLOCK_SIZE)
            writers[table.blocks[place], offset] = table.name


def draw_sharing() -> str:
    """Four panels, one below the other."""
    shown = panels()
    ys = list(accumulate((PANEL + ARROWS * bool(panel.memory.copies) for panel in shown), initial=TOP))
    picture = Picture(
        ys[-1] + 40,
        "Block tables of requests that begin alike",
        "Four steps of a run. Three samples of a prompt point to the same three blocks; then two of them get copies of "
        "the last one; a request with the same begin points to the first two; one whose whole prompt is there copies "
        "the second and computes one row.",
    )
    for panel, words, y in zip(shown, PANELS, ys, strict=False):
        _panel(picture, panel, words, y)
    picture.text(
        LEFT, ys[-1] + 4, "Block tables, and the blocks: a square for each token, in the colour of who computed it;"
    )
    picture.text(LEFT, ys[-1] + 22, "× how many own the block. Dotted: copied before the step.")
    return picture.svg()


def _panel(picture: Picture, panel: Panel, words: str, y: float) -> None:
    picture.text(LEFT, y + 10, f"Step {panel.step}", bold=True)
    picture.text(LEFT + 54, y + 10, words)
    tables, blocks = y + 26, y + 106
    for i, table in enumerate(panel.memory.tables):
        x, colour = LEFT + TABLE * i, COLOURS[table.name]
        picture.text(x, tables + 15, table.name, colour=colour, bold=True)
        for place, block in enumerate(table.blocks):
            left = x + 26 + ENTRY * place
            picture.rect(left, tables, ENTRY, ENTRY_HEIGHT, tint(colour, 0.85), stroke=colour)
            picture.text(left + ENTRY / 2, tables + 15, str(block), anchor="middle")
            _pointer(picture, left + ENTRY / 2, tables + ENTRY_HEIGHT, _middle(block), blocks - 2, colour)
    for block in range(1, 1 + NUM_BLOCKS):
        _block(picture, panel, block, blocks)
    for source, target in panel.memory.copies:
        _copy(picture, _middle(source), _middle(target), blocks + 46)


def _middle(block: int) -> float:
    return LEFT + BLOCK * (block - 0.5) - 4


def _pointer(picture: Picture, x: float, y: float, to_x: float, to_y: float, colour: str) -> None:
    bend = (to_y - y) * 0.6
    picture.curve([(x, y), (x, y + bend), (to_x, to_y - bend), (to_x, to_y)], colour)


def _block(picture: Picture, panel: Panel, block: int, y: float) -> None:
    owners = panel.memory.owners(block)
    left, width = _middle(block) - 4 * CELL, 8 * CELL
    picture.rect(left - 2, y, width + 4, 34, "none", stroke=GREY if owners else tint(GREY, 0.7))
    picture.text(left + 1, y + 13, str(block), colour=GREY)
    if owners:
        picture.text(left + width - 1, y + 13, f"×{len(owners)}", anchor="end", bold=len(owners) > 1)
        for i in range(BLOCK_SIZE):
            writer = panel.writers.get((block, i))
            fill = COLOURS[writer] if writer else tint(GREY, 0.85)
            picture.rect(left + CELL * (i % 8) + 0.5, y + 18 + CELL * (i // 8), CELL - 1, CELL - 1, fill)


def _copy(picture: Picture, x: float, to_x: float, y: float) -> None:
    """An arrow below the blocks."""
    top = y - 10
    picture.curve([(x, top), (x, y + 14), (to_x, y + 14), (to_x, top + 5)], GREY, dashes="2 3")
    picture.polygon([(to_x - 4, top + 7), (to_x + 4, top + 7), (to_x, top)], GREY)
