"""Where the time of a step goes on a GPU: every kernel and product, its bytes and operations, and how near the limit.

    python benchmarks/gpu_timeline.py
    python benchmarks/gpu_timeline.py --model llama-3.1-8b --rows 1 256 --context 2048 --json timeline.json

Random weights; decode steps of so many rows behind 800 tokens each, and a step of 8 prompts of 1,024. Kernels are timed
one by one, with events before and after each, while the device has enough to do that it never waits for the host: what
a kernel gains by starting before the end of the one before is not in it. The last lines of a table are the step as a
run makes it, captured where it only decodes, and what that is more than all one by one: gaps, or, below zero, what is
gained and what the events cost. gpu_workload_time.py has the same for the steps of whole workloads.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import figures_file
import numpy as np
from run_main import run_main

from tinyvllm_cli.backends.gpu import ops
from tinyvllm_cli.backends.gpu.attention import PARTIAL_KEYS
from tinyvllm_cli.backends.gpu.attention_work import LEAST_TAILS
from tinyvllm_cli.backends.gpu.backend import GpuBackend
from tinyvllm_cli.backends.gpu.device import elem_dtype
from tinyvllm_cli.backends.gpu.random_weights import fill_matrix
from tinyvllm_cli.backends.gpu.timing import GpuTiming
from tinyvllm_cli.backends.timing import Rates
from tinyvllm_cli.bench.subject import open_random
from tinyvllm_cli.config import BLOCK_SIZE, EngineOptions, ModelConfig
from tinyvllm_cli.types import I32, Batch, SlotOptions

PROMPT, PROMPTS = 1024, 8  # tokens of each prompt, how many
MARK = "tinyvllm_timeline"
# Products of 8,192 rows, 0.8 ms each on an H200: longer than the host needs for a step kernel by kernel, with marks
# around each, and for one as it is. No more of them than that, for a card that has multiplied long has a lower clock.
BUSY_PRODUCTS, BUSY_BEFORE = 40, 3
STEPS = 5  # of which the median counts, one more before them
MAX_FILLED = 1 << 33  # numbers of a launch of fill_random: its bound is twice that


@dataclass(frozen=True, slots=True)
class Work:
    """What a launch has to do at least: bytes read and written, floating-point operations."""

    bytes: float = 0.0
    flops: float = 0.0

    def part(self, share: float) -> Work:
        return Work(share * self.bytes, share * self.flops)


@dataclass(frozen=True, slots=True)
class Share:
    """All launches of one kernel, or of products with one shape, in a step."""

    launches: int
    ms: float
    work: Work  # of all of them


Shares = dict[str, Share]


# ---------------------------------------------------------------- what is timed


class Recorder:
    """Marks around launches, in the place of a device's kernels and products."""

    def __init__(self, timing: GpuTiming, works: dict[str, Work]) -> None:
        self._timing = timing
        self._works = works
        self._spans: list[tuple[str, Work, int, int]] = []

    @contextmanager
    def span(self, name: str, work: Work | None = None) -> Iterator[None]:
        start = self._timing.mark()
        yield
        self._spans.append((name, work or self._works.get(name, Work()), start, self._timing.mark()))

    def shares(self) -> Shares:
        """By name, in the order of the first launch; waits for all of them."""
        found: dict[str, list[Any]] = defaultdict(list)
        for name, work, start, end in self._spans:
            found[name].append((work, 1e3 * (self._timing.seconds(end) - self._timing.seconds(start))))
        return {name: _sum(launches) for name, launches in found.items()}


def _sum(launches: list[tuple[Work, float]]) -> Share:
    nbytes, flops = sum(work.bytes for work, _ in launches), sum(work.flops for work, _ in launches)
    return Share(len(launches), sum(ms for _, ms in launches), Work(nbytes, flops))


class TimedKernels:
    def __init__(self, kernels: Any, recorder: Recorder) -> None:
        self._kernels, self._recorder = kernels, recorder

    def launch(self, name: str, *args: Any, **options: Any) -> None:
        with self._recorder.span(name):
            self._kernels.launch(name, *args, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)


class TimedBlas:
    def __init__(self, blas: Any, recorder: Recorder) -> None:
        self._blas, self._recorder = blas, recorder

    def product(self, out: Any, a: Any, weight: Any, rows: int, *, add: bool = False, **others: Any) -> None:
        (n, k), elem = weight.shape, weight.itemsize
        moved = weight.nbytes + rows * (k * elem + n * out.itemsize * (1 + add))
        with self._recorder.span(f"product {n} x {k}", Work(moved, 2.0 * rows * n * k)):
            self._blas.product(out, a, weight, rows, add=add, **others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._blas, name)


