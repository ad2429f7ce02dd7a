"""The `sample` op: from a row of logits to a token, as a pure function of row, options and position.

Randomness is counter based (Philox4x32-10; Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): the
noise of a token id at a position does not depend on which other ids, rows or steps were computed. The draw is
Gumbel-max (Gumbel 1954; Maddison et al., "A* sampling", 2014): argmax of logit / T + g with g = -log(-log(u)) takes
each id with its softmax probability, and a rounding error moves a draw only where two ids all but tie.

Order of a row: penalties on the raw logits; logit_bias; masks (those of the step, and stop ids before min_position);
greedy, or temperature, top_k, top_p, min_p, draw. In every comparison of equals the lowest id wins.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tinyvllm_cli.backends.cpu.filters import Ids, filtered_ids, temperature
from tinyvllm_cli.backends.cpu.logprobs import logprobs_of_rows
from tinyvllm_cli.backends.cpu.penalties import has_penalties, penalize
from tinyvllm_cli.philox import philox4x32_10
from tinyvllm_cli.types import F32, GREEDY_BELOW, I32, U32, SlotOptions, StepOutput

if TYPE_CHECKING:
    from tinyvllm_cli.backends.cpu.gemm import Device
    from tinyvllm_cli.backends.cpu.rows import Rows
    from tinyvllm_cli.backends.cpu.slots import Slots

NAN_LOGITS = -1  # the row holds NaN or an infinity
NOTHING_ALLOWED = -2  # every id is masked

NO_TOKENS: I32 = np.zeros(0, np.int32)
RAW_GREEDY = SlotOptions()


def sample(device: Device, logits: F32, rows: Rows, slots: Slots, *, num_ids: int) -> StepOutput:  # noqa: ARG001
    """A token for each sampled row of logits f32[R, V], and the logprobs that rows and slots ask for.

    A row's slot (rows.sample_slots) says how to draw, and its token table gets the token, at the row's position plus
    one. A row with a target gives the greedy token of its raw logits, and the table nothing. See sample_row.
    """
    logits = np.ascontiguousarray(logits)  # a product may leave columns in a row's place, slow for every pass over it
    positions = rows.positions[rows.logits_indices] + 1
    targets = np.full(len(positions), -1, np.int32) if rows.targets is None else rows.targets
    draws = targets < 0
    places = list(zip(rows.sample_slots.tolist(), positions.tolist(), draws.tolist(), strict=True))
    options = [slots.options[slot] if drawn else RAW_GREEDY for slot, _, drawn in places]
    histories = [slots.token_table[slot, :position] for slot, position, _ in places]
    token_ids = sample_rows(logits, options, positions, num_ids, histories, _masks_of_rows(rows, draws))
    slots.write(rows.sample_slots[draws], positions[draws], token_ids[draws])

    asked = np.where(draws, np.where([slot.logprobs for slot in options], token_ids, -1), targets)
    finite = token_ids != NAN_LOGITS
    logprobs, top_ids, top_logprobs = logprobs_of_rows(logits, finite, asked, rows.top_logprobs, num_ids)
    tops = (top_ids[None], top_logprobs[None]) if rows.top_logprobs else (None, None)
    return StepOutput(token_ids[None], logprobs[None], *tops)


def sample_rows(
    logits: F32,
    options: Sequence[SlotOptions],
    positions: I32,
    num_ids: int,
    histories: Sequence[I32] | None = None,
    masks: Sequence[U32 | None] | None = None,
) -> I32:
    """One token for each row of logits f32[R, V]: i32[R], drawn with options[r] for positions[r]. See sample_row."""
    histories = [NO_TOKENS] * len(logits) if histories is None else histories
    masks = [None] * len(logits) if masks is None else masks
    rows = zip(logits, options, positions.tolist(), [num_ids] * len(logits), histories, masks, strict=True)
    return np.array([sample_row(*row) for row in rows], dtype=np.int32)


def sample_row(
    logits: F32,
    options: SlotOptions,
    position: int,
    num_ids: int,
    history: I32 = NO_TOKENS,
    mask: U32 | None = None,
) -> int:
    """The token for `position` (that of the row's own token plus one) from raw logits f32[V].

    history: the tokens at positions 0.., up to the row's own, which penalties read. mask: u32[ceil(V / 32)], bit
    id % 32 of word id / 32 set where an id is allowed; None: all are.
    Ids from num_ids up are past the tokenizer and never come out. NAN_LOGITS if any of the V logits is not finite:
    broken weights must not give an answer that looks good. NOTHING_ALLOWED if every id is masked.
    """
    if not (np.isfinite(logits.min()) and np.isfinite(logits.max())):  # min and max hand NaN on
        return NAN_LOGITS
    row = processed_logits(logits[:num_ids], options, position, history, mask)
    best = int(row.argmax())  # the first of equals
    if row[best] == -np.inf:
        return NOTHING_ALLOWED
    if options.temperature < GREEDY_BELOW:
        return best
    ids = filtered_ids(row, row[best], options)
    with np.errstate(over="ignore"):  # a logit / T past the range of float32 is an infinity, which compares rightly
        if ids is None:
            return int((row / temperature(options) + gumbel(options.seed, position, num_ids)).argmax())
        noise = _gumbel_of(ids, options.seed, position, num_ids)
        return int(ids[(row[ids] / temperature(options) + noise).argmax()])


def processed_logits(
    row: F32, options: SlotOptions, position: int, history: I32 = NO_TOKENS, mask: U32 | None = None
) -> F32:
    """The finite logits f32[num_ids] after penalties, bias and masks, which are -inf; the row itself where there is
    nothing to change. Arguments as of sample_row."""
    stop_ids = options.stop_ids if position < options.min_position else ()
    if mask is None and not (options.logit_bias or stop_ids or has_penalties(options)):
        return row
    row = row.copy()
    penalize(row, options, history)
    for token_id, bias in options.logit_bias:
        if token_id < len(row):
            row[token_id] += np.float32(bias)
    if mask is not None:
        row[~allowed_ids(mask, len(row))] = -np.inf
    row[[token_id for token_id in stop_ids if token_id < len(row)]] = -np.inf
    return row


def allowed_ids(mask: U32, num_ids: int) -> npt.NDArray[np.bool_]:
    """bool[num_ids] of a mask's bits."""
    return np.unpackbits(mask.astype("<u4").view(np.uint8), count=num_ids, bitorder="little").view(np.bool_)


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


def _masks_of_rows(rows: Rows, draws: npt.NDArray[np.bool_]) -> list[U32 | None]:
    """Row by row; a row that does not draw needs none."""
    if rows.mask_rows is None or rows.masks is None:
        return [None] * len(draws)
    places = np.where(draws, rows.mask_rows, -1).tolist()
    return [None if place < 0 else rows.masks[place] for place in places]
