"""Where the rows of a step lie in their sequences: the same for every backend, and checked where a batch enters."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tinyvllm_cli.config import BLOCK_SIZE
from tinyvllm_cli.types import I32, Batch, Limits


@dataclass(frozen=True, slots=True)
class RowLayout:
    lengths: I32  # [S] tokens of each sequence once the step has run
    sequence: I32  # [T] which of the S sequences a row belongs to
    positions: I32  # [T]


def row_layout(batch: Batch, limits: Limits, counted: I32) -> RowLayout:
    """Check a batch and fill in positions; -1 in num_computed is what counted i32[max_slots] says of the slot.

    A malformed batch is a bug of the caller: ValueError.
    """
    _check_shapes(batch, limits)
    starts = batch.query_start_loc
    num_rows = np.diff(starts)
    computed = np.where(batch.num_computed < 0, counted[batch.slots], batch.num_computed)
    lengths = computed + num_rows
    _check_blocks(batch.block_tables, np.where(num_rows > 0, lengths, 0), limits)
    sequence = np.repeat(np.arange(len(batch.slots), dtype=np.int32), num_rows)
    positions = np.arange(len(sequence), dtype=np.int32) - (starts[:-1] - computed)[sequence]
    return RowLayout(lengths, sequence, positions)


def _check_shapes(batch: Batch, limits: Limits) -> None:
    starts, rows = batch.query_start_loc, len(batch.token_ids)
    sequences, sampled = len(batch.slots), len(batch.logits_indices)
    _require(starts.shape == (sequences + 1,), "query_start_loc has one entry more than slots")
    _require(batch.num_computed.shape == (sequences,), "num_computed has one entry a sequence")
    _require(batch.block_tables.ndim == 2 and len(batch.block_tables) == sequences, "block_tables is [S, B]")
    _require(batch.sample_slots.shape == (sampled,), "sample_slots and logits_indices have one length")
    _require(
        starts[0] == 0 and starts[-1] == rows and bool((np.diff(starts) >= 0).all()), "query_start_loc covers T rows"
    )
    _require(sampled <= limits.max_slots, f"at most {limits.max_slots} rows are sampled, as many as there are slots")
    _require(0 < rows <= limits.max_batch_tokens, f"at least 1 row, at most {limits.max_batch_tokens} rows")
    _require(_within(batch.slots, 0, limits.max_slots), "slots exist")
    _require(_within(batch.sample_slots, 0, limits.max_slots), "sample_slots exist")
    _require(_within(batch.token_ids, -1, limits.vocab_size), "token_ids are -1 or in the vocabulary")
    _require(_within(batch.logits_indices, 0, rows), "logits_indices are rows")
    _require(_within(batch.block_tables, 0, limits.num_blocks), "block_tables hold blocks of the pool")
    _require(len(set(batch.slots.tolist())) == sequences, "a slot stands in a batch once")


def _check_blocks(block_tables: I32, lengths: I32, limits: Limits) -> None:
    """Every position up to a sequence's end needs a block of its own: never the null block, never past the table."""
    _require(_within(lengths, 0, limits.max_seq_len + 1), f"positions are below max_seq_len {limits.max_seq_len}")
    needed = np.arange(block_tables.shape[1]) * BLOCK_SIZE < lengths[:, None]
    covered = needed.sum(axis=1) * BLOCK_SIZE >= lengths
    _require(bool(covered.all()) and bool((block_tables[needed] > 0).all()), "each position has a block")


def _within(values: I32, low: int, high: int) -> bool:
    return values.size == 0 or bool(low <= values.min() and values.max() < high)


def _require(holds: bool, rule: str) -> None:
    if not holds:
        raise ValueError(f"malformed batch: {rule}")