def kernel_works(c: ModelConfig, batch: Batch, token_bytes: float) -> dict[str, Work]:
    """Of one launch of each kernel that has much to do. K and V, of token_bytes a token over all layers, count once,
    whatever reads them again.
    """
    elem, f32 = 2, 4
    rows, sampled = len(batch.token_ids), len(batch.logits_indices)
    kv_row, q_row, kv_bytes = 2 * c.num_kv_heads * c.head_dim, c.num_heads * c.head_dim, token_bytes / c.num_layers
    qkv, gate_up = (q_row + kv_row) * c.hidden_size, 2 * c.intermediate_size * c.hidden_size
    attention = attention_work(c, batch, token_bytes)
    ends = last_partials(batch)
    return {
        "embed": Work(rows * c.hidden_size * (elem + f32)),
        "normed_qkv": Work(elem * qkv + rows * (f32 * c.hidden_size + elem * q_row + kv_bytes), 2.0 * rows * qkv),
        "normed_silu": Work(
            elem * gate_up + rows * (f32 * c.hidden_size + elem * c.intermediate_size), 2.0 * rows * gate_up
        ),
        "rms_norm": Work(rows * c.hidden_size * (f32 + elem)),
        "rope_write": Work(rows * (elem * (2 * q_row + kv_row) + kv_bytes)),
        "attend_ahead": attention,
        "attend_decode": attention.part(1 - ends),  # where attend_tail has the others
        "attend_tail": attention.part(ends),
        "attend_prefill": attention,
        "silu_mul": Work(3 * elem * rows * c.intermediate_size),
        "scan_rows": Work(f32 * sampled * c.vocab_size),
        "sample_rows": Work(f32 * sampled * c.vocab_size),
    }


def attention_work(c: ModelConfig, batch: Batch, token_bytes: float) -> Work:
    """Of attention in one layer."""
    new, before = np.diff(batch.query_start_loc).astype(float), batch.num_computed.astype(float)
    keys, pairs = float((before + new).sum()), float((new * before + new * (new + 1) / 2).sum())
    q_row = c.num_heads * c.head_dim
    return Work(keys * token_bytes / c.num_layers + 2 * 2 * len(batch.token_ids) * q_row, 4 * pairs * q_row)


def last_partials(batch: Batch) -> float:
    """Which share of all keys the last partials of the sequences have, where a kernel of its own has those."""
    if len(batch.slots) < LEAST_TAILS:
        return 0
    keys = batch.num_computed + np.diff(batch.query_start_loc)
    return float(((keys - 1) % PARTIAL_KEYS + 1).sum() / keys.sum())


# ---------------------------------------------------------------- steps


