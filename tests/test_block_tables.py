"""Laws of the block tables that stay on the GPU: whatever batches bring, the kernels read it, and little is sent."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from seam import i32

from tinyvllm_cli.backends.gpu.attention import PARTIAL_BLOCKS
from tinyvllm_cli.backends.gpu.slots import BlockTables
from tinyvllm_cli.types import I32, Batch, Limits

SLOTS, WIDEST, BLOCKS = 4, 6, 9
LIMITS = Limits(
    num_blocks=BLOCKS, block_size=16, max_batch_tokens=64, max_slots=SLOTS, max_seq_len=16 * WIDEST, vocab_size=9,
    max_in_flight=1,
)  # fmt: skip


@dataclass
class Step:
    slots: list[int]
    tables: I32  # [S, B]
    num_blocks: I32  # [S] that are needed

    def batch(self) -> Batch:
        none, count = i32([]), i32([0] * len(self.slots))
        return Batch(none, i32(self.slots), self.tables, count, none, none, none)


@st.composite
def steps(draw: st.DrawFn, lowest: int = 0) -> Step:
    """Tables with blocks from `lowest` to past the pool's end; sometimes none is needed."""
    slots = draw(st.permutations(range(SLOTS)))[: draw(st.integers(1, SLOTS))]
    width = draw(st.integers(1, WIDEST + 2))
    block = st.integers(lowest, BLOCKS if lowest == 0 else BLOCKS - 1)
    tables = [draw(st.lists(block, min_size=width, max_size=width)) for _ in slots]
    needed = [draw(st.integers(0, min(width + (lowest == 0), WIDEST))) for _ in slots]
    return Step(slots, i32(tables), i32(needed))


def place(device: I32, changes: I32 | None) -> None:
    """What the kernel of cuda/block_tables.cu does."""
    for index, block in [] if changes is None else changes.tolist():
        device.reshape(-1)[index] = block


def is_right(step: Step) -> bool:
    """Each block that is needed is there, and whatever stands beside them is a block of the pool."""
    width = step.num_blocks.max()
    if width > step.tables.shape[1]:
        return False
    rows = zip(step.tables[:, :width], step.num_blocks, strict=True)
    return all((row >= 0).all() and (row < BLOCKS).all() and (row[:count] > 0).all() for row, count in rows)


@given(st.lists(steps() | steps(lowest=1), max_size=12))
def test_the_kernels_read_the_tables_of_the_batch(given_steps: list[Step]):
    device = np.zeros((SLOTS + 1, WIDEST), np.int32)
    tables = BlockTables(device)
    for step in given_steps:
        before = device.copy()
        if not is_right(step):
            with pytest.raises(ValueError, match="malformed batch"):
                tables.update(step.batch(), step.num_blocks, LIMITS)
            continue
        changes = tables.update(step.batch(), step.num_blocks, LIMITS)
        place(device, changes)
        for slot, row, count in zip(step.slots, step.tables, step.num_blocks, strict=True):
            assert device[slot, :count].tolist() == row[:count].tolist()
        others = [slot for slot in range(SLOTS + 1) if slot not in step.slots]
        assert (device[others] == before[others]).all() and not device[SLOTS].any(), "the last row is nobody's"
        if changes is not None:
            assert changes.dtype == np.int32 and (before.reshape(-1)[changes[:, 0]] != changes[:, 1]).all()


@given(steps(lowest=1), st.integers(0, 2**31))
def test_what_has_been_sent_is_not_sent_again(step: Step, seed: int):
    tables = BlockTables(np.zeros((SLOTS + 1, WIDEST), np.int32))
    tables.update(step.batch(), step.num_blocks, LIMITS)
    order = np.random.default_rng(seed).permutation(len(step.slots))
    again = Step([step.slots[i] for i in order], step.tables[order], step.num_blocks[order])
    assert tables.update(again.batch(), again.num_blocks, LIMITS) is None


def test_a_null_block_in_a_known_table_is_seen():
    """The first step needs less of the table than the second, which brings nothing new."""
    tables = BlockTables(np.zeros((SLOTS + 1, WIDEST), np.int32))
    batch = Step([2], i32([[5, 0, 7]]), i32([1])).batch()
    tables.update(batch, i32([1]), LIMITS)
    for _ in range(2):
        with pytest.raises(ValueError, match="each position has a block"):
            tables.update(batch, i32([3]), LIMITS)


PARTIALS = 3  # whole ones that a slot has room for, in the law below
a_change = st.tuples(st.integers(0, SLOTS - 1), st.integers(0, PARTIALS * PARTIAL_BLOCKS + 3), st.integers(0, 1))


@given(st.lists(a_change, max_size=12))
def test_a_version_of_the_tables_has_the_same_whole_partials(changes: list[tuple[int, int, int]]):
    """Slots get so many blocks, of one of two sequences. What grows by no whole partial is no new version."""
    limits = replace(LIMITS, num_blocks=1000, max_seq_len=16 * (PARTIALS + 1) * PARTIAL_BLOCKS)
    tables = BlockTables(np.zeros((SLOTS + 1, (PARTIALS + 1) * PARTIAL_BLOCKS), np.int32))
    known: dict[int, list[int]] = {slot: [] for slot in range(SLOTS)}
    partials: dict[tuple[int, int, int], list[int]] = {}  # of a version and a slot
    only_grew = set(known)
    for slot, count, sequence in changes:
        before, version = known[slot], tables.version
        known[slot] = blocks = list(range(1 + 100 * sequence, 1 + 100 * sequence + count))
        tables.update(Step([slot], i32([[*blocks, 0]]), i32([count])).batch(), i32([count]), limits)
        if before != blocks[: len(before)]:
            only_grew.discard(slot)
        if slot in only_grew and len(before) // PARTIAL_BLOCKS == count // PARTIAL_BLOCKS:
            assert tables.version == version
        for one, held in known.items():
            for partial in range(len(held) // PARTIAL_BLOCKS):
                whole = held[partial * PARTIAL_BLOCKS : (partial + 1) * PARTIAL_BLOCKS]
                assert partials.setdefault((tables.version, one, partial), whole) == whole
