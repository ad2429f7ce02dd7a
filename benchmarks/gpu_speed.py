"""Tokens a second of the Llama-3.2-1B shape with random bf16 weights on one GPU, and where a step's time goes.

    python benchmarks/gpu_speed.py
    python benchmarks/gpu_speed.py --only latency mixed --repeat 5

Greedy, EOS ignored, prompts are token ids, through the engine with all that it does between steps (workloads.json has
the lengths). Prefill is held against the rate that the card's matrix library reaches in the same run at the four
products of a layer with 8,192 rows; its share counts the floating-point operations of the products alone, in brackets
with those of attention (half of the square, for it is causal).
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import gpu_timeline
import numpy as np
from gpu_engine import BATCH_TOKENS, LLAMA_1B, Run, answer, fill, open_random, random_values, requests

import tinyvllm_cli
from tinyvllm_cli.backends.gpu.backend import GpuBackend

WORKLOADS = json.loads((Path(__file__).parent / "workloads.json").read_text())
ROUNDS = 7  # of the products


@dataclass(frozen=True)
class Group:
    """Workloads that share a model: the context it is opened with, and what is measured."""

    max_model_len: int
    names: tuple[str, ...]


TIMELINE = "timeline"
GROUPS = (Group(2304, ("latency", "mixed", "short", "prefill-many", TIMELINE)), Group(16_640, ("prefill-one",)))
NAMES = [name for group in GROUPS for name in group.names]
TARGETS = {
    "latency": ">= 970",
    "mixed": ">= 30,000",
    "short": ">= 30,000",
    "prefill-many": ">= 50 %",
    "prefill-one": ">= 50 %",
}


def spread(values: Sequence[float], form: str) -> str:
    """Median (least - most)."""
    return f"{np.median(values):{form}} ({min(values):{form}} - {max(values):{form}})"


def matmul_rate(backend: GpuBackend) -> float:
    """Floating-point operations a second of all layers' four products with BATCH_TOKENS rows: median of ROUNDS."""
    device, layers = backend._device, backend._parameters.layers
    buffers, blas = device.buffers, device.blas
    values = random_values(1.0)  # zeros would need less power, and so run faster than what a model multiplies
    for array in (buffers.normed, buffers.attended, buffers.activated):
        fill(array, values)

    def products() -> None:
        for layer in layers:
            blas.product(buffers.qkv, buffers.normed, layer.qkv.data, BATCH_TOKENS)
            blas.product(buffers.x, buffers.attended, layer.o.data, BATCH_TOKENS, add=True)
            blas.product(buffers.gate_up, buffers.normed, layer.gate_up.data, BATCH_TOKENS)
            blas.product(buffers.x, buffers.activated, layer.down.data, BATCH_TOKENS, add=True)

    products()
    seconds = [gpu_timeline.device_seconds(products, device.stream) for _ in range(ROUNDS)]
    return product_flops(BATCH_TOKENS) / float(np.median(seconds))


def product_flops(rows: int) -> float:
    """Of the products of all layers, head not counted: in prefill it has one row a prompt."""
    c = LLAMA_1B
    heads = (2 * c.num_heads + 2 * c.num_kv_heads) * c.head_dim
    return 2.0 * rows * c.num_layers * c.hidden_size * (heads + 3 * c.intermediate_size)


def attention_flops(prompt_tokens: Sequence[int]) -> float:
    c = LLAMA_1B
    return sum(2.0 * length**2 * c.num_layers * c.num_heads * c.head_dim for length in prompt_tokens)


def report(name: str, runs: list[Run], rate: float) -> str:
    """A line of the table."""
    steps = spread([1e3 * run.seconds / run.steps for run in runs], ".3f")
    if not name.startswith("prefill"):
        figure = spread([run.answer_tokens / run.seconds for run in runs], ",.0f")
        return f"{name:12} {figure:30} {TARGETS[name]:>10}  {steps} ms a step, {runs[0].steps} steps"
    lengths = WORKLOADS[name]["prompt_tokens"]
    products = product_flops(sum(lengths))
    shares = spread([products / run.seconds / rate for run in runs], ".1%")
    seconds = float(np.median([run.seconds for run in runs]))
    whole = (products + attention_flops(lengths)) / seconds / rate
    figure = spread([run.prompt_tokens / run.seconds for run in runs], ",.0f")
    return f"{name:12} {figure:30} {TARGETS[name]:>10}  {shares} of the products' rate (with attention {whole:.1%})"


def measure(group: Group, names: list[str], repeat: int) -> None:
    """Open the model and print a line a workload."""
    chosen = [name for name in group.names if name in names]
    if not chosen:
        return
    backend = open_random(group.max_model_len)
    try:
        facts = backend.facts
        details = ", ".join(f"{name} {value}" for name, value in facts.details.items())
        print(f"\n{facts.device}, {facts.dtype}, context {group.max_model_len}; {details}")
        answer(backend, list(requests([40] * 8, [8] * 8, LLAMA_1B.vocab_size)))  # libraries load what they need
        rate = 0.0
        if any(name.startswith("prefill") for name in chosen):
            rate = matmul_rate(backend)
            print(f"products of a layer with {BATCH_TOKENS} rows: {rate / 1e12:.0f} TFLOP/s")
        for name in chosen:
            if name != TIMELINE:
                asked = list(requests(**WORKLOADS[name], vocab_size=LLAMA_1B.vocab_size))
                print(report(name, [answer(backend, asked) for _ in range(repeat)], rate), flush=True)
        if TIMELINE in chosen:
            gpu_timeline.show(backend)
    finally:
        backend.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    print(f"tinyvllm {tinyvllm_cli.__version__}, Python {platform.python_version()}, NumPy {np.__version__}")
    print("tokens/s (of answers; of prompts where it is prefill): median (least - most), and what is wanted")
    for group in GROUPS:
        measure(group, options.only, options.repeat)


if __name__ == "__main__":
    main()
