"""Where the rows of a step lie in their sequences: the same for every backend, and checked where a batch enters."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tinyvllm_cli.config import BLOCK_SIZE
from tinyvllm_cli.types import I32, MAX_TOP_LOGPROBS, U32, Batch, Limits


@dataclass(frozen=True, slots=True)
class RowLayout:
    lengths: I32  # [S] tokens of each sequence once the step has run
    num_blocks: I32  # [S] of its table, from the first on, that each sequence needs
    sequence: I32  # [T] which of the S sequences a row belongs to
    positions: I32  # [T]


def row_layout(batch: Batch, limits: Limits, counted: I32) -> RowLayout:
    """Check a batch, all but what stands in its block tables, and fill in positions; -1 in num_computed is what counted
    i32[max_slots] says of the slot.

    A malformed batch is a bug of the caller: ValueError.
    """
    _check(batch, limits)
    starts = batch.query_start_loc
    num_rows = starts[1:] - starts[:-1]
    computed = batch.num_computed
    if (computed < 0).any():
        computed = np.where(computed < 0, counted[batch.slots], computed)
    lengths = computed + num_rows
    held = lengths * (num_rows > 0)  # a sequence without rows may be of any length
    require(within(held, 0, limits.max_seq_len + 1), f"positions are below max_seq_len {limits.max_seq_len}")
    sequence = np.arange(len(lengths), dtype=np.int32).repeat(num_rows)
    positions = np.arange(len(sequence), dtype=np.int32) - (starts[:-1] - computed)[sequence]
    return RowLayout(lengths, (held + (BLOCK_SIZE - 1)) // BLOCK_SIZE, sequence, positions)


def check_blocks(block_tables: I32, num_blocks: I32, limits: Limits) -> None:
    """Each position of a sequence needs a block: never the null block, never past the table. ValueError else."""
    require(within(block_tables, 0, limits.num_blocks), "block_tables hold blocks of the pool")
    width = block_tables.shape[1]
    missing = (block_tables == 0) & (np.arange(width) < num_blocks[:, None])
    require(within(num_blocks, 0, width + 1) and not missing.any(), "each position has a block")


def check_mask(bits: U32, mask_rows: I32, vocab_size: int) -> None:
    """What Pending.mask() brings to a step with these mask_rows. ValueError else."""
    words = -(-vocab_size // 32)
    right = bits.dtype == np.uint32 and bits.ndim == 2 and bits.shape[1] == words
    require(right, f"a mask is u32[M, {words}], not {bits.dtype}{list(bits.shape)}")
    require(within(mask_rows, -1, len(bits)), f"mask_rows are -1 or rows of the mask, which has {len(bits)}")


def _check(batch: Batch, limits: Limits) -> None:
    starts, rows = batch.query_start_loc, len(batch.token_ids)
    sequences, sampled = len(batch.slots), len(batch.logits_indices)
    require(starts.shape == (sequences + 1,), "query_start_loc has one entry more than slots")
    require(batch.num_computed.shape == (sequences,), "num_computed has one entry a sequence")
    require(batch.block_tables.ndim == 2 and len(batch.block_tables) == sequences, "block_tables is [S, B]")
    require(batch.sample_slots.shape == (sampled,), "sample_slots and logits_indices have one length")
    ascending = within(starts[1:] - starts[:-1], 0, rows + 1)
    require(ascending and starts[0] == 0 and starts[-1] == rows, "query_start_loc covers T rows")
    require(sampled <= limits.max_slots, f"at most {limits.max_slots} rows are sampled, as many as there are slots")
    require(0 < rows <= limits.max_batch_tokens, f"at least 1 row, at most {limits.max_batch_tokens} rows")
    require(within(batch.slots, 0, limits.max_slots), "slots exist")
    require(within(batch.sample_slots, 0, limits.max_slots), "sample_slots exist")
    require(within(batch.token_ids, -1, limits.vocab_size), "token_ids are -1 or in the vocabulary")
    require(within(batch.logits_indices, 0, rows), "logits_indices are rows")
    require(int(np.bincount(batch.slots).max()) == 1, "a slot stands in a batch once")
    require(0 <= batch.top_logprobs <= MAX_TOP_LOGPROBS, f"top_logprobs is at most {MAX_TOP_LOGPROBS}")
    for name, values, end in (("targets", batch.targets, limits.vocab_size), ("mask_rows", batch.mask_rows, 2**31 - 1)):
        if values is not None:
            require(values.shape == (sampled,), f"{name} and logits_indices have one length")
            require(within(values, -1, end), f"{name} are -1 or in range")


def within(values: I32, low: int, high: int) -> bool:
    """Whether all are at least low and below high; a number that is too small becomes a great one."""
    above = values - np.int32(low) if low else values
    return values.size == 0 or int(above.view(np.uint32).max()) < high - low


def same(a: I32, b: I32) -> bool:
    """Whether two arrays with as many columns are equal. NumPy's own comparison takes several times as long."""
    return a.tobytes() == b.tobytes()


def require(holds: bool, rule: str) -> None:
    if not holds:
        raise ValueError(f"malformed batch: {rule}")
