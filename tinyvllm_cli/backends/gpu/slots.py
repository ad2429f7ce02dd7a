"""What is kept for every slot: tokens by position and the block table on the GPU; what was counted, and how to draw,
on the host.

In every array by slot one row more stands last, which is nobody's: that of rows that only pad.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tinyvllm_cli.backends.gpu.attention import PARTIAL_BLOCKS
from tinyvllm_cli.backends.gpu.pinned import Pinned, PinnedRing
from tinyvllm_cli.backends.gpu.sample import DrawOptions
from tinyvllm_cli.backends.row_layout import RowLayout, require, same, within
from tinyvllm_cli.model.parameters import Array
from tinyvllm_cli.types import I32, Batch, Limits, SlotOptions

LARGEST = 2**31 - 1
MIN_STAGING = 1 << 20  # bytes: the prompts of many slots between two steps


class BlockTables:
    """device: i32[max_slots + 1, widest], zeros at first, and host, a copy of it: a step sends what has changed.

    version: another one as soon as a block of a whole partial of attention's has changed.
    """

    def __init__(self, device: Array) -> None:
        self.device = device
        self.host: I32 = np.zeros(device.shape, np.int32)
        self.version = 0
        self._held: I32 = np.zeros(len(self.host), np.int32)  # no null block stands among so many first ones of a row

    def update(self, batch: Batch, num_blocks: I32, limits: Limits) -> I32 | None:
        """Take over the tables of a batch as far as it needs them, num_blocks [S] each. What the GPU lacks of them:
        changes i32[., 2] for the kernel of cuda/block_tables.cu, None where there are none.

        ValueError, and nothing is taken over, where a table lacks a block.
        """
        width = int(num_blocks.max())
        require(width <= batch.block_tables.shape[1], "each position has a block")
        slots, tables = batch.slots, batch.block_tables[:, :width]
        kept, held = self.host[slots, :width], self._held[slots]
        if same(tables, kept) and within(held - num_blocks, 0, LARGEST):
            return None
        changed = np.flatnonzero(tables != kept)
        rows, columns = np.divmod(changed, width)
        blocks = tables[rows, columns]
        require(within(blocks, 0, limits.num_blocks), "block_tables hold blocks of the pool")
        if not blocks.all():
            null = blocks == 0
            np.minimum.at(held, rows[null], columns[null])
        held[rows] += (columns == held[rows]) & (blocks > 0)  # how sequences grow; what else there is, is looked for
        short = np.flatnonzero(num_blocks > held)
        if short.size:
            held[short] = _before_null(tables[short])
            require(bool((num_blocks[short] <= held[short]).all()), "each position has a block")
        self._held[slots] = held
        if not changed.size:
            return None
        changes = np.empty((len(changed), 2), np.int32)
        changes[:, 0] = places = slots[rows] * self.host.shape[1] + columns
        changes[:, 1] = blocks
        self.host.reshape(-1)[places] = blocks
        self._count_whole(slots[rows], columns)
        return changes

    def _count_whole(self, slots: I32, columns: I32) -> None:
        """These blocks have changed. A partial that lacks its last block is not whole yet, and nobody's to share."""
        last = columns - columns % PARTIAL_BLOCKS + (PARTIAL_BLOCKS - 1)
        there = last < self.host.shape[1]
        self.version += bool(self.host[slots[there], last[there]].any())


def _before_null(tables: I32) -> I32:
    """Blocks of each table before its first null block."""
    null = tables == 0
    held: I32 = np.where(null.any(axis=1), null.argmax(axis=1), tables.shape[1])
    return held


class Slots:
    """token_table: device i32[max_slots + 1, max_seq_len]; counted i32[max_slots]: tokens whose K and V are in place.

    What is counted is known when a step is enqueued: the host need not ask the GPU.
    """

    def __init__(self, cuda: Any, token_table: Array, block_tables: Array, stream: int) -> None:
        """block_tables: i32[max_slots + 1, widest]; zeros as soon as the stream comes to what is enqueued next."""
        self.nobody, max_seq_len = token_table.shape[0] - 1, token_table.shape[1]
        self.token_table = token_table
        self.tables = BlockTables(block_tables)
        self.counted: I32 = np.zeros(self.nobody, np.int32)
        self.options = DrawOptions(self.nobody)
        self._cuda = cuda
        self._stream = stream
        self._ring = PinnedRing(cuda, 2, max(MIN_STAGING, 4 * max_seq_len))
        self._memory: Pinned | None = None
        self._used = 0

    def bind(self, slot: int, token_ids: I32, options: SlotOptions) -> None:
        """Enqueue the copy of the tokens, i32, into the slot's row. ValueError where slot or tokens do not fit."""
        max_slots, max_seq_len = self.nobody, self.token_table.shape[1]
        if not (0 <= slot < max_slots and len(token_ids) <= max_seq_len):
            raise ValueError(f"slot {slot} with {len(token_ids)} tokens, wanted {max_slots} slots of {max_seq_len}")
        self.counted[slot] = 0
        self.options.bind(slot, options)
        if len(token_ids):
            source = self._stage(token_ids)
            target = self.token_table.data.ptr + 4 * slot * max_seq_len
            self._cuda.memcpyAsync(target, source, token_ids.nbytes, self._cuda.memcpyHostToDevice, self._stream)

    def count(self, slots: I32, layout: RowLayout) -> None:
        """A step is enqueued that brings its sequences, in slots [S], to these lengths; those without rows stay."""
        moved = layout.num_blocks > 0
        self.counted[slots[moved]] = layout.lengths[moved]

    def close(self) -> None:
        self._ring.close()

    def _stage(self, token_ids: I32) -> int:
        """Address of a copy in pinned memory. Waits only where both memories are full of copies not yet done."""
        if self._memory is None or self._used + token_ids.nbytes > len(self._memory.bytes):
            if self._memory is not None:
                self._memory.record(self._stream)
            self._memory, self._used = self._ring.next(), 0
        start, self._used = self._used, self._used + token_ids.nbytes
        self._memory.bytes[start : self._used] = token_ids.view(np.uint8)
        return self._memory.address + start
