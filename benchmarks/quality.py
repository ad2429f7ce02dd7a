"""What FP8 costs in quality: perplexity of a model over text of the standard library, and how far its logits are off.

    python benchmarks/quality.py --backend gpu
    python benchmarks/quality.py --backend cpu --threads 1 --tokens 4096

Beside the CPU in float32, the reference, the model runs with weights in 16 bits, then with those of the layers in FP8,
with K and V in FP8, and with both. The text is that of pydoc_data.topics: the values of its `topics` in their order,
joined by one line end. Its first --tokens tokens are cut into windows of 2,048, which know nothing of each other; where
the tokenizer adds BOS, each begins with one, which counts among the 2,048. Every token of a window but the first is
predicted from those before it (teacher forcing) through Backend.logits. Perplexity is exp of the mean loss; KL is the
mean of sum p log(p / q) over the ids, p of the reference (Kullback & Leibler 1951), in nats; both in float64. Other
versions of Python have other texts, so only figures of one version compare.
"""

from __future__ import annotations

import argparse
import math
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import get_args

import numpy as np
import numpy.typing as npt
from run_main import run_main

from tinyvllm_cli.backends.base import Backend
from tinyvllm_cli.backends.choose import BackendName, Chosen, choose_backend
from tinyvllm_cli.config import BLOCK_SIZE, DEFAULT_MODEL, AskedDtype, EngineOptions, KVDtypeName
from tinyvllm_cli.load import LoadedModel, open_engine
from tinyvllm_cli.run_facts import kv_note
from tinyvllm_cli.text.tokenizer import Tokenizer
from tinyvllm_cli.types import F32, Batch, SlotOptions

TOKENS = 20_000
WINDOW = 2048
MEMORY_SHARE = 0.2  # of what is free on a GPU: all ways to compute are on it at once
CHUNK = 128  # rows of a step, all of them sampled: their logits over 128k ids take 130 MB in float64

F64 = npt.NDArray[np.float64]
Windows = Sequence[Sequence[int]]
Computing = tuple[AskedDtype, KVDtypeName]  # how weights are held, and K and V
REFERENCE: Computing = ("float32", "auto")


def topic_windows(tokenizer: Tokenizer, tokens: int, size: int = WINDOW) -> list[list[int]]:
    """The first tokens of the text, in windows of at most `size`."""
    from pydoc_data.topics import topics

    ids = tokenizer.encode("\n".join(topics.values()), add_bos=False)
    if len(ids) < tokens:
        raise SystemExit(f"--tokens {tokens}: the text of this Python has {len(ids)}")
    start = [tokenizer.bos_token_id] if tokenizer.adds_bos and tokenizer.bos_token_id is not None else []
    step = size - len(start)
    return [start + ids[low : min(low + step, tokens)] for low in range(0, tokens, step)]


def log_softmax(logits: F32) -> F64:
    """[R, V]."""
    rows = logits.astype(np.float64)
    rows -= rows.max(axis=1, keepdims=True)
    rows -= np.log(np.exp(rows).sum(axis=1, keepdims=True))
    return rows


