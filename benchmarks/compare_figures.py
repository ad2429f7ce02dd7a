"""Compare the figures of two JSON files of `tinyvllm bench` or gpu_sweep.py, or of two folders of them, name by name.

    python benchmarks/compare_figures.py before.json after.json
    python benchmarks/compare_figures.py benchmarks/results new-results --fail-below 97

Each line is a median with least and most before and after, their ratio, and whether the two ranges are apart: a
difference inside of them is none. Exit 1 with --fail-below where output tokens/s come to less than that percentage of
what they were, apart or not; 2 where two files do not measure the same thing. Another card, driver or commit is said:
there the shares of the limit tell more than tokens/s.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import figures_file
from figures_file import BENCH, SWEEP, FigureFileError

Result: TypeAlias = dict[str, Any]
SPEED, SHARE = "tokens/s", "of the limit"
# What two files have to agree on, by their path in them, and two of `tinyvllm bench` beside; and what is only said.
SAME = ("model.name", "config.hidden_size", "config.num_layers", "backend.dtype", "engine.dtype", "engine.kv_dtype")
SAME_RUN = ("workload.lengths_sha256", "engine.slots", "engine.max_batch_tokens", "engine.max_model_len",
            "engine.gpu_memory", "engine.prefix_cache")  # fmt: skip
SAID = ("backend.device", "backend.driver", "backend.cublas", "machine.cpu_model", "tinyvllm", "commit")


class NotComparableError(Exception):
    """What differs between two files, or why there are none."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One figure, twice: median, least and most."""

    name: str
    before: Mapping[str, float]
    after: Mapping[str, float]

    @property
    def ratio(self) -> float:
        return self.after["median"] / self.before["median"]

    @property
    def apart(self) -> bool:
        """Whether no value of one is within the range of the other."""
        return self.after["least"] > self.before["most"] or self.after["most"] < self.before["least"]

    def row(self) -> str:
        """Of Markdown."""
        what = "within the spread" if not self.apart else "more" if self.ratio > 1 else "less"
        cells = (self.name, _shown(self.before), _shown(self.after), f"{self.ratio:.3f}", what)
        return f"| {' | '.join(cells)} |"


def _shown(spread: Mapping[str, float]) -> str:
    median, least, most = (_number(spread[name]) for name in ("median", "least", "most"))
    return f"{median} ({least} - {most})"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.3f}"


def read(path: Path) -> Result:
    """FigureFileError where it is not one of the files above."""
    result = figures_file.read(path)
    if not _is_ours(result):
        raise FigureFileError(f"{path} is no result of `tinyvllm bench --json` or gpu_sweep.py --json")
    return result


def _is_ours(result: Result) -> bool:
    return bool({BENCH, SWEEP} & set(result))


def at(result: Result, place: str) -> Any:
    """The value of a key inside of others: "a.b"; None where it is not there."""
    value: Any = result
    for key in place.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def figures(result: Result) -> dict[str, Mapping[str, float]]:
    """Median, least and most by name."""
    if SWEEP in result:
        return {
            f"{point['slots']} slots, context {point['context']}: {what}": point[key]
            for point in result["points"]
            for what, key in ((SPEED, "tokens_per_s"), (SHARE, "of_limit"))
        }
    found = {SPEED: result["figures"]["tokens_per_s"], SHARE: result["figures"]["of_limit"]}
    start = result.get("start") or {}
    return found | {
        f"start, {name}": dict.fromkeys(("median", "least", "most"), value) for name, value in start.items()
    }


def compare(before: Result, after: Result) -> list[Difference]:
    """Of all figures that both have, one at least. NotComparableError where the files measure different things."""
    if (SWEEP in before) != (SWEEP in after):
        raise NotComparableError("one is a sweep and the other a workload")
    for place in SAME if SWEEP in before else (*SAME, *SAME_RUN):
        if at(before, place) != at(after, place):
            raise NotComparableError(f"{place} differs: {at(before, place)} before, {at(after, place)} after")
    old, new = figures(before), figures(after)
    found = [Difference(name, old[name], new[name]) for name in old if name in new]
    if not found:
        raise NotComparableError("they have no figure in common")
    return found


def said(before: Result, after: Result) -> Iterator[str]:
    for place in SAID:
        if at(before, place) != at(after, place):
            yield f"{place}: {at(before, place)} before, {at(after, place)} after"


def pairs(before: Path, after: Path) -> list[tuple[Path, Path]]:
    """Two files, or those of two folders that have one name; the other benchmarks' files of a folder are left out.

    NotComparableError where there are none, FigureFileError where one of the first folder is broken.
    """
    if not before.is_dir():
        return [(before, after / before.name if after.is_dir() else after)]
    found = [(path, after / path.name) for path in sorted(before.glob("*.json")) if (after / path.name).exists()]
    found = [pair for pair in found if _is_ours(figures_file.read(pair[0]))]
    if not found:
        raise NotComparableError(f"{before} and {after} have no .json file of figures of one name")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--fail-below", type=float, metavar="PERCENT")
    options = parser.parse_args()
    slower: list[str] = []
    try:
        for old, new in pairs(options.before, options.after):
            before, after = read(old), read(new)
            differences = compare(before, after)
            print(f"{old} -> {new}", *said(before, after), "", sep="\n")
            print("| figure | before | after | ratio | |", "| --- | --- | --- | --- | --- |", sep="\n")
            print(*[each.row() for each in differences], "", sep="\n")
            least = (options.fail_below or 0) / 100
            slower += [f"{new}: {each.name}" for each in differences if SPEED in each.name and each.ratio < least]
    except (NotComparableError, FigureFileError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    if slower:
        print(f"below {options.fail_below:g} %:", *slower, sep="\n")
        sys.exit(1)


if __name__ == "__main__":
    main()
