"""Which sequences of a step have the same blocks for whole partials, so that K and V of these are read once for all."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tinyvllm_cli.types import I32


@dataclass(frozen=True, slots=True)
class Groups:
    """Sequences that share partials: places first[g] .. end[g] - 1 of `order` share partials low[g] .. high[g] - 1."""

    order: I32  # [S] the sequences in an order in which those that share stand side by side
    first: I32  # [G]
    end: I32
    low: I32
    high: I32

    def partials_shared(self) -> I32:
        """[S] of each sequence: its first ones."""
        shared = np.zeros_like(self.order)
        for first, end, high in zip(self.first.tolist(), self.end.tolist(), self.high.tolist(), strict=True):
            shared[self.order[first:end]] = high  # which ascends
        return shared

    def partials_saved(self) -> int:
        """How often a partial need not be read, as it is read for another sequence."""
        return int(((self.end - self.first - 1) * (self.high - self.low)).sum())


def find_groups(tables: I32, slots: I32, whole: I32, *, partial_blocks: int, least: int) -> Groups | None:
    """Groups of at least `least` of the sequences in slots [S], by their first whole[s] partials; None: there are none.

    A partial is shared where all of its blocks and those of all partials before it are the same.
    """
    able = slots[whole > 0]
    if len(able) < least:
        return None
    begun = np.sort(tables[able, partial_blocks - 1])
    if not (begun[least - 1 :] == begun[: len(begun) - least + 1]).any():  # as in most steps
        return None
    order = _side_by_side(tables, slots, whole, partial_blocks)
    common = _in_common(tables, slots[order], whole[order], partial_blocks)
    found = []
    low = 0
    for high in np.unique(common[common > 0]).tolist():  # groups are the same for the partials between two of them
        together = np.concatenate([[0], common >= high, [0]])
        first, end = np.flatnonzero(np.diff(together) > 0), np.flatnonzero(np.diff(together) < 0) + 1
        kept = end - first >= least
        found += [(*ends, low, high) for ends in zip(first[kept].tolist(), end[kept].tolist(), strict=True)]
        low = high
    if not found:
        return None
    return Groups(order, *np.array(found, np.int32).T)


def _side_by_side(tables: I32, slots: I32, whole: I32, partial_blocks: int) -> I32:
    """An order of the sequences in which those with the same last block of their first partials follow each other."""
    most = int(whole.max())
    ends = tables[:, partial_blocks - 1 : most * partial_blocks : partial_blocks][slots]
    ends[np.arange(most) >= whole[:, None]] = -1
    return np.lexsort(ends.T[::-1]).astype(np.int32)


def _in_common(tables: I32, slots: I32, whole: I32, partial_blocks: int) -> I32:
    """[S - 1]: how many partials, from the first on, each sequence and the next have in common."""
    most = int(whole.max())
    blocks = tables[:, : most * partial_blocks][slots]
    same = (blocks[1:] == blocks[:-1]).reshape(len(slots) - 1, most, partial_blocks).all(axis=2)
    same &= np.arange(most) < np.minimum(whole[1:], whole[:-1])[:, None]
    common: I32 = np.logical_and.accumulate(same, axis=1).sum(axis=1, dtype=np.int32)
    return common
