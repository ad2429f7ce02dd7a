"""Logprobs of raw logits, in float32: before penalties, bias, masks and temperature, over the whole vocabulary."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tinyvllm_cli.backends.cpu.filters import Ids, largest
from tinyvllm_cli.types import F32, I32


def logprobs_of_rows(
    logits: F32, finite: npt.NDArray[np.bool_], asked: I32, count: int, num_ids: int
) -> tuple[F32, I32, F32]:
    """Of rows f32[R, V]: the logprobs f32[R] of the ids i32[R] asked for, NaN where that is below 0; the `count`
    likeliest ids i32[R, count], and their logprobs.

    No id from num_ids up is a likeliest one. Where there are no more, and in rows not finite: NaN, and -1 as the id.
    """
    logprobs = np.full(len(logits), np.nan, np.float32)
    top_ids = np.full((len(logits), count), -1, np.int32)
    top_logprobs = np.full((len(logits), count), np.nan, np.float32)
    for r in np.flatnonzero(finite & ((asked >= 0) | (count > 0))).tolist():
        normed = log_softmax(logits[r])
        if asked[r] >= 0:
            logprobs[r] = normed[asked[r]]
        if count:
            ids = likeliest(logits[r, :num_ids], count)
            top_ids[r, : len(ids)] = ids
            top_logprobs[r, : len(ids)] = normed[ids]
    return logprobs, top_ids, top_logprobs


def log_softmax(logits: F32) -> F32:
    """Of logits f32[V]: x - max - log(sum(exp(x - max)))."""
    with np.errstate(over="ignore"):  # towards -inf, whose exp is 0
        shifted = logits - logits.max()
        normed: F32 = shifted - np.log(np.exp(shifted).sum())
    return normed


def likeliest(row: F32, count: int) -> Ids:
    """The `count` ids with the greatest logits of f32[num_ids], the greatest first; of equals the lowest id first."""
    ids = largest(row, min(count, len(row)))
    return ids[np.argsort(-row[ids], kind="stable")]
