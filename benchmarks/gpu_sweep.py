"""Decode throughput against slots and context on a GPU, each point beside what the card allows.

    python benchmarks/gpu_sweep.py --json sweep.json
    python benchmarks/gpu_sweep.py --model llama-3.1-8b --slots 1 64 256 --contexts 1024

Random weights, and random numbers as K and V of `context` tokens of every slot: no prompt is computed. Each point is a
row of decode steps as a run makes them, captured, two in flight, each fed with the tokens of the one before. A step's
time is that from its end to the end of the next one on the card's clock, so gaps are in it; the engine's own work is
not, which `tinyvllm bench` measures. The limit is that of a step in tinyvllm_cli/bench/limit.py. A point whose K and V
do not fit beside the model is left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from typing import Any

import figures_file
import numpy as np
from figures_file import shown, spread
from gpu_timeline import equal_rows, fill_pool
from run_main import run_main

from tinyvllm_cli.backends.gpu.backend import GpuBackend
from tinyvllm_cli.backends.gpu.timing import GpuTiming
from tinyvllm_cli.backends.timing import Rates
from tinyvllm_cli.bench.limit import Costs
from tinyvllm_cli.bench.measure import ELEM_BYTES
from tinyvllm_cli.bench.subject import Subject, open_random
from tinyvllm_cli.config import BLOCK_SIZE, EngineOptions
from tinyvllm_cli.types import Batch, SlotOptions

MARK = "tinyvllm_sweep"
SLOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
CONTEXTS = (512, 1024, 2048, 4096, 8192)  # tokens of each slot before the first step
WARM_UP, STEPS = 4, 40  # steps: the first are launched one by one, then captured

Point = dict[str, Any]


def decode_batches(backend: GpuBackend, count: int, context: int, steps: int) -> Iterator[Batch]:
    """Steps of one row of each of `count` slots, behind `context` tokens and then one more each."""
    slots = np.arange(count, dtype=np.int32)
    first = equal_rows(slots, 1, context, backend.limits.vocab_size, room=context + steps)
    last = equal_rows(slots, 1, context + steps - 1, backend.limits.vocab_size, room=context + steps)
    first = replace(first, block_tables=last.block_tables)
    yield first
    for number in range(1, steps):
        yield replace(first, num_computed=first.num_computed + np.int32(number), token_ids=np.full_like(slots, -1))


def fits(backend: GpuBackend, count: int, context: int) -> bool:
    """Whether there are slots, positions and blocks for a point. Block 0 is the null block."""
    tokens, limits = context + WARM_UP + STEPS, backend.limits
    blocks = count * -(-tokens // BLOCK_SIZE)
    return count <= limits.max_slots and tokens <= limits.max_seq_len and blocks < limits.num_blocks


def step_times(backend: GpuBackend, timing: GpuTiming, count: int, context: int) -> list[float]:
    """Seconds from the end of a step to the end of the next, of those after the warm-up."""
    timing.restart()
    ends, pending = [], []
    for batch in decode_batches(backend, count, context, WARM_UP + STEPS):
        pending.append(backend.step(batch))
        ends.append(timing.mark())
        if len(pending) == backend.limits.max_in_flight:
            pending.pop(0).result()
    while pending:
        pending.pop(0).result()
    return np.diff([timing.seconds(end) for end in ends[WARM_UP - 1 :]]).tolist()


def measure_point(
    backend: GpuBackend, timing: GpuTiming, costs: Costs, rates: Rates, count: int, context: int
) -> Point:
    replays = backend.counts().get("graphs", 0)
    seconds = step_times(backend, timing, count, context)
    middle = context + WARM_UP + (STEPS - 1) / 2  # tokens before the step in the middle
    limit = costs.decode_step(rates, rows=count, context=middle)
    return {
        "slots": count,
        "context": context,
        "steps": STEPS,
        "captured_steps": backend.counts().get("graphs", 0) - replays,  # the warm-up's two of them too
        "step_ms": spread([1e3 * each for each in seconds]),
        "tokens_per_s": spread([count / each for each in seconds]),
        "of_limit": spread([limit.seconds / each for each in seconds]),
        "limit": {**asdict(limit), "tokens_per_s": count / limit.seconds},
    }


def row(point: Point) -> str:
    """Of Markdown."""
    cells = (
        f"{point['slots']}",
        f"{point['context']:,}",
        shown(point["step_ms"], ".3f"),
        f"{point['tokens_per_s']['median']:,.0f}",
        f"{point['limit']['tokens_per_s']:,.0f}",
        f"{point['of_limit']['median']:.0%}".replace("%", " %"),
        "" if point["captured_steps"] >= point["steps"] else "not captured",
    )
    return f"| {' | '.join(cells)} |"


HEAD = ("| slots | context | ms a step | tokens/s | limit | share | |", "| --- | --- | --- | --- | --- | --- | --- |")


def sweep(subject: Subject, slots: Sequence[int], contexts: Sequence[int]) -> tuple[Rates, list[Point]]:
    """All points, each printed when it is known."""
    backend = subject.backend
    assert isinstance(backend, GpuBackend)
    with closing(GpuTiming(backend)) as timing:
        rates = timing.rates()
        print(f"reads {rates.read / 1e12:.2f} TB/s, multiplies {rates.product / 1e12:.0f} TFLOP/s\n")
        fill_pool(backend)
        for slot in range(backend.limits.max_slots):
            backend.bind(slot, [1], SlotOptions())
        costs = Costs.of(subject.config, ELEM_BYTES["gpu"], backend.facts.kv_bytes_per_token)
        points = []
        print(*HEAD, sep="\n")
        for context in contexts:
            for count in slots:
                if fits(backend, count, context):
                    points.append(measure_point(backend, timing, costs, rates, count, context))
                    print(row(points[-1]), flush=True)
    return rates, points


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.2-1b")
    parser.add_argument("--kv-dtype", choices=["auto", "fp8"], default="auto")
    parser.add_argument("--slots", nargs="+", type=int, default=SLOTS)
    parser.add_argument("--contexts", nargs="+", type=int, default=CONTEXTS)
    figures_file.add_options(parser)
    options = parser.parse_args()
    length = max(options.contexts) + WARM_UP + STEPS
    engine = EngineOptions(slots=max(options.slots), max_model_len=length, kv_dtype=options.kv_dtype)
    with closing(open_random(options.model, backend="gpu", options=engine, write=None)) as subject:
        facts = figures_file.describe(MARK, subject, options.commit)
        print(f"{subject.name}, {facts['backend']}")
        rates, points = sweep(subject, options.slots, options.contexts)
        figures_file.write(options.json, {**facts, "rates": asdict(rates), "points": points})


if __name__ == "__main__":
    run_main(main)
