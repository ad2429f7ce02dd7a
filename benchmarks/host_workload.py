"""What whole workloads cost the host, with a card that takes every call and computes nothing (tests/idle_gpu.py).

    python benchmarks/host_workload.py
    python benchmarks/host_workload.py --workloads prefix --trials 9

Each workload of `tinyvllm bench` runs once for practice, then as often as asked for: what a run and a step take, and
the longest steps, which a card would have to wait for; then once more with clocks around the parts of a step.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

from host_clock import Clock, parts_table

from tinyvllm_cli.backends.base import Backend
from tinyvllm_cli.bench.meter import Meter
from tinyvllm_cli.bench.runner import Trial, run_trial
from tinyvllm_cli.bench.subject import IdCodec
from tinyvllm_cli.bench.workloads import NAMED, named_requests
from tinyvllm_cli.engine.engine import Engine
from tinyvllm_cli.steady import steady
from tinyvllm_cli.types import Request

sys.path.append(str(Path(__file__).parent.parent / "tests"))

SLOTS, CONTEXT = 256, 2304
LONGEST = 10  # steps that are shown together


class NoTiming:
    """A clock of a device that does nothing."""

    at_once = False

    def restart(self) -> None: ...

    def mark(self) -> int:
        return 0

    def seconds(self, mark: int) -> float:  # noqa: ARG002
        return 0.0


def run(backend: Backend, requests: Sequence[Request]) -> tuple[Trial, list[float]]:
    """A trial, and the seconds of each of its steps."""
    timing, seconds, step = NoTiming(), list[float](), Engine.step

    def timed(engine: Engine) -> object:
        started = time.perf_counter()
        events = step(engine)
        seconds.append(time.perf_counter() - started)
        return events

    with patch.object(Engine, "step", timed):
        trial = run_trial(
            Meter(backend, timing),
            timing,
            IdCodec(backend.limits.vocab_size),
            requests,
            eos_token_ids=(),
            prefix_cache=True,
            hold=nullcontext,
        )
    return trial, seconds


HEAD = (
    f"| workload | steps | a run, ms | ms a step | middling step, ms | first step, ms | {LONGEST} longest others, ms |",
    "| --- | --- | --- | --- | --- | --- | --- |",
)


def line(workload: str, trials: Sequence[tuple[Trial, list[float]]]) -> str:
    """Of Markdown: medians, with the least and the most of the runs."""
    runs = sorted(1e3 * trial.seconds for trial, _ in trials)
    steps = [sorted(seconds[1:]) for _, seconds in trials]
    first = 1e3 * statistics.median(seconds[0] for _, seconds in trials)
    middling = 1e3 * statistics.median(statistics.median(seconds) for seconds in steps)
    longest = 1e3 * statistics.median(sum(seconds[-LONGEST:]) for seconds in steps)
    count, median = len(trials[0][0].steps), statistics.median(runs)
    cells = f"{median:.1f} ({runs[0]:.1f} - {runs[-1]:.1f}) | {median / count:.3f}"
    return f"| {workload} | {count} | {cells} | {middling:.3f} | {first:.1f} | {longest:.1f} |"


def measure(backend: Backend, workloads: Sequence[str], num_trials: int) -> Iterator[str]:
    clocks = {}
    yield from HEAD
    for workload in workloads:
        requests = named_requests(workload, backend.limits.vocab_size)
        run(backend, requests)
        yield line(workload, [run(backend, requests) for _ in range(num_trials)])
        clocks[workload] = Clock()
        with clocks[workload].watching(backend):
            run(backend, requests)
    yield ""
    yield from parts_table(clocks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=NAMED, default=list(NAMED))
    parser.add_argument("--trials", type=int, default=5)
    options = parser.parse_args()
    from idle_gpu import CONFIG, idle_backend

    with idle_backend(SLOTS, replace(CONFIG, max_position=CONTEXT)) as (backend, _), steady():
        for row in measure(backend, options.workloads, options.trials):
            print(row, flush=True)


if __name__ == "__main__":
    main()
