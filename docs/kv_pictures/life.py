"""The picture of a pool's life: which request holds which block at every step of a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TypeVar

from kv_pictures import svg
from kv_pictures.runs import Memory, memories, request, text
from kv_pictures.svg import FAINT, GREY, PAPER, Picture, tint

from tinyvllm_cli.config import BLOCK_SIZE

T = TypeVar("T")

SYSTEM = text(1, 32)  # two blocks that most prompts begin with
NUM_BLOCKS = 19
REQUESTS = [  # (step of arrival, name, what the prompt begins with, tokens behind it, tokens of the answer)
    (0, "A", SYSTEM, 20, 70),
    (0, "B", SYSTEM, 40, 90),
    (6, "C", SYSTEM, 76, 60),
    (10, "D", [], 20, 90),
    (60, "E", SYSTEM, 24, 60),
]
COLOURS = dict(zip("ABCDE", svg.COLOURS, strict=True))
QUEUED, UNWRITTEN, CACHED = 0.45, 0.6, 0.8  # shares of paper in a request's colour

LEFT, RIGHT = 100, 784  # pixels, as all below
LANES, LANE = 72, 24
ROWS, ROW = LANES + LANE * len(REQUESTS) + 34, 20
BOTTOM = ROWS + ROW * NUM_BLOCKS
SWATCH = 26


def life() -> list[Memory]:
    """The memory at each step."""
    arrivals = [
        (step, request(i, name, [*begin, *text(i + 2, own)], answer))
        for i, (step, name, begin, own, answer) in enumerate(REQUESTS)
    ]
    return memories(arrivals, num_blocks=NUM_BLOCKS, slots=4, max_batch_tokens=64)


def draw_life() -> str:
    """Requests above, blocks below, steps from left to right."""
    steps = life()
    picture = Picture(
        BOTTOM + 132,
        f"Five requests in a pool of {NUM_BLOCKS} blocks",
        "A map of blocks over steps: each block has the colour of the request that holds it and fills as tokens come. "
        "Two blocks are shared, the youngest request is preempted when none is free, and comes back to what is cached.",
    )
    xs = [LEFT + (RIGHT - LEFT) * i / len(steps) for i in range(len(steps) + 1)]
    picture.text(LEFT, LANES - 12, "requests, with the tokens of their prompts + answers", colour=GREY)
    picture.text(RIGHT, ROWS - 10, "blocks of 16 tokens, each filled from below", colour=GREY, anchor="end")
    for block in range(1, 1 + NUM_BLOCKS):
        y = ROWS + ROW * (block - 1)
        picture.text(LEFT - 8, y + 14, str(block), colour=GREY, anchor="end")
        picture.rect(LEFT, y + 1, RIGHT - LEFT, ROW - 2, FAINT)
        _block(picture, steps, xs, block, y + 1)
    for i, (_, name, begin, own, answer) in enumerate(REQUESTS):
        y = LANES + LANE * i
        picture.text(16, y + 14, name, colour=COLOURS[name], bold=True)
        picture.text(32, y + 14, f"{len(begin) + own} + {answer}", colour=GREY)
        _lane(picture, steps, xs, name, y)
    for i in range(0, len(steps), 25):
        picture.text(xs[i], BOTTOM + 17, str(i) if i else "step 0", colour=GREY, anchor="middle")
    _legend(picture, BOTTOM + 44)
    return picture.svg()


def _lane(picture: Picture, steps: Sequence[Memory], xs: Sequence[float], name: str, y: float) -> None:
    """What a request does at each step."""
    colour, before = COLOURS[name], ""
    for state, first, end in _stretches([activity(step, name) for step in steps]):
        x, width = xs[first], xs[end] - xs[first]
        if state == "waits in the queue":
            picture.rect(x, y + 8, width, 3, tint(colour, QUEUED))
        elif state == "waits for a block":
            picture.rect(x, y + 2, width, 15, tint(colour, CACHED), stroke=colour)
        elif state == "computes what it knows":
            picture.rect(x, y + 1, width, 17, colour)
        elif state == "decodes":
            picture.rect(x, y + 5, width, 9, colour)
        if state == "waits in the queue" and before:
            picture.line(x, y + 9, x, BOTTOM, colour, dashes="2 3")
            picture.polygon([(x - 5, y + 3), (x + 5, y + 3), (x, y + 13)], colour)
        before = state


def activity(step: Memory, name: str) -> str:
    """What a request does at a step; empty before it comes and after its end."""
    if name in step.queue:
        return "waits in the queue"
    rows = next((table.rows for table in step.tables if table.name == name), None)
    if rows is None:
        return ""
    return "waits for a block" if rows == 0 else "decodes" if rows == 1 else "computes what it knows"


def _block(picture: Picture, steps: Sequence[Memory], xs: Sequence[float], block: int, y: float) -> None:
    """A block's owners, a band for each, and how far it is written."""
    height, colour = ROW - 2, ""
    for (owners, cached), first, end in _stretches([(step.owners(block), block in step.cached) for step in steps]):
        x, width = xs[first], xs[end] - xs[first]
        if cached:
            picture.rect(x, y, width, height, tint(colour, CACHED))  # of its last owner
        band = height / max(len(owners), 1)
        for i, owner in enumerate(owners):
            colour, base = COLOURS[owner], y + band * (i + 1)
            picture.rect(x, base - band, width, band, tint(colour, UNWRITTEN))
            shares = [_written(step, owner, block) / BLOCK_SIZE for step in steps[first:end]]
            _stairs(picture, xs[first : end + 1], base, [band * share for share in shares], colour)
        if len(owners) == 1 and width > 60:
            picture.text(x + width - 5, y + 13.5, owners[0], colour=PAPER, anchor="end", bold=True)


