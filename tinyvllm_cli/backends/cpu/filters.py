"""Filters of a draw: the ids that top_k, top_p and min_p leave, and the temperature that goes before them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tinyvllm_cli.types import F32, SlotOptions

Ids = npt.NDArray[np.intp]

FLOAT32_MAX = float(np.finfo(np.float32).max)


def temperature(options: SlotOptions) -> np.float32:
    """Of a row that is not greedy: finite, so that -inf / T stays -inf."""
    return np.float32(min(options.temperature, FLOAT32_MAX))


def filtered_ids(row: F32, best: np.float32, options: SlotOptions) -> Ids | None:
    """Ascending ids that top_k, top_p and min_p leave, applied in this order; None: all of them.

    top_p keeps the smallest set of most probable ids that holds at least top_p of what top_k left; min_p keeps ids
    with at least min_p times the greatest probability. Ids are ordered by logit, which tells apart probabilities that
    round to one number.
    """
    ids: Ids | None = None
    if 0 < options.top_k < len(row):
        ids = largest(row, options.top_k)
        row = row[ids]
    if options.top_p < 1:
        kept = largest(row, _nucleus_size(_relative_probability(row, best, options), options.top_p))
        ids = kept if ids is None else ids[kept]
        row = row[kept]
    if options.min_p > 0:
        kept = np.flatnonzero(_relative_probability(row, best, options) >= np.float32(options.min_p))
        ids = kept if ids is None else ids[kept]
    return ids


def _relative_probability(row: F32, best: np.float32, options: SlotOptions) -> F32:
    """Probability over that of the most probable id, after temperature: in [0, 1], never NaN."""
    with np.errstate(over="ignore"):  # towards -inf, whose exp is 0
        relative: F32 = np.exp((row - best) / temperature(options))
    return relative


def _nucleus_size(relative_probability: F32, top_p: float) -> int:
    """How many of the most probable ids it takes to hold top_p of the mass; sums in float64."""
    mass = np.cumsum(np.sort(relative_probability)[::-1], dtype=np.float64)
    return int(np.searchsorted(mass, top_p * mass[-1])) + 1


def largest(row: F32, count: int) -> Ids:
    """Ascending indices of the `count` largest of f32[N], 0 < count <= N; at the border the lowest indices."""
    border = np.partition(row, len(row) - count)[len(row) - count]
    keep = row > border
    ties = np.flatnonzero(row == border)
    keep[ties[: count - np.count_nonzero(keep)]] = True
    return np.flatnonzero(keep)
