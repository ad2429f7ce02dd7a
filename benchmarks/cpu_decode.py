"""Time tinyvllm's CPU backend beside transformers, in turns in one process, on one GGUF model in float32.

    pip install -e '.[reference]' gguf accelerate
    python benchmarks/cpu_decode.py MODEL.gguf

Decode: 37 prompt and 128 new tokens, at 1, 8 and 32 sequences. Prefill: prompts of 512 tokens, at 1 and 8 sequences.
Greedy, random token ids. Each round times one side after the other. The limit of decoding is to read every weight once
a step at the rate of a plain sum (or to multiply it, whichever takes longer); that of prefill is the rate of a large
product.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch  # noqa: TID251  (the other side of the comparison)
import transformers  # noqa: TID251

from tinyvllm_cli.backends.choose import engine_config
from tinyvllm_cli.backends.cpu.backend import CpuBackend
from tinyvllm_cli.backends.cpu.timing import product_rate, read_rate
from tinyvllm_cli.config import BLOCK_SIZE, EngineOptions
from tinyvllm_cli.model.checkpoint import open_checkpoint
from tinyvllm_cli.types import I32, Batch, SlotOptions

DECODE_SEQUENCES, PREFILL_SEQUENCES = (1, 8, 32), (1, 8)
PROMPT, NEW, LONG_PROMPT = 37, 128, 512

# A side: (token ids [S, prompt], new tokens) -> seconds of prefill, seconds of the other new tokens.
Side = Callable[[I32, int], tuple[float, float]]


def prompt_batches(tokens: I32, tables: I32, rows: int) -> Iterator[Batch]:
    """Whole prompts, as many a step as fit into so many rows."""
    sequences, length = tokens.shape
    count = max(1, rows // length)
    for low in range(0, sequences, count):
        slots = np.arange(low, min(low + count, sequences), dtype=np.int32)
        starts = np.arange(len(slots) + 1, dtype=np.int32) * np.int32(length)
        yield Batch(starts, slots, tables[slots], np.zeros_like(slots), tokens[slots].ravel(), starts[1:] - 1, slots)


def ours(backend: CpuBackend) -> Side:
    def run(tokens: I32, new: int) -> tuple[float, float]:
        sequences, length = tokens.shape
        width = -(-(length + new) // BLOCK_SIZE)
        tables = 1 + np.arange(sequences * width, dtype=np.int32).reshape(sequences, width)
        slots, unknown = np.arange(sequences, dtype=np.int32), np.full(sequences, -1, np.int32)
        for slot in range(sequences):
            backend.bind(slot, tokens[slot], SlotOptions())
        started = time.perf_counter()
        for batch in prompt_batches(tokens, tables, backend.limits.max_batch_tokens):
            backend.step(batch).result()
        prefilled = time.perf_counter()
        starts = np.arange(sequences + 1, dtype=np.int32)
        for _ in range(new - 1):
            backend.step(Batch(starts, slots, tables, unknown, unknown, slots, slots)).result()
        return prefilled - started, time.perf_counter() - prefilled

    return run


def theirs(model: transformers.PreTrainedModel) -> Side:
    """The model's forward with its cache, without the overhead of generate()."""

    @torch.inference_mode()
    def run(tokens: I32, new: int) -> tuple[float, float]:
        ids, cache = torch.tensor(tokens, dtype=torch.long), transformers.DynamicCache(config=model.config)
        started = time.perf_counter()
        logits = model(ids, past_key_values=cache, logits_to_keep=1).logits
        prefilled = time.perf_counter()
        for _ in range(new - 1):
            logits = model(logits[:, -1].argmax(-1, keepdim=True), past_key_values=cache).logits
        return prefilled - started, time.perf_counter() - prefilled

    return run


def compare(
    name: str, sides: tuple[Side, Side], bound: float, sequences: int, length: int, new: int, rounds: int
) -> None:
    """One line: tokens a second of both sides, median (least - most) over the rounds, and of the limit."""
    tokens = np.random.default_rng(sequences).integers(100, 40_000, (sequences, length)).astype(np.int32)
    phase, work = (1, new - 1) if new > 1 else (0, length)
    rates = np.array([[sequences * work / side(tokens, new)[phase] for side in sides] for _ in range(rounds)]).T
    shown = [f"{np.median(rate):7.1f} ({rate.min():.1f} - {rate.max():.1f})" for rate in rates]
    ratio, share = np.median(rates[0] / rates[1]), np.median(rates[0]) / bound
    print(f"{name} {sequences:2d}: {shown[0]}, transformers {shown[1]}, ratio {ratio:.2f}, {share:.0%} of {bound:.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--new", type=int, default=NEW)
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    checkpoint = open_checkpoint(options.model)
    asked = EngineOptions(slots=max(DECODE_SEQUENCES), threads=options.threads, max_model_len=1024)
    engine = engine_config("cpu", asked, checkpoint)
    backend = CpuBackend(checkpoint.config, checkpoint.tensors, engine, tokenizer_size=checkpoint.config.vocab_size)
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        options.model.parent, gguf_file=options.model.name, dtype=torch.float32
    ).eval()
    sides = (ours(backend), theirs(reference))
    weights = sum(math.prod(checkpoint.tensors.shape(name)) for name in checkpoint.tensors.names())
    head = checkpoint.config.vocab_size * checkpoint.config.hidden_size
    bytes_per_s, flops = read_rate(options.threads), product_rate(options.threads)
    print(
        f"reads {bytes_per_s / 1e9:.1f} GB/s, multiplies {flops / 1e9:.0f} GFLOP/s, {weights * 4 / 1e9:.3f} GB a step"
    )
    print(f"tokens/s on {options.threads} threads, {options.rounds} rounds: median (least - most)")
    for sequences in DECODE_SEQUENCES:  # a step reads every weight once, and multiplies each with every row
        bound = sequences / max(weights * 4 / bytes_per_s, sequences * 2 * weights / flops)
        compare("decode ", sides, bound, sequences, PROMPT, options.new, options.rounds)
    for sequences in PREFILL_SEQUENCES:  # the head only for a prompt's last row
        compare("prefill", sides, flops / (2 * (weights - head)), sequences, LONG_PROMPT, 1, options.rounds)


if __name__ == "__main__":
    main()
