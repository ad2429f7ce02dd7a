"""Prefill of 16,384 tokens on a GPU, as 16 prompts and as one, beside the rate of the model's own products.

    python benchmarks/gpu_prefill.py
    python benchmarks/gpu_prefill.py --model llama-3.1-8b --trials 5

Random weights, through the engine, one token of an answer each. The first share counts the floating-point operations of
the products alone; the second one all, with those of attention, which is causal: half of the square.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import closing, nullcontext

import numpy as np
from run_main import run_main

from tinyvllm_cli.bench.measure import Measured, measure
from tinyvllm_cli.bench.subject import open_random
from tinyvllm_cli.bench.workloads import random_requests
from tinyvllm_cli.config import EngineOptions, ModelConfig

TOKENS = 16_384
COUNTS = (16, 1)


def product_flops(c: ModelConfig, rows: int) -> float:
    """Of all layers; the head has one row a prompt."""
    heads = (2 * c.num_heads + 2 * c.num_kv_heads) * c.head_dim
    return 2.0 * rows * c.num_layers * c.hidden_size * (heads + 3 * c.intermediate_size)


def line(count: int, config: ModelConfig, measured: Measured) -> str:
    """Median (least - most) of the trials, in a row of Markdown."""
    seconds = np.array([trial.seconds for trial in measured.trials])
    rate = measured.rates.product
    figures = (
        spread(TOKENS / seconds, ",.0f"),
        spread(product_flops(config, TOKENS) / seconds / rate, ".1%"),
        spread(measured.limit.flops / seconds / rate, ".1%"),
        f"{rate / 1e12:.0f} TFLOP/s",
    )
    return f"| {count} of {TOKENS // count:,} | {' | '.join(figures)} |"


def spread(values: Sequence[float], form: str) -> str:
    return f"{np.median(values):{form}} ({min(values):{form}} - {max(values):{form}})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.2-1b")
    parser.add_argument("--trials", type=int, default=5)
    options = parser.parse_args()
    engine = EngineOptions(max_model_len=TOKENS + 16)
    with closing(open_random(options.model, backend="gpu", options=engine, write=None)) as subject:
        facts = subject.backend.facts
        print(f"{subject.name}, {facts.dtype}, {facts.device}: {dict(facts.details)}\n")
        print("| prompts | prompt tokens a second | products, of their rate | with attention | rate |")
        print("| --- | --- | --- | --- | --- |")
        for count in COUNTS:
            requests = random_requests([TOKENS // count] * count, [1] * count, num_ids=subject.num_ids)
            found = measure(subject, "prefill", requests, options.trials, hold=nullcontext)
            print(line(count, subject.config, found), flush=True)


if __name__ == "__main__":
    run_main(main)