def equal_rows(slots: I32, rows_each: int, computed: int, num_ids: int, *, room: int) -> Batch:
    """A step of as many rows of every slot, the last of each sampled; blocks stand where the slot's number says.

    room: tokens that a slot has blocks for.
    """
    each = -(-room // BLOCK_SIZE)
    width = -(-(computed + rows_each) // BLOCK_SIZE)
    starts = np.arange(len(slots) + 1, dtype=np.int32) * np.int32(rows_each)
    ids = np.random.default_rng(0).integers(0, num_ids, starts[-1]).astype(np.int32)
    return Batch(
        query_start_loc=starts,
        slots=slots,
        block_tables=1 + slots[:, None] * np.int32(each) + np.arange(width, dtype=np.int32),
        num_computed=np.full_like(slots, computed),
        token_ids=ids,
        logits_indices=starts[1:] - 1,
        sample_slots=slots,
    )


def fill_pool(backend: GpuBackend) -> None:
    """Random numbers as K and V of every block; any bytes are codes of FP8, and no time depends on which."""
    device, numbers = backend._device, backend._cache.blocks.view(elem_dtype(backend.facts.dtype))
    matrix = numbers.reshape(len(numbers), -1)
    blocks = MAX_FILLED // matrix.shape[1]
    for part, start in enumerate(range(0, len(matrix), blocks)):
        fill_matrix(device, matrix[start : start + blocks], 0, part)


def keep_busy(backend: GpuBackend, products: int) -> None:
    """Enqueue work behind which the host can lay a step out: what is marked then is the device's time alone."""
    device, weight = backend._device, backend._parameters.layers[0].gate_up.data
    for _ in range(products):
        device.blas.product(device.buffers.gate_up, device.buffers.normed, weight, backend.limits.max_batch_tokens)


def time_kernels(backend: GpuBackend, timing: GpuTiming, batch: Batch) -> Shares:
    """A step kernel by kernel: of each name the round in the middle by its time."""
    device, rounds = backend._device, []
    works = kernel_works(backend._config, batch, backend.facts.kv_bytes_per_token)
    for _ in range(1 + STEPS):
        timing.restart()
        recorder = Recorder(timing, works)
        timed = replace(device, kernels=TimedKernels(device.kernels, recorder), blas=TimedBlas(device.blas, recorder))
        keep_busy(backend, BUSY_PRODUCTS)
        backend._device = timed
        try:
            backend.run(batch, ops)
        finally:
            backend._device = device
        rounds.append(recorder.shares())
    found = rounds[1:]
    return {name: sorted((each[name] for each in found), key=lambda s: s.ms)[STEPS // 2] for name in found[0]}


def time_step(backend: GpuBackend, timing: GpuTiming, batch: Batch) -> float:
    """Milliseconds of the device for a step as a run makes it: the median."""
    found = []
    for _ in range(3 + STEPS):  # libraries load what they need, then it is captured, then replayed
        timing.restart()
        keep_busy(backend, BUSY_BEFORE)
        start = timing.mark()
        pending = backend.step(batch)
        end = timing.mark()
        pending.result()
        found.append(1e3 * (timing.seconds(end) - timing.seconds(start)))
    return float(np.median(found[3:]))


def lines(title: str, shares: Shares, whole: float, rates: Rates) -> Iterator[str]:
    """A table in Markdown; whole: milliseconds of the step as a run makes it."""
    yield f"| {title} | launches | ms | share | GB | of the read rate | of the product rate |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    total = sum_ms(shares)
    for name, share in sorted(shares.items(), key=lambda item: -item[1].ms):
        seconds = share.ms / 1e3
        read, multiplied = share.work.bytes / seconds / rates.read, share.work.flops / seconds / rates.product
        cells = [f"{share.launches}", f"{share.ms:.3f}", percent(share.ms / total), f"{share.work.bytes / 1e9:.3f}"]
        shown = [percent(part) if part else "" for part in (read, multiplied)]
        yield f"| {' | '.join([name, *cells, *shown])} |"
    yield f"| all, one by one | {sum(s.launches for s in shares.values())} | {total:.3f} | | | | |"
    yield f"| the step, as a run makes it | | {whole:.3f} | | | | |"
    yield f"| gaps | | {whole - total:+.3f} | | | | |"


def percent(part: float) -> str:
    return f"{100 * part:.0f} %"


def sum_ms(shares: Shares) -> float:
    return sum(share.ms for share in shares.values())


def facts_of(shares: Shares, whole: float) -> dict[str, Any]:
    """The same for JSON."""
    kernels = {
        name: {"launches": share.launches, "ms": share.ms, "bytes": share.work.bytes, "flops": share.work.flops}
        for name, share in shares.items()
    }
    return {"kernels": kernels, "sum_ms": sum_ms(shares), "step_ms": whole, "gaps_ms": whole - sum_ms(shares)}


def timelines(backend: GpuBackend, timing: GpuTiming, rows: Sequence[int], context: int) -> Iterator[dict[str, Any]]:
    """Each step's facts, its table printed."""
    rates, num_ids, room = timing.rates(), backend.limits.vocab_size, max(context + 1, PROMPT)
    print(f"reads {rates.read / 1e12:.2f} TB/s, multiplies {rates.product / 1e12:.0f} TFLOP/s")
    fill_pool(backend)
    for slot in range(backend.limits.max_slots):
        backend.bind(slot, [1], SlotOptions())
    steps = [(f"decode, {count} rows after {context}", count, 1, context) for count in rows]
    for title, count, rows_each, computed in [*steps, (f"{PROMPTS} prompts of {PROMPT}", PROMPTS, PROMPT, 0)]:
        batch = equal_rows(np.arange(count, dtype=np.int32), rows_each, computed, num_ids, room=room)
        shares, whole = time_kernels(backend, timing, batch), time_step(backend, timing, batch)
        print("", *lines(title, shares, whole, rates), sep="\n", flush=True)
        step = {"step": title, "sequences": count, "rows_each": rows_each, "context": computed}
        yield step | {"rates": asdict(rates)} | facts_of(shares, whole)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.2-1b")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 256], help="of decode steps")
    parser.add_argument("--context", type=int, default=800, help="tokens in place before a decode step")
    figures_file.add_options(parser)
    options = parser.parse_args()
    engine = EngineOptions(slots=max(PROMPTS, *options.rows), max_model_len=max(2 * PROMPT, options.context + 1))
    with closing(open_random(options.model, backend="gpu", options=engine, write=None)) as subject:
        assert isinstance(subject.backend, GpuBackend)
        facts = figures_file.describe(MARK, subject, options.commit)
        print(f"{subject.name}, {facts['backend']}")
        with closing(GpuTiming(subject.backend)) as timing:
            steps = list(timelines(subject.backend, timing, options.rows, options.context))
        figures_file.write(options.json, {**facts, "steps": steps})


if __name__ == "__main__":
    run_main(main)
