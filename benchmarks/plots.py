"""Draw the pictures of docs/what-to-expect.md from the files in benchmarks/results, and fill its tables from them.

    python benchmarks/plots.py

A test holds pictures and page to what this gives.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import figures_file
from charts import COLOURS, GREY, Axis, Bar, Picture, Plot, draw_bars, draw_legend, log_ticks, tint
from expect_tables import (
    GPU_MEMORY,
    MEASURED,
    SHAPES,
    Result,
    cards_table,
    invariance_table,
    memory_table,
    options,
    options_table,
    percent,
    read_results,
    shape,
    sweep_table,
    workloads,
    workloads_table,
)
from figures_file import BENCH, SWEEP, FigureFileError
from run_main import run_main

ROOT = Path(__file__).parent.parent
RESULTS, DOCS = ROOT / "benchmarks" / "results", ROOT / "docs"
PAGE, PEER = DOCS / "what-to-expect.md", RESULTS / "vllm-0.26.json"
LEFT, RIGHT = 96, 776  # pixels
NAMES = 240  # of the names of workloads with their options
SHARES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)


def draw_sweep(sweep: Result) -> str:
    """Tokens/s and the share of the limit against slots, a line for each context."""
    device = sweep["backend"]["device"]
    picture = Picture(740, f"Decode of {shape(sweep)} on one {device}, contexts in tokens", _about_sweep(sweep))
    slots = sorted({point["slots"] for point in sweep["points"]})
    contexts = sorted({point["context"] for point in sweep["points"]})
    speeds = [value for point in sweep["points"] for value in _speeds(point)]
    ticks = log_ticks(min(speeds), max(speeds))
    name = "slots: requests that are answered at once"
    across = Axis(slots[0], slots[-1], LEFT, RIGHT, slots, name, log=True)
    upper = Plot(
        picture, across, Axis(ticks[0], ticks[-1], 390, 110, ticks, "output tokens/s, dashed: limit", log=True)
    )
    lower = Plot(picture, across, Axis(0, 1, 680, 480, SHARES, "of the limit"), percent)
    for context, colour in zip(contexts, COLOURS, strict=False):
        points = sorted((point["slots"], point) for point in sweep["points"] if point["context"] == context)
        upper.dashed([(count, point["limit"]["tokens_per_s"]) for count, point in points], colour)
        upper.series([(count, point["tokens_per_s"]["median"]) for count, point in points], colour)
        lower.series([(count, point["of_limit"]["median"]) for count, point in points], colour)
    names = [f"context {context:,}" for context in contexts]
    draw_legend(picture, 60, zip(names, COLOURS, strict=False), x=LEFT, step=136)
    return picture.svg()


def _speeds(point: Result) -> tuple[float, float]:
    return point["tokens_per_s"]["median"], point["limit"]["tokens_per_s"]


def _about_sweep(sweep: Result) -> str:
    shares = [point["of_limit"]["median"] for point in sweep["points"]]
    return (
        "Above, output tokens a second against the number of slots, a line for each context, and dashed the limit of "
        f"each; below, the same as shares of the limit: {percent(min(shares))} to {percent(max(shares))}."
    )


def draw_workloads(results: Sequence[Result], peer: Result) -> str:
    """The share of the limit of every workload, beside a peer's."""
    names = [name for name in MEASURED if workloads(results, name)]
    groups = {name: [_bar(each, name, peer) for each in workloads(results, name) if _is_plain(each)] for name in names}
    height = 76 + sum(84 + sum(bar.height for bar in bars) for bars in groups.values())
    device = next(result["backend"]["device"] for result in results if BENCH in result)
    about = "; ".join(f"{bar.name}: {percent(bar.share)}" for bars in groups.values() for bar in bars)
    picture = Picture(height, f"Workloads on one {device}, as shares of its limit", about)
    legend = (("tinyvllm", COLOURS[0]), (peer["peer"], tint(GREY, 0.4)))
    draw_legend(picture, 58, legend, x=NAMES, step=120)
    across, y = Axis(0, 1, NAMES, RIGHT - 90, SHARES, "of the limit"), 96.0
    for name, bars in groups.items():
        picture.text(16, y + 2, name, bold=True)
        y = draw_bars(picture, bars, across, y + 14) + 22
    return picture.svg()


def _is_plain(result: Result) -> bool:
    """Neither scarcity nor work that is done anew: as a user would run it."""
    return result["engine"]["gpu_memory"] == GPU_MEMORY and result["engine"]["prefix_cache"]


def _bar(result: Result, name: str, peer: Result) -> Bar:
    workload, given = result["workload"]["name"], options(result)
    speed, share = (result["figures"][figure]["median"] for figure in ("tokens_per_s", "of_limit"))
    rival = None if given else peer["tokens_per_s"].get(name, {}).get(workload)
    return Bar(
        name=f"{workload} {given}".strip().replace(" --", ", "),
        share=share,
        words=f"{percent(share)}, {speed:,.0f} tokens/s",
        peer=None if rival is None else rival / result["limit"]["tokens_per_s"],
        peer_words="" if rival is None else f"{rival:,}",
    )


def pictures(results: Sequence[Result], peer: Result) -> Iterator[tuple[str, str]]:
    """(name of the file in docs/, its text)."""
    yield "speed-workloads.svg", draw_workloads(results, peer)
    for sweep in results:
        if SWEEP in sweep:
            yield f"speed-{shape(sweep)}.svg", draw_sweep(sweep)


def tables(results: Sequence[Result]) -> dict[str, list[str]]:
    """Lines of Markdown, by the name that the page calls them."""
    found = {
        "workloads": workloads_table(results),
        "options": options_table(results),
        "cards": cards_table(workloads(results, SHAPES[0])[0]),
        "memory": memory_table(),
        "invariance": invariance_table(results),
    }
    sweeps = {f"sweep of {shape(result)}": sweep_table(result) for result in results if SWEEP in result}
    return {name: list(lines) for name, lines in (found | sweeps).items()}


def filled(page: str, found: dict[str, list[str]]) -> str:
    """The page with each table between its marks: <!-- NAME --> and <!-- end -->."""
    for name, lines in found.items():
        mark, end = f"<!-- {name} -->\n", "<!-- end -->"
        before, marked, rest = page.partition(mark)
        if marked:
            page = before + mark + "\n" + "\n".join(lines) + "\n\n" + rest[rest.index(end) :]
    return page


def main() -> None:
    results, peer = read_results(RESULTS), figures_file.read(PEER)
    if not workloads(results, SHAPES[0]):
        raise FigureFileError(f"{RESULTS} has no workload of {SHAPES[0]}, of which the table of other cards is made")
    for name, text in pictures(results, peer):
        (DOCS / name).write_text(text, encoding="utf-8")
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), tables(results)), encoding="utf-8")


if __name__ == "__main__":
    run_main(main)
