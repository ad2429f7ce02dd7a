"""The `sample` op: from a row of logits to a token, as a pure function of row, options and position.

Randomness is counter based (Philox4x32-10; Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): the
noise of a token id at a position does not depend on which other ids, rows or steps were computed. The draw is
Gumbel-max (Gumbel 1954; Maddison et al., "A* sampling", 2014): argmax of logit / T + g with g = -log(-log(u)) takes
each id with its softmax probability, and a rounding error moves a draw only where two ids all but tie.

Order of a row: logit_bias on the raw logits; stop ids masked before min_position; greedy, or temperature, top_k, top_p,
min_p, draw. In every comparison of equals the lowest id wins.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tinyvllm_cli.philox import U32, philox4x32_10
from tinyvllm_cli.types import F32, GREEDY_BELOW, I32, SlotOptions

if TYPE_CHECKING:
    from tinyvllm_cli.backends.cpu.gemm import Device
    from tinyvllm_cli.backends.cpu.rows import Rows
    from tinyvllm_cli.backends.cpu.slots import Slots

NAN_LOGITS = -1  # the row holds NaN or an infinity
NOTHING_ALLOWED = -2  # every id is masked

Ids = npt.NDArray[np.intp]

FLOAT32_MAX = float(np.finfo(np.float32).max)


def sample(device: Device, logits: F32, rows: Rows, slots: Slots, *, num_ids: int) -> tuple[I32, F32]:  # noqa: ARG001
    """One token for each sampled row of logits f32[R, V], i32[R], and its logprob f32[R], NaN where not asked for.

    A row's slot (rows.sample_slots) says how to draw, and its token table gets the token, at the row's position plus
    one. See sample_row and logprob.
    """
    positions = rows.positions[rows.logits_indices] + 1
    options = [slots.options[slot] for slot in rows.sample_slots.tolist()]
    token_ids = sample_rows(logits, options, positions, num_ids)
    slots.write(rows.sample_slots, positions, token_ids)
    drawn = zip(logits, token_ids.tolist(), options, strict=True)
    logprobs = [logprob(row, token_id) if slot.logprobs else np.nan for row, token_id, slot in drawn]
    return token_ids, np.array(logprobs, dtype=np.float32)


def sample_rows(logits: F32, options: Sequence[SlotOptions], positions: I32, num_ids: int) -> I32:
    """One token for each row of logits f32[R, V]: i32[R], drawn with options[r] for positions[r]. See sample_row."""
    logits = np.ascontiguousarray(logits)  # a product may leave columns in a row's place, slow for every pass over it
    rows = zip(logits, options, positions.tolist(), strict=True)
    return np.array([sample_row(row, slot, position, num_ids) for row, slot, position in rows], dtype=np.int32)


def sample_row(logits: F32, options: SlotOptions, position: int, num_ids: int) -> int:
    """The token for `position` (that of the row's own token plus one) from raw logits f32[V].

    Ids from num_ids up are past the tokenizer and never come out. NAN_LOGITS if any of the V logits is not finite:
    broken weights must not give an answer that looks good. NOTHING_ALLOWED if every id is masked.
    """
    if not (np.isfinite(logits.min()) and np.isfinite(logits.max())):  # min and max hand NaN on
        return NAN_LOGITS
    row = _with_bias_and_mask(logits[:num_ids], options, position)
    best = int(row.argmax())  # the first of equals
    if row[best] == -np.inf:
        return NOTHING_ALLOWED
    if options.temperature < GREEDY_BELOW:
        return best
    ids = _filtered_ids(row, row[best], options)
    with np.errstate(over="ignore"):  # a logit / T past the range of float32 is an infinity, which compares rightly
        if ids is None:
            return int((row / _temperature(options) + gumbel(options.seed, position, num_ids)).argmax())
        noise = _gumbel_of(ids, options.seed, position, num_ids)
        return int(ids[(row[ids] / _temperature(options) + noise).argmax()])


def logprob(logits: F32, token_id: int) -> float:
    """Log-softmax of raw logits f32[V] at a token, in float32: before bias, masks and temperature, over all V.

    NaN for the marks of a failed draw.
    """
    if token_id < 0:
        return np.nan
    with np.errstate(over="ignore"):  # towards -inf, whose exp is 0
        shifted = logits - logits.max()
    return float(shifted[token_id] - np.log(np.exp(shifted).sum()))


def gumbel(seed: int, position: int, num_ids: int) -> F32:
    """Standard Gumbel noise f32[num_ids] of all ids at a position; seed has 64 bits."""
    blocks = np.arange((num_ids + 3) // 4, dtype=np.uint32)
    return gumbel_from_words(_philox_words(blocks, seed, position).reshape(-1)[:num_ids])


def gumbel_from_words(words: U32) -> F32:
    """g = -log(-log1p(-v)) in float32, v = min(float(w) 2^-32 + 2^-33, 1 - 2^-24).

    float(w) rounds to the nearest float32, ties to even, as CUDA's __uint2float_rn does. The product with 2^-32 is
    exact, so one rounding follows whether or not the sum is fused into an FMA. Words near 2^32 would round to v = 1
    and an infinite g: hence the minimum, the greatest float32 below 1. Small v is where large g comes from, and there
    float32 is dense. log and log1p are the full-accuracy ones (CUDA: logf and log1pf, not __logf).
    """
    v = words.astype(np.float32)
    v *= np.float32(2.0**-32)
    v += np.float32(2.0**-33)
    np.minimum(v, np.float32(1 - 2.0**-24), out=v)
    for step in (np.negative, np.log1p, np.negative, np.log, np.negative):
        step(v, out=v)
    return v


def _philox_words(blocks: U32, seed: int, position: int) -> U32:
    """The four words u32[N, 4] of counters (block, position, 0, 0): those of ids 4 * block .. 4 * block + 3."""
    counter = np.zeros((len(blocks), 4), dtype=np.uint32)
    counter[:, 0] = blocks
    counter[:, 1] = position
    return philox4x32_10(counter, np.array([seed % 2**32, seed >> 32], dtype=np.uint32))


def _gumbel_of(ids: Ids, seed: int, position: int, num_ids: int) -> F32:
    """Noise f32[len(ids)] of some ids: the same as theirs in the whole row."""
    if 4 * len(ids) >= num_ids:  # a block a id would be more work than all blocks
        return gumbel(seed, position, num_ids)[ids]
    words = _philox_words((ids // 4).astype(np.uint32), seed, position)
    return gumbel_from_words(words[np.arange(len(ids)), ids % 4])


def _with_bias_and_mask(row: F32, options: SlotOptions, position: int) -> F32:
    """The row with its bias added and its masked ids at -inf; the row itself where there is nothing to change."""
    masked = options.stop_ids if position < options.min_position else ()
    if not options.logit_bias and not masked:
        return row
    row = row.copy()
    for token_id, bias in options.logit_bias:
        if token_id < len(row):
            row[token_id] += np.float32(bias)
    row[[token_id for token_id in masked if token_id < len(row)]] = -np.inf
    return row


def _temperature(options: SlotOptions) -> np.float32:
    """Finite, so that -inf / T stays -inf."""
    return np.float32(min(options.temperature, FLOAT32_MAX))


def _filtered_ids(row: F32, best: np.float32, options: SlotOptions) -> Ids | None:
    """Ascending ids that top_k, top_p and min_p leave, applied in this order; None: all of them.

    top_p keeps the smallest set of most probable ids that holds at least top_p of what top_k left; min_p keeps ids
    with at least min_p times the greatest probability. Ids are ordered by logit, which tells apart probabilities that
    round to one number.
    """
    ids: Ids | None = None
    if 0 < options.top_k < len(row):
        ids = _largest(row, options.top_k)
        row = row[ids]
    if options.top_p < 1:
        kept = _largest(row, _nucleus_size(_relative_probability(row, best, options), options.top_p))
        ids = kept if ids is None else ids[kept]
        row = row[kept]
    if options.min_p > 0:
        kept = np.flatnonzero(_relative_probability(row, best, options) >= np.float32(options.min_p))
        ids = kept if ids is None else ids[kept]
    return ids


def _relative_probability(row: F32, best: np.float32, options: SlotOptions) -> F32:
    """Probability over that of the most probable id, after temperature: in [0, 1], never NaN."""
    with np.errstate(over="ignore"):  # towards -inf, whose exp is 0
        relative: F32 = np.exp((row - best) / _temperature(options))
    return relative


def _nucleus_size(relative_probability: F32, top_p: float) -> int:
    """How many of the most probable ids it takes to hold top_p of the mass; sums in float64."""
    mass = np.cumsum(np.sort(relative_probability)[::-1], dtype=np.float64)
    return int(np.searchsorted(mass, top_p * mass[-1])) + 1


def _largest(row: F32, count: int) -> Ids:
    """Ascending indices of the `count` largest values; at the border the lowest indices."""
    border = np.partition(row, len(row) - count)[len(row) - count]
    keep = row > border
    ties = np.flatnonzero(row == border)
    keep[ties[: count - np.count_nonzero(keep)]] = True
    return np.flatnonzero(keep)
