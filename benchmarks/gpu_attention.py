"""Attention alone on a GPU: microseconds a layer, bytes and operations a second, for decode and prefill steps.

    python benchmarks/gpu_attention.py
    python benchmarks/gpu_attention.py --model llama-3.1-8b --kv-dtype fp8

K and V are random numbers, in as many blocks for each layer as the step has; all layers one after another, captured
into a graph as in a step, so that they come from memory and launches take no time. Operations of a causal prompt are
half of the square.
"""

from __future__ import annotations

import argparse
from contextlib import closing
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
from gpu_timeline import attention_work, equal_rows, fill_pool
from run_main import run_main

from tinyvllm_cli.backends.gpu import ops
from tinyvllm_cli.backends.gpu.backend import GpuBackend
from tinyvllm_cli.backends.gpu.random_weights import fill_matrix
from tinyvllm_cli.backends.gpu.timing import GpuTiming
from tinyvllm_cli.bench.subject import open_random
from tinyvllm_cli.config import BLOCK_SIZE, EngineOptions
from tinyvllm_cli.types import Batch, SlotOptions

TOKENS = 16_384  # rows of the largest prefill step
Step: TypeAlias = tuple[int, int, int, int]
STEPS: tuple[Step, ...] = (  # sequences, rows of each, tokens before them, those of them that all have in common
    (1, 1, 400, 0),
    (1, 1, 800, 0),
    (256, 1, 400, 0),
    (256, 1, 1023, 0),
    (256, 1, 1600, 0),
    (256, 1, 1600, 1536),
    (64, 1, 1600, 1536),
    (256, 1, 2047, 0),
    (64, 128, 0, 0),
    (16, 512, 0, 0),
    (8, 2048, 0, 0),
    (1, TOKENS, 0, 0),
)
ROUNDS = 7  # of which the median counts


def attend_all_layers(backend: GpuBackend, rows: Any) -> None:
    """Enqueue the op of every layer, on whatever q is."""
    device, cache = backend._device, backend._cache
    for layer in range(backend._config.num_layers):
        ops.attention(device, device.buffers.q[: rows.num_rows], cache, rows, layer=layer)


def seconds(backend: GpuBackend, timing: GpuTiming, batch: Batch) -> list[float]:
    """Of the device for all layers, in each round."""
    stream, rows = backend._device.stream, backend._resolve(batch)
    ops.place_blocks(backend._device, rows)
    attend_all_layers(backend, rows)  # kernels are loaded at their first launch
    stream.begin_capture()
    attend_all_layers(backend, rows)
    graph = stream.end_capture()
    found = []
    for _ in range(1 + ROUNDS):
        timing.restart()
        graph.launch(stream)
        found.append(timing.seconds(timing.mark()))
    return found[1:]


def shared_rows(step: Step, num_ids: int) -> Batch:
    """equal_rows whose first blocks are the same for all."""
    count, rows_each, before, shared = step
    batch = equal_rows(np.arange(count, dtype=np.int32), rows_each, before, num_ids, room=rows_each + before)
    tables = batch.block_tables.copy()
    tables[:, : shared // BLOCK_SIZE] = tables[0, : shared // BLOCK_SIZE]
    return replace(batch, block_tables=tables)


def line(backend: GpuBackend, timing: GpuTiming, step: Step) -> str:
    """A row of Markdown: median (least - most). Bytes and operations are those of sequences that share nothing."""
    count, rows_each, before, shared = step
    config = backend._config
    batch = shared_rows(step, config.vocab_size)
    work = attention_work(config, batch, backend.facts.kv_bytes_per_token)
    layer = np.array(seconds(backend, timing, batch)) / config.num_layers
    what = f"{count} x {rows_each} after {before}" if before else f"{count} prompts of {rows_each:,}"
    what += f", {shared:,} shared" if shared else ""
    spread = f"{1e6 * np.median(layer):.1f} ({1e6 * layer.min():.1f} - {1e6 * layer.max():.1f})"
    rates = f"{work.bytes / np.median(layer) / 1e12:.2f} | {work.flops / np.median(layer) / 1e12:.0f}"
    return f"| {what} | {spread} | {rates} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.2-1b")
    parser.add_argument("--kv-dtype", choices=["auto", "fp8"], default="auto")
    options = parser.parse_args()
    engine = EngineOptions(slots=256, max_model_len=TOKENS + 16, max_batch_tokens=TOKENS, kv_dtype=options.kv_dtype)
    with closing(open_random(options.model, backend="gpu", options=engine, write=None)) as subject:
        backend = subject.backend
        assert isinstance(backend, GpuBackend)
        timing = GpuTiming(backend)
        device = backend._device
        fill_pool(backend)
        fill_matrix(device, device.buffers.q.reshape(len(device.buffers.q), -1), 0, 1)
        for slot in range(backend.limits.max_slots):
            backend.bind(slot, [1], SlotOptions())
        read = timing.rates().read
        facts = backend.facts
        print(f"{subject.name}, {facts.dtype}, KV {options.kv_dtype}, {facts.device}: {dict(facts.details)}")
        print(f"reads {read / 1e12:.2f} TB/s\n\n| rows | us a layer | TB/s | TFLOP/s |\n| --- | --- | --- | --- |")
        for step in STEPS:
            print(line(backend, timing, step), flush=True)
        timing.close()


if __name__ == "__main__":
    run_main(main)
