"""What the JSON files of benchmarks share: what was measured on what and by which commit, medians with least and most.

A file begins with a key that names its kind, as those of `tinyvllm bench --json` do, then `commit`: the state of the
program, where it is known. `tinyvllm bench` does not know it, for an installed program has no history: this file is
also a script that puts it into what `tinyvllm bench` has written, beside the other facts.

    python benchmarks/figures_file.py --commit "$(git rev-parse HEAD)" benchmarks/results/h200-*.json
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from run_main import run_main

from tinyvllm_cli.bench.bench import result_facts, subject_facts
from tinyvllm_cli.bench.result_file import write_result_file
from tinyvllm_cli.bench.subject import Subject
from tinyvllm_cli.errors import TinyvllmError

ROOT = Path(__file__).parent.parent
Positive = Annotated[float, msgspec.Meta(gt=0)]


class FigureFileError(TinyvllmError):
    """What is wrong with a file, which it names."""


class Spread(msgspec.Struct):
    median: Positive
    least: Positive
    most: Positive


class Figures(msgspec.Struct):
    tokens_per_s: Spread
    of_limit: Spread


class Point(Figures):
    slots: int
    context: int


class Workload(msgspec.Struct):
    name: str


class Bench(msgspec.Struct):
    """What others read of a file of `tinyvllm bench`."""

    workload: Workload
    figures: Figures
    start: dict[str, Positive] | None = None


class Sweep(msgspec.Struct):
    """The same of gpu_sweep.py."""

    points: list[Point]


BENCH, SWEEP = "tinyvllm_bench", "tinyvllm_sweep"  # first keys
FORMS = {BENCH: Bench, SWEEP: Sweep}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the figures")
    parser.add_argument("--commit", help="of this program, where its folder has no history")


def describe(mark: str, subject: Subject, commit: str | None = None) -> dict[str, Any]:
    """All that a file says beside figures. mark: its first key; commit: None: what git says of this folder."""
    facts = result_facts(mark, ["python", *sys.argv])
    return (
        {mark: facts.pop(mark), "commit": commit or found_commit()} | facts | subject_facts(subject, facts["machine"])
    )


def found_commit() -> str | None:
    """The commit of this folder, "-dirty" behind it where files differ; None without git, or without a history."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        found = subprocess.run(command, capture_output=True, check=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": float(np.median(values)), "least": min(values), "most": max(values)}


def shown(found: Mapping[str, float], form: str) -> str:
    """Median (least - most)."""
    return f"{found['median']:{form}} ({found['least']:{form}} - {found['most']:{form}})"


def write(path: Path | None, content: Mapping[str, Any]) -> None:
    if path is not None:
        write_result_file(path, content, indent=1)


def read(path: Path) -> dict[str, Any]:
    """A file of any benchmark. FigureFileError where it is none, or one of FORMS that lacks figures."""
    try:
        content = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError, RecursionError) as error:
        raise FigureFileError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict) or not content:
        raise FigureFileError(f"{path} is no file of figures, wanted a JSON object with some")
    for mark in content.keys() & FORMS:
        try:
            msgspec.convert(content, FORMS[mark])
        except msgspec.ValidationError as error:
            raise FigureFileError(f"{path} is no whole file of {mark}: {error}") from None
    return content


def with_commit(content: Mapping[str, Any], commit: str) -> dict[str, Any]:
    """The commit as the second key; the first one says what kind of file it is."""
    mark = next(iter(content))
    return {mark: content[mark], "commit": commit} | {name: content[name] for name in content if name != "commit"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", required=True)
    parser.add_argument("files", nargs="+", type=Path)
    options = parser.parse_args()
    contents = [read(path) for path in options.files]  # before any is written
    for path, content in zip(options.files, contents, strict=True):
        write(path, with_commit(content, options.commit))


if __name__ == "__main__":
    run_main(main)
