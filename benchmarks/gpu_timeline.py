"""Where the time of a step goes: device time of every op, and what the host needs to enqueue it.

The device is kept busy while the host enqueues a step, so that the events around an op tell what the op takes and not
how long the device waited for the host.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import cupy
import numpy as np
from gpu_engine import BATCH_TOKENS, LLAMA_1B

from tinyvllm_cli.backends.gpu import ops
from tinyvllm_cli.backends.gpu.backend import GpuBackend
from tinyvllm_cli.config import BLOCK_SIZE
from tinyvllm_cli.types import I32, Batch, SlotOptions

CONTEXT, PROMPT = 800, 1024  # tokens in place before a decode step; tokens of each prompt of a prefill step
BUSY_PRODUCTS = 40  # of 8,192 rows, about 0.8 ms each on an H200: longer than the host needs for a step
STEPS = 5  # of which the median counts, one more before them

Span = tuple[str, Any, Any]  # op, event before, event after
Figures = dict[str, float]  # milliseconds by op


def device_seconds(work: Callable[[], None], stream: Any) -> float:
    """From the first to the last thing that work enqueues, on the device's clock."""
    start, end = cupy.cuda.Event(), cupy.cuda.Event()
    start.record(stream)
    work()
    end.record(stream)
    end.synchronize()
    return float(cupy.cuda.get_elapsed_time(start, end)) / 1e3


class TimedOps:
    """The ops with an event before and after each; spans has them in the order of the calls."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.spans: list[Span] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            start, end = cupy.cuda.Event(), cupy.cuda.Event()
            start.record(self._stream)
            result = getattr(ops, name)(*args, **options)
            end.record(self._stream)
            self.spans.append((name, start, end))
            return result

        return timed


def equal_rows(slots: I32, rows_each: int, computed: int) -> Batch:
    """A step of as many rows of every slot, the last of each sampled; blocks stand where the slot's number says."""
    each = -(-max(CONTEXT + 1, PROMPT) // BLOCK_SIZE)
    width = -(-(computed + rows_each) // BLOCK_SIZE)
    starts = np.arange(len(slots) + 1, dtype=np.int32) * np.int32(rows_each)
    ids = np.random.default_rng(0).integers(0, LLAMA_1B.vocab_size, starts[-1]).astype(np.int32)
    return Batch(
        query_start_loc=starts,
        slots=slots,
        block_tables=1 + slots[:, None] * np.int32(each) + np.arange(width, dtype=np.int32),
        num_computed=np.full_like(slots, computed),
        token_ids=ids,
        logits_indices=starts[1:] - 1,
        sample_slots=slots,
    )


def fill_context(backend: GpuBackend, slots: I32) -> None:
    """K and V of CONTEXT tokens of every slot."""
    together = BATCH_TOKENS // CONTEXT
    for low in range(0, len(slots), together):
        backend.step(equal_rows(slots[low : low + together], CONTEXT, 0)).result()


def time_step(backend: GpuBackend, batch: Batch) -> Figures:
    """Milliseconds of the device by op; of the host to enqueue the step; of the step from call to tokens, alone."""
    device, figures = backend._device, []
    weight, buffers = backend._parameters.layers[0].gate_up.data, device.buffers
    for _ in range(1 + STEPS):
        timed = TimedOps(device.stream)
        for _ in range(BUSY_PRODUCTS):
            device.blas.product(buffers.gate_up, buffers.normed, weight, BATCH_TOKENS)
        backend.run(batch, timed)
        device.stream.synchronize()
        figures.append(_sums(timed.spans))
    found = {name: float(np.median([each[name] for each in figures[1:]])) for name in figures[0]}
    host, whole = zip(*(_host_times(backend, batch) for _ in range(1 + STEPS)), strict=True)
    return found | {"host enqueues": float(np.median(host[1:])), "step, alone": float(np.median(whole[1:]))}


def _sums(spans: list[Span]) -> Figures:
    sums: Figures = defaultdict(float)
    for name, start, end in spans:
        sums[name] += float(cupy.cuda.get_elapsed_time(start, end))
    sums["device, whole"] = float(cupy.cuda.get_elapsed_time(spans[0][1], spans[-1][2]))
    return sums


def _host_times(backend: GpuBackend, batch: Batch) -> tuple[float, float]:
    """Milliseconds until step() returns, and until its tokens are read."""
    started = time.perf_counter()
    pending = backend.step(batch)
    enqueued = time.perf_counter()
    pending.result()
    return 1e3 * (enqueued - started), 1e3 * (time.perf_counter() - started)


def show(backend: GpuBackend) -> None:
    """Print the table."""
    slots = np.arange(backend.limits.max_slots, dtype=np.int32)
    for slot in slots.tolist():
        backend.bind(slot, [0], SlotOptions())
    fill_context(backend, slots)
    columns = {
        f"decode, 1 row after {CONTEXT}": equal_rows(slots[:1], 1, CONTEXT),
        f"decode, {len(slots)} rows": equal_rows(slots, 1, CONTEXT),
        f"prefill, {BATCH_TOKENS // PROMPT} x {PROMPT}": equal_rows(slots[: BATCH_TOKENS // PROMPT], PROMPT, 0),
    }
    figures = [time_step(backend, batch) for batch in columns.values()]
    print("\n" + " " * 16 + "".join(f"{name:>26}" for name in columns) + "   (ms, all layers of a step)")
    for name in figures[0]:
        print(f"{name:16}" + "".join(f"{each[name]:26.3f}" for each in figures))


if __name__ == "__main__":
    from gpu_engine import open_random

    show(open_random(2304))
