"""The sequences that decode, with what a step needs of them in arrays, so that it costs little Python for each."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import compress

import numpy as np

from tinyvllm_cli.types import I32, Sequence

DECODED: I32 = np.array([[0], [1], [-1], [0]], np.int32)  # what a step adds to a column of Decoding.rows


class Decoding:
    """Sequences whose last known token is the only one that is not computed, and that have more to draw.

    rows i32[4, N]: slot, num_computed, tokens left to draw, positions for which there are blocks.
    """

    def __init__(self, block_size: int) -> None:
        self.sequences: list[Sequence] = []
        self.rows: I32 = np.empty((4, 0), np.int32)
        self._block_size = block_size

    def add(self, sequences: list[Sequence]) -> None:
        self.sequences += sequences
        self.rows = np.concatenate([self.rows, self._columns(sequences)], axis=1)

    def remove(self, sequence: Sequence) -> None:
        place = self.sequences.index(sequence)
        del self.sequences[place]
        self.rows = np.concatenate([self.rows[:, :place], self.rows[:, place + 1 :]], axis=1)

    def lacking(self, count: int) -> list[int]:
        """Which of the first `count` have no block for their next row."""
        places: list[int] = np.flatnonzero(self.rows[1, :count] >= self.rows[3, :count]).tolist()
        return places

    def grown(self, places: list[int]) -> None:
        """Those at these places got a block each."""
        self.rows[3, places] += self._block_size

    def promised(self) -> int:
        """A block for each that may need one more."""
        _, num_computed, left, capacity = self.rows
        return int(np.count_nonzero(num_computed + left > capacity))

    def advance(self, count: int) -> list[Sequence]:
        """The first `count` have decoded; whoever has drawn its last token leaves. Those that do."""
        gone: list[Sequence] = []
        rows = self.rows.copy()  # the arrays of a batch may be parts of it
        rows[:, :count] += DECODED
        left = rows[2] > 0
        if not left.all():
            gone = list(compress(self.sequences, (~left).tolist()))
            rows, self.sequences = rows[:, left], list(compress(self.sequences, left.tolist()))
        self.rows = rows
        return gone

    def check(self) -> None:
        assert self.rows.tolist() == self._columns(self.sequences).tolist()

    def _columns(self, sequences: Iterable[Sequence]) -> I32:
        columns = [(s.slot, s.num_computed, tokens_left(s), len(s.block_table) * self._block_size) for s in sequences]
        return np.array(columns, np.int32).reshape(-1, 4).T


def tokens_left(sequence: Sequence) -> int:
    """Tokens still to be drawn: a sequence whose last one is drawn in a step in flight has nothing more to compute."""
    return sequence.max_len - sequence.num_known


def decodes(sequence: Sequence) -> bool:
    return sequence.num_sampled > 0 and sequence.num_known - sequence.num_computed == 1


def slot_of(sequence: Sequence) -> int:
    assert sequence.slot is not None, "it runs"
    return sequence.slot
