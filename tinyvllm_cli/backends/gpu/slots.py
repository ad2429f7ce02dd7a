"""What is kept for every slot: its tokens by position on the GPU; what was counted, and how to draw, on the host."""

from __future__ import annotations

from typing import Any

import numpy as np

from tinyvllm_cli.backends.gpu.pinned import Pinned, PinnedRing
from tinyvllm_cli.backends.gpu.sample import DrawOptions
from tinyvllm_cli.model.parameters import Array
from tinyvllm_cli.types import I32, Batch, SlotOptions

MIN_STAGING = 1 << 20  # bytes: the prompts of many slots between two steps


class Slots:
    """token_table: device i32[max_slots, max_seq_len]; counted i32[max_slots]: tokens whose K and V are in place.

    What is counted is known when a step is enqueued: the host need not ask the GPU.
    """

    def __init__(self, cuda: Any, token_table: Array, stream: int) -> None:
        max_slots, max_seq_len = token_table.shape
        self.token_table = token_table
        self.counted: I32 = np.zeros(max_slots, np.int32)
        self.options = DrawOptions(max_slots)
        self._cuda = cuda
        self._stream = stream
        self._ring = PinnedRing(cuda, 2, max(MIN_STAGING, 4 * max_seq_len))
        self._memory: Pinned | None = None
        self._used = 0

    def bind(self, slot: int, token_ids: I32, options: SlotOptions) -> None:
        """Enqueue the copy of the tokens, i32, into the slot's row. ValueError where slot or tokens do not fit."""
        max_slots, max_seq_len = self.token_table.shape
        if not (0 <= slot < max_slots and len(token_ids) <= max_seq_len):
            raise ValueError(f"slot {slot} with {len(token_ids)} tokens, wanted {max_slots} slots of {max_seq_len}")
        self.counted[slot] = 0
        self.options.bind(slot, options)
        if len(token_ids):
            source = self._stage(token_ids)
            target = self.token_table.data.ptr + 4 * slot * max_seq_len
            self._cuda.memcpyAsync(target, source, token_ids.nbytes, self._cuda.memcpyHostToDevice, self._stream)

    def count(self, batch: Batch, lengths: I32) -> None:
        """A step is enqueued that brings its sequences to these lengths [S]; those without rows stay as they are."""
        moved = np.diff(batch.query_start_loc) > 0
        self.counted[batch.slots[moved]] = lengths[moved]

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
