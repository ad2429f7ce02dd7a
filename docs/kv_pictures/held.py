"""The picture of what two workloads hold, beside what they would without blocks or without sharing; their figures."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from kv_pictures.runs import CONTEXT, NUM_IDS, ROOM, Sums, sums
from kv_pictures.svg import BLUE, FAINT, GREEN, GREY, PAPER, RED, Picture, tint

from tinyvllm_cli.bench.workloads import named_requests
from tinyvllm_cli.config import BLOCK_SIZE
from tinyvllm_cli.engine.stats import EngineStats

WRITTEN, UNWRITTEN, SAVED = BLUE, RED, GREEN
LEFT, RIGHT, HEIGHT = 72, 784, 190  # pixels
BLOCKS_A_LINE = 10_000


@cache
def workload(name: str, num_blocks: int = ROOM) -> tuple[list[Sums], EngineStats]:
    """A workload of `tinyvllm bench`, in memory for so many blocks."""
    return sums(named_requests(name, NUM_IDS), num_blocks)


def waste_table() -> list[str]:
    """What `mixed` holds on average, in Markdown."""
    steps, stats = workload("mixed")
    written = sum(step.written for step in steps)
    lines = [
        "| `mixed`, mean over its steps | blocks held | of their positions unwritten |",
        "| --- | --- | --- |",
        f"| a block is taken when a token is to be written to it | {stats.mean_blocks:,.0f} | "
        f"{percent(stats.unwritten_share)} |",
    ]
    for words, held in (
        ("prompt + `max_tokens` reserved for each request that runs", sum(step.reserved for step in steps)),
        (f"{CONTEXT:,} tokens reserved for each, whatever it asks for", CONTEXT * sum(step.running for step in steps)),
    ):
        lines.append(f"| {words} | {held / BLOCK_SIZE / len(steps):,.0f} | {percent(1 - written / held)} |")
    return lines


def scarcity_table() -> list[str]:
    """What `mixed` costs in a quarter of the blocks that it would hold at its peak, in Markdown."""
    peak = workload("mixed")[1].peak_blocks
    lines = [
        "| blocks for `mixed` | preempted | evicted | rows computed | steps |",
        "| --- | --- | --- | --- | --- |",
    ]
    for words, num_blocks in ((f"enough: {peak:,} at the peak", ROOM), (f"a quarter: {peak // 4:,}", peak // 4)):
        steps, stats = workload("mixed", num_blocks)
        rows = sum(step.rows for step in steps)
        lines.append(f"| {words} | {stats.preemptions} | {stats.evictions:,} | {rows:,} | {stats.steps:,} |")
    return lines


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def draw_held() -> str:
    """`mixed` above, `prefix` below."""
    picture = Picture(
        590,
        "KV blocks held by two workloads, step by step",
        "Above, blocks of the workload mixed: nearly all that is held is written, and reservation would hold half as "
        "much again at the peak. Below, the workload prefix: what is held lies far below the sum of all block tables.",
    )
    _mixed(picture, 84)
    _prefix(picture, 364)
    return picture.svg()


def _mixed(picture: Picture, y: float) -> None:
    steps, stats = workload("mixed")
    picture.text(LEFT, y - 26, "mixed: 256 requests, prompts and answers of 100 to 1,024 tokens", bold=True)
    chart = Chart(picture, y, len(steps), 200, 20_000)
    reserved = [step.reserved / BLOCK_SIZE for step in steps]
    held = [step.capacity / BLOCK_SIZE for step in steps]
    chart.area(reserved, FAINT)
    chart.area(held, UNWRITTEN)
    chart.area([step.written / BLOCK_SIZE for step in steps], WRITTEN)
    chart.line(reserved, GREY, dashes="5 4")
    words = "what reserving prompt + max_tokens of each that runs would hold"
    picture.text(RIGHT, y + 30, words, colour=GREY, anchor="end")
    words = f"held and unwritten: {percent(stats.unwritten_share)} (the red rim)"
    picture.text(RIGHT, y + 74, words, colour=UNWRITTEN, anchor="end")
    words = f"written: {percent(1 - stats.unwritten_share)} of what is held"
    picture.text(LEFT + 170, y + 140, words, colour=PAPER, bold=True)


def _prefix(picture: Picture, y: float) -> None:
    steps, stats = workload("prefix")
    picture.text(LEFT, y - 26, "prefix: 512 requests that begin with the same 1,536 tokens", bold=True)
    chart = Chart(picture, y, len(steps), 25, 30_000)
    tables = [step.capacity / BLOCK_SIZE for step in steps]
    chart.area(tables, tint(SAVED, 0.85))
    chart.area([step.blocks for step in steps], WRITTEN)
    chart.line(tables, SAVED)
    picture.text(LEFT + 12, y + 80, f"all block tables together: up to {max(tables):,.0f}", colour=SAVED)
    words = f"held: up to {stats.peak_blocks:,}, of which {stats.peak_shared_blocks} are shared"
    picture.text(LEFT + 12, y + HEIGHT - 24, words, colour=WRITTEN)


class Chart:
    """Axes of blocks over steps: 0 to `most`, with a number at every so many steps."""

    def __init__(self, picture: Picture, y: float, steps: int, steps_a_mark: int, most: int) -> None:
        self._picture, self._bottom = picture, y + HEIGHT
        self._step, self._block = (RIGHT - LEFT) / steps, HEIGHT / most
        for blocks in range(0, most + 1, BLOCKS_A_LINE):
            level = self._bottom - blocks * self._block
            picture.line(LEFT, level, RIGHT, level, tint(GREY, 0.7))
            picture.text(LEFT - 8, level + 4, f"{blocks:,}", colour=GREY, anchor="end")
        for step in range(0, steps, steps_a_mark):
            x = LEFT + step * self._step
            picture.text(x, self._bottom + 18, str(step) if step else "step 0", colour=GREY, anchor="middle")

    def area(self, blocks: Sequence[float], fill: str) -> None:
        points = self._points(blocks)
        self._picture.polygon([(LEFT, self._bottom), *points, (points[-1][0], self._bottom)], fill)

    def line(self, blocks: Sequence[float], stroke: str, *, dashes: str = "") -> None:
        self._picture.polyline(self._points(blocks), stroke, dashes=dashes)

    def _points(self, blocks: Sequence[float]) -> list[tuple[float, float]]:
        return [(LEFT + i * self._step, self._bottom - count * self._block) for i, count in enumerate(blocks)]
