"""What the device keeps for every slot: its tokens by position, how many it has counted, how to draw the next."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from tinyvllm_cli.types import I32, SlotOptions


class Slots:
    """token_table i32[max_slots, max_seq_len], counted i32[max_slots]: tokens whose K and V are in place; options."""

    def __init__(self, max_slots: int, max_seq_len: int) -> None:
        self.token_table: I32 = np.zeros((max_slots, max_seq_len), np.int32)
        self.counted: I32 = np.zeros(max_slots, np.int32)
        self.options = [SlotOptions()] * max_slots

    def bind(self, slot: int, token_ids: Seq[int] | I32, options: SlotOptions) -> None:
        self.token_table[slot, : len(token_ids)] = token_ids
        self.counted[slot] = 0
        self.options[slot] = options

    def write(self, slots: I32, positions: I32, token_ids: I32) -> None:
        """Put drawn tokens [R] in place; the last token of a full context is read, never fed, and has none."""
        fits = positions < self.token_table.shape[1]
        self.token_table[slots[fits], positions[fits]] = token_ids[fits]
