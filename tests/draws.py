"""A draw as laws ask any backend for it, NumPy's own, and the formulas of the logits it is made from, written anew."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tinyvllm_cli.backends.cpu.sample import sample
from tinyvllm_cli.backends.cpu.slots import Slots
from tinyvllm_cli.types import F32, I32, U32, SlotOptions

Positions = Sequence[int] | I32


@dataclass(frozen=True)
class Drawn:
    token_ids: I32  # [R]
    logprobs: F32  # [R]
    table: I32  # [R, max_seq_len] after the draw
    top_ids: I32 | None = None  # [R, top_logprobs]
    top_logprobs: F32 | None = None


class Draw(Protocol):
    """The op on rows f32[R, V], or one row [1, V] for all, each for a slot of its own: row r for slot r, whose token
    gets positions[r].

    table i32[R, max_seq_len]: what the slots hold; None: marks of -1, 64 wide. The other arguments as in Batch.
    """

    def __call__(
        self,
        logits: F32,
        options: Sequence[SlotOptions],
        positions: Positions,
        num_ids: int,
        *,
        table: I32 | None = None,
        masks: U32 | None = None,
        mask_rows: I32 | None = None,
        targets: I32 | None = None,
        top_logprobs: int = 0,
    ) -> Drawn: ...


def cpu_draw(
    logits: F32,
    options: Sequence[SlotOptions],
    positions: Positions,
    num_ids: int,
    *,
    table: I32 | None = None,
    top_logprobs: int = 0,
    masks: U32 | None = None,
    mask_rows: I32 | None = None,
    targets: I32 | None = None,
) -> Drawn:
    count = len(options)
    table = np.full((count, 64), -1, np.int32) if table is None else table
    slots = Slots(count, table.shape[1])
    slots.token_table[:], slots.options = table, list(options)
    every = np.arange(count, dtype=np.int32)
    rows: Any = SimpleNamespace(
        positions=np.array(positions, np.int32) - np.int32(1),
        logits_indices=every,
        sample_slots=every,
        targets=targets,
        mask_rows=mask_rows,
        masks=masks,
        top_logprobs=top_logprobs,
    )
    before = logits.copy()
    output = sample(None, np.broadcast_to(logits, (count, logits.shape[1])), rows, slots, num_ids=num_ids)  # type: ignore[arg-type]
    assert np.array_equal(logits, before, equal_nan=True), "logits are left as they were"
    tops = [None if array is None else array[0] for array in (output.top_ids, output.top_logprobs)]
    return Drawn(output.token_ids[0], output.logprobs[0], slots.token_table, *tops)  # type: ignore[arg-type]


def bits_of(allowed: Sequence[Sequence[int]], vocab: int) -> U32:
    """Masks u32[M, ceil(V / 32)] that allow these ids."""
    masks = np.zeros((len(allowed), -(-vocab // 32)), np.uint32)
    for mask, ids in zip(masks, allowed, strict=True):
        for token in ids:
            mask[token // 32] |= np.uint32(1 << token % 32)
    return masks


def penalised(
    row: npt.NDArray[Any], options: SlotOptions, tokens: Sequence[int], order: str = "repetition output bias"
) -> npt.NDArray[Any]:
    """A row's logits after penalties and bias, in the arithmetic of its dtype; tokens: at positions 0..p.

    Row by row from the definitions. order: in which they are applied, which only the given one is right for.
    """
    x, real = row.copy(), row.dtype.type
    r, f, p = map(real, (options.repetition_penalty, options.frequency_penalty, options.presence_penalty))
    for step in order.split():
        if step == "repetition":
            for token in {token for token in tokens if 0 <= token < len(x)}:
                x[token] = x[token] / r if x[token] > 0 else x[token] * r
        elif step == "output":
            for token, count in Counter(tokens[options.output_start :]).items():
                if 0 <= token < len(x):
                    taken = real(count) * f
                    x[token] = x[token] - (taken + p)
        else:
            for token, bias in options.logit_bias:
                if token < len(x):
                    x[token] = x[token] + real(bias)
    return x
