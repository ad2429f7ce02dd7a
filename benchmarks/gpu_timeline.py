"""Where the time of a step goes on a GPU: every kernel and product, its bytes and operations, and how near the limit.

    python benchmarks/gpu_timeline.py
    python benchmarks/gpu_timeline.py --model llama-3.1-8b --rows 1 256

Random weights; decode steps of so many rows behind 800 tokens each, and a step of 8 prompts of 1,024. Kernels are timed
one by one, with events before and after each, while the device has enough to do that it never waits for the host: what
a kernel gains by starting before the end of the one before is not in it. The last line of a table is the step as a run
makes it, captured where it only decodes.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tinyvllm_cli.backends.gpu import ops
from tinyvllm_cli.backends.gpu.backend import GpuBackend
from tinyvllm_cli.backends.gpu.timing import GpuTiming
from tinyvllm_cli.backends.timing import Rates
from tinyvllm_cli.bench.subject import open_random
from tinyvllm_cli.config import BLOCK_SIZE, EngineOptions, ModelConfig
from tinyvllm_cli.types import I32, Batch, SlotOptions

CONTEXT, PROMPT, PROMPTS = 800, 1024, 8  # tokens in place before a decode step; tokens of each prompt, how many
BUSY_PRODUCTS = 40  # of 8,192 rows, about 0.8 ms each on an H200: longer than the host needs for a step
STEPS = 5  # of which the median counts, one more before them


@dataclass(frozen=True, slots=True)
class Work:
    """What a launch has to do at least: bytes read and written, floating-point operations."""

    bytes: float = 0.0
    flops: float = 0.0


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

    def product(self, out: Any, a: Any, weight: Any, rows: int, *, add: bool = False) -> None:
        (n, k), elem = weight.shape, weight.itemsize
        moved = weight.nbytes + rows * (k * elem + n * out.itemsize * (1 + add))
        with self._recorder.span(f"product {n} x {k}", Work(moved, 2.0 * rows * n * k)):
            self._blas.product(out, a, weight, rows, add=add)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._blas, name)


def kernel_works(c: ModelConfig, batch: Batch, token_bytes: float) -> dict[str, Work]:
    """Of one launch of each kernel that has much to do. K and V, of token_bytes a token over all layers, count once,
    whatever reads them again.
    """
    elem, f32 = 2, 4
    rows, sampled = len(batch.token_ids), len(batch.logits_indices)
    new, before = np.diff(batch.query_start_loc).astype(float), batch.num_computed.astype(float)
    keys, pairs = float((before + new).sum()), float((new * before + new * (new + 1) / 2).sum())
    kv_row, q_row, kv_bytes = 2 * c.num_kv_heads * c.head_dim, c.num_heads * c.head_dim, token_bytes / c.num_layers
    qkv, gate_up = (q_row + kv_row) * c.hidden_size, 2 * c.intermediate_size * c.hidden_size
    attention = Work(keys * kv_bytes + 2 * elem * rows * q_row, 4 * pairs * q_row)
    return {
        "embed": Work(rows * c.hidden_size * (elem + f32)),
        "normed_qkv": Work(elem * qkv + rows * (f32 * c.hidden_size + elem * q_row + kv_bytes), 2.0 * rows * qkv),
        "normed_silu": Work(
            elem * gate_up + rows * (f32 * c.hidden_size + elem * c.intermediate_size), 2.0 * rows * gate_up
        ),
        "rms_norm": Work(rows * c.hidden_size * (f32 + elem)),
        "rope_write": Work(rows * (elem * (2 * q_row + kv_row) + kv_bytes)),
        "attend_decode": attention,
        "attend_prefill": attention,
        "silu_mul": Work(3 * elem * rows * c.intermediate_size),
        "scan_rows": Work(f32 * sampled * c.vocab_size),
        "sample_rows": Work(f32 * sampled * c.vocab_size),
    }


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


def room() -> int:
    """Tokens of a slot in any of the steps."""
    return max(CONTEXT + 1, PROMPT)


def fill_context(backend: GpuBackend, slots: I32) -> None:
    """K and V of CONTEXT tokens of every slot."""
    limits = backend.limits
    for slot in range(len(slots)):
        backend.bind(slot, [1], SlotOptions())
    together = limits.max_batch_tokens // CONTEXT
    for low in range(0, len(slots), together):
        backend.step(equal_rows(slots[low : low + together], CONTEXT, 0, limits.vocab_size, room=room())).result()


def time_kernels(backend: GpuBackend, timing: GpuTiming, batch: Batch) -> Shares:
    """A step kernel by kernel: of each name the round in the middle by its time."""
    device, rounds = backend._device, []
    weight, buffers = backend._parameters.layers[0].gate_up.data, device.buffers
    works = kernel_works(backend._config, batch, backend.facts.kv_bytes_per_token)
    for _ in range(1 + STEPS):
        timing.restart()
        recorder = Recorder(timing, works)
        timed = replace(device, kernels=TimedKernels(device.kernels, recorder), blas=TimedBlas(device.blas, recorder))
        for _ in range(BUSY_PRODUCTS):
            device.blas.product(buffers.gate_up, buffers.normed, weight, backend.limits.max_batch_tokens)
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
        pending = backend.step(batch)
        end = timing.mark()
        pending.result()
        found.append(1e3 * timing.seconds(end))
    return float(np.median(found[3:]))


def lines(title: str, shares: Shares, whole: float, rates: Rates) -> Iterator[str]:
    """A table in Markdown."""
    yield f"| {title} | launches | ms | share | GB | of the read rate | of the product rate |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    total = sum(share.ms for share in shares.values())
    for name, share in sorted(shares.items(), key=lambda item: -item[1].ms):
        seconds = share.ms / 1e3
        read, multiplied = share.work.bytes / seconds / rates.read, share.work.flops / seconds / rates.product
        cells = [f"{share.launches}", f"{share.ms:.3f}", f"{share.ms / total:.1%}", f"{share.work.bytes / 1e9:.3f}"]
        shown = [f"{part:.0%}" if part else "" for part in (read, multiplied)]
        yield f"| {' | '.join([name, *cells, *shown])} |"
    yield f"| all, one by one | {sum(s.launches for s in shares.values())} | {total:.3f} | | | | |"
    yield f"| the step, as a run makes it | | {whole:.3f} | | | | |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.2-1b")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 256], help="of decode steps")
    options = parser.parse_args()
    engine = EngineOptions(slots=max(PROMPTS, *options.rows), max_model_len=2 * PROMPT)
    with closing(open_random(options.model, backend="gpu", options=engine, write=None)) as subject:
        backend = subject.backend
        assert isinstance(backend, GpuBackend)
        timing = GpuTiming(backend)
        rates = timing.rates()
        print(f"{subject.name}, {backend.facts.dtype}, {backend.facts.device}: {dict(backend.facts.details)}")
        print(f"reads {rates.read / 1e12:.2f} TB/s, multiplies {rates.product / 1e12:.0f} TFLOP/s")
        fill_context(backend, np.arange(engine.slots, dtype=np.int32))
        steps = [(f"decode, {rows} rows after {CONTEXT}", rows, 1, CONTEXT) for rows in options.rows]
        for title, count, rows_each, computed in [*steps, (f"{PROMPTS} prompts of {PROMPT}", PROMPTS, PROMPT, 0)]:
            slots = np.arange(count, dtype=np.int32)
            batch = equal_rows(slots, rows_each, computed, backend.limits.vocab_size, room=room())
            shares = time_kernels(backend, timing, batch)
            print("", *lines(title, shares, time_step(backend, timing, batch), rates), sep="\n", flush=True)
        timing.close()


if __name__ == "__main__":
    main()