def window_logprobs(backend: Backend, ids: Sequence[int]) -> Iterator[F64]:
    """Log-probabilities of all ids in the place of every token but the first, each given those before it: [R, V], a
    chunk of rows at a time.

    The window is computed in slot 0 and blocks 1, 2 ..., a chunk of rows a step.
    """
    zero = np.zeros(1, np.int32)
    blocks = 1 + np.arange(-(-len(ids) // BLOCK_SIZE), dtype=np.int32)
    backend.bind(0, ids, SlotOptions())
    for low in range(0, len(ids) - 1, CHUNK):
        rows = np.array(ids[low : min(low + CHUNK, len(ids) - 1)], np.int32)
        every = np.arange(len(rows), dtype=np.int32)
        ends = np.array([0, len(rows)], np.int32)
        batch = Batch(ends, zero, blocks[None], zero + np.int32(low), rows, every, np.zeros_like(every))
        yield log_softmax(backend.logits(batch))


@dataclass
class Score:
    """Of one way to compute, over all tokens so far."""

    loss: float = 0.0
    divergence: float = 0.0
    count: int = 0

    def add(self, logprobs: F64, reference: F64, targets: Sequence[int]) -> None:
        """logprobs and reference [R, V], targets [R]."""
        self.loss -= float(logprobs[np.arange(len(targets)), targets].sum())
        self.divergence += float((np.exp(reference) * (reference - logprobs)).sum())
        self.count += len(targets)

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss / self.count)

    @property
    def kl(self) -> float:
        return self.divergence / self.count


def scores(reference: Backend, backends: Sequence[Backend], windows: Windows) -> list[Score]:
    """Of the reference, then of the others; how far they are goes to standard error."""
    found = [Score() for _ in range(1 + len(backends))]
    for number, ids in enumerate(windows, 1):
        chunks = (window_logprobs(backend, ids) for backend in (reference, *backends))
        for low, logprobs in enumerate(zip(*chunks, strict=True)):
            targets = ids[1 + low * CHUNK : 1 + low * CHUNK + len(logprobs[0])]
            for score, own in zip(found, logprobs, strict=True):
                score.add(own, logprobs[0], targets)
        shown = ", ".join(f"{score.perplexity:.4f}" for score in found if score.count)
        print(f"window {number} of {len(windows)}: perplexity {shown}", file=sys.stderr)
    return found


def ways(backend: Chosen) -> list[Computing]:
    """Those that are measured."""
    plain: AskedDtype = "auto" if backend == "gpu" else "bfloat16"
    return [(dtype, kv_dtype) for dtype in (plain, "fp8") for kv_dtype in get_args(KVDtypeName)]


def opened(options: argparse.Namespace, backend: Chosen, computing: Computing) -> LoadedModel:
    dtype, kv_dtype = computing
    engine = EngineOptions(
        slots=CHUNK,
        max_batch_tokens=CHUNK,
        max_model_len=WINDOW,
        dtype=dtype,
        kv_dtype=kv_dtype,
        threads=options.threads,
        gpu_memory=MEMORY_SHARE,
    )
    return open_engine(options.model, backend=backend, config=engine, report=print)


def table(names: Sequence[str], found: Sequence[Score]) -> Iterator[str]:
    yield "| weights, K and V | perplexity | change | mean KL to float32 |"
    yield "| --- | --- | --- | --- |"
    for name, score in zip(names, found, strict=True):
        change = "" if score is found[0] else f"{score.perplexity / found[0].perplexity - 1:+.3%}"
        kl = "" if score is found[0] else f"{score.kl:.6f}"
        yield f"| {name} | {score.perplexity:.4f} | {change} | {kl} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", default=DEFAULT_MODEL)
    parser.add_argument("--backend", choices=get_args(BackendName), default="auto")
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--threads", type=int, help="of the CPU backend")
    options = parser.parse_args()
    if options.tokens < 2:
        parser.error(f"--tokens {options.tokens}: at least 2 are needed to predict one from another")
    chosen = choose_backend(options.backend)
    with ExitStack() as stack:
        every = [("cpu", REFERENCE), *((chosen, way) for way in ways(chosen))]
        models = [stack.enter_context(closing(opened(options, backend, way))) for backend, way in every]
        windows = topic_windows(models[0].codec.tokenizer, options.tokens)
        scored = sum(len(ids) - 1 for ids in windows)
        print(f"{models[0].files.name}, Python {platform.python_version()}:", end=" ")
        print(f"{options.tokens:,} tokens, {scored:,} predicted")
        started = time.perf_counter()
        found = scores(models[0].backend, [model.backend for model in models[1:]], windows)
        facts = [model.backend.facts for model in models]
        names = [
            f"{fact.dtype} on the {fact.device}{kv_note(kv_dtype)}"
            for fact, (_, (_, kv_dtype)) in zip(facts, every, strict=True)
        ]
        print(*table(names, found), f"{time.perf_counter() - started:.0f} s", sep="\n")


if __name__ == "__main__":
    run_main(main)