def _stairs(picture: Picture, xs: Sequence[float], base: float, heights: Sequence[float], colour: str) -> None:
    points = [(xs[0], base)]
    for height, first, end in _stretches(heights):
        points += [(xs[first], base - height), (xs[end], base - height)]
    picture.polygon([*points, (xs[-1], base)], colour)


def _written(step: Memory, name: str, block: int) -> int:
    """Tokens of a request in one of its blocks."""
    table = next(table for table in step.tables if table.name == name)
    return max(0, min(BLOCK_SIZE, table.written - BLOCK_SIZE * table.blocks.index(block)))


def _legend(picture: Picture, y: float) -> None:
    colour, other = COLOURS["A"], COLOURS["B"]
    first, second, third = 16, 270, 524
    for x, line, words in (
        (first, 0, "in the queue"),
        (second, 0, "waits for another's block"),
        (third, 0, "computes its prompt, decodes"),
        (first, 1, "held; dark: written"),
        (second, 1, "shared, a band for each owner"),
        (third, 1, "cached: nobody's, content kept"),
        (first, 2, "preempted: gives its blocks back"),
        (third, 2, "free"),
    ):
        picture.text(x + SWATCH + 8, y + 28 * line + 9, words)
    picture.rect(first, y + 3, SWATCH, 3, tint(colour, QUEUED))
    picture.rect(second, y - 3, SWATCH, 15, tint(colour, CACHED), stroke=colour)
    picture.rect(third, y - 4, 10, 17, colour)
    picture.rect(third + 10, y, SWATCH - 10, 9, colour)
    y += 28
    picture.rect(first, y - 4, SWATCH, 18, tint(colour, UNWRITTEN))
    _stairs(picture, [first, first + 9, first + 17, first + SWATCH], y + 14, [5, 9, 13], colour)
    picture.rect(second, y - 4, SWATCH, 9, colour)
    picture.rect(second, y + 5, SWATCH, 9, other)
    picture.rect(third, y - 4, SWATCH, 18, tint(colour, CACHED))
    y += 28
    picture.polygon([(first + 8, y), (first + 18, y), (first + 13, y + 10)], colour)
    picture.rect(third, y - 4, SWATCH, 18, FAINT)


def _stretches(values: Sequence[T]) -> Iterator[tuple[T, int, int]]:
    """Each stretch of equal values: (value, first, end)."""
    first = 0
    for value, group in groupby(values):
        end = first + len(list(group))
        yield value, first, end
        first = end
