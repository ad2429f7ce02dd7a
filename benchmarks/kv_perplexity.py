"""Perplexity of a model over text of the standard library, with K and V as they are computed and then in FP8.

    python benchmarks/kv_perplexity.py --backend gpu
    python benchmarks/kv_perplexity.py --backend cpu --dtype bfloat16 --threads 1 --tokens 4096

The text is that of pydoc_data.topics: the values of its `topics` in their order, joined by one line end. Its first
--tokens tokens are cut into windows of 2,048, which know nothing of each other; where the tokenizer adds BOS, each
begins with one, which counts among the 2,048. Every token of a window but the first is predicted from those before it
(teacher forcing) through Backend.logits; the log-softmax is in float64. Other versions of Python have other texts, so
only figures of one version compare.
"""

from __future__ import annotations

import argparse
import math
import platform
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from typing import get_args

import numpy as np
import numpy.typing as npt

from tinyvllm_cli.backends.base import Backend
from tinyvllm_cli.backends.choose import BackendName
from tinyvllm_cli.config import BLOCK_SIZE, DEFAULT_MODEL, AskedDtype, EngineOptions, KVDtypeName
from tinyvllm_cli.errors import TinyvllmError
from tinyvllm_cli.load import LoadedModel, open_engine
from tinyvllm_cli.text.tokenizer import Tokenizer
from tinyvllm_cli.types import F32, Batch, SlotOptions

TOKENS = 20_000
WINDOW = 2048
CHUNK = 128  # rows of a step, all of them sampled: their logits over 128k ids take 130 MB in float64

Losses = npt.NDArray[np.float64]
Windows = Sequence[Sequence[int]]


def topic_windows(tokenizer: Tokenizer, tokens: int, size: int = WINDOW) -> list[list[int]]:
    """The first tokens of the text, in windows of at most `size`."""
    from pydoc_data.topics import topics

    ids = tokenizer.encode("\n".join(topics.values()), add_bos=False)
    if len(ids) < tokens:
        raise SystemExit(f"--tokens {tokens}: the text of this Python has {len(ids)}")
    start = [tokenizer.bos_token_id] if tokenizer.adds_bos and tokenizer.bos_token_id is not None else []
    step = size - len(start)
    return [start + ids[low : min(low + step, tokens)] for low in range(0, tokens, step)]


def losses(logits: F32, targets: Sequence[int]) -> Losses:
    """-log p of each row's target: logits [R, V], targets [R]."""
    rows = logits.astype(np.float64)
    best = rows.max(axis=1)
    mass = np.exp(rows - best[:, None]).sum(axis=1)
    found: Losses = best + np.log(mass) - rows[np.arange(len(rows)), targets]
    return found


def window_losses(backend: Backend, ids: Sequence[int]) -> Losses:
    """-log p of every token but the first, each given those before it; [len(ids) - 1].

    The window is computed in slot 0 and blocks 1, 2 ..., a chunk of rows a step.
    """
    zero = np.zeros(1, np.int32)
    blocks = 1 + np.arange(-(-len(ids) // BLOCK_SIZE), dtype=np.int32)
    backend.bind(0, ids, SlotOptions())
    found = []
    for low in range(0, len(ids) - 1, CHUNK):
        rows = np.array(ids[low : min(low + CHUNK, len(ids) - 1)], np.int32)
        every = np.arange(len(rows), dtype=np.int32)
        ends = np.array([0, len(rows)], np.int32)
        batch = Batch(ends, zero, blocks[None], zero + np.int32(low), rows, every, np.zeros_like(every))
        found.append(losses(backend.logits(batch), ids[low + 1 : low + 1 + len(rows)]))
    return np.concatenate(found) if found else np.zeros(0)


def perplexity(backend: Backend, windows: Windows, name: str) -> float:
    """exp of the mean loss over the tokens of all windows; how far it is goes to standard error."""
    total, count = 0.0, 0
    for number, ids in enumerate(windows, 1):
        found = window_losses(backend, ids)
        total, count = total + float(found.sum()), count + len(found)
        print(f"{name}: window {number} of {len(windows)}, {math.exp(total / max(count, 1)):.4f}", file=sys.stderr)
    return math.exp(total / count)


def opened(options: argparse.Namespace, kv_dtype: KVDtypeName) -> LoadedModel:
    engine = EngineOptions(
        slots=CHUNK,
        max_batch_tokens=CHUNK,
        max_model_len=WINDOW,
        dtype=options.dtype,
        kv_dtype=kv_dtype,
        threads=options.threads,
    )
    return open_engine(options.model, backend=options.backend, config=engine, report=print)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--backend", choices=get_args(BackendName), default="auto")
    parser.add_argument("--dtype", choices=get_args(AskedDtype), default="auto", help="of the weights")
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--threads", type=int, help="of the CPU backend")
    options = parser.parse_args()
    if options.tokens < 2:
        parser.error(f"--tokens {options.tokens}: at least 2 are needed to predict one from another")
    found = {}
    for kv_dtype in get_args(KVDtypeName):
        with closing(opened(options, kv_dtype)) as loaded:
            windows = topic_windows(loaded.codec.tokenizer, options.tokens)
            facts = loaded.backend.facts
            if not found:
                scored = sum(len(ids) - 1 for ids in windows)
                print(f"{loaded.files.name}, {facts.dtype} weights on the {facts.device}")
                print(f"Python {platform.python_version()}: {options.tokens:,} tokens, {scored:,} of them predicted")
            started = time.perf_counter()
            found[kv_dtype] = perplexity(loaded.backend, windows, f"--kv-dtype {kv_dtype}")
            seconds = time.perf_counter() - started
            bytes_each = facts.kv_bytes_per_token
            print(f"{kv_dtype}: perplexity {found[kv_dtype]:.5f}, {bytes_each:,} bytes a token, {seconds:.1f} s")
    print(f"change: {found['fp8'] / found['auto'] - 1:+.3%}")


if __name__ == "__main__":
    try:
        main()
    except TinyvllmError as error:
        sys.exit(f"error: {error}")
