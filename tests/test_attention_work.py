"""The work of the attention kernels, laid out on the host: every row and every partial of it is somebody's, once."""

import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinyvllm_cli.backends.gpu import attention, attention_work
from tinyvllm_cli.backends.gpu.attention import MMA_ROWS, PARTIAL_KEYS, prefill_rows, prefix_rows
from tinyvllm_cli.backends.gpu.attention_work import DecodeWork, Sizes, plan_attention
from tinyvllm_cli.backends.gpu.kernels import KV_OPTIONS
from tinyvllm_cli.backends.gpu.slots import BlockTables
from tinyvllm_cli.config import BLOCK_SIZE
from tinyvllm_cli.types import I32

CUDA = Path(__file__).parent.parent / "cuda"


class HostUpload:
    def put(self, array):
        assert array.dtype == np.int32 and array.flags.c_contiguous
        return array


def block_tables(tables: I32) -> BlockTables:
    known = BlockTables(tables)
    known.host[:] = tables
    return known


@st.composite
def steps(draw: st.DrawFn) -> tuple[I32, I32, I32, BlockTables]:
    """starts, lengths, slots and tables of sequences, many of which begin with the same blocks: each goes along with
    one before it for a while."""
    pairs = draw(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 1500)), min_size=1, max_size=24))
    num_rows = np.array([rows for rows, _ in pairs], np.int32)
    lengths = num_rows + np.array([before for _, before in pairs], np.int32)
    slots = np.array(draw(st.permutations(range(len(pairs)))), np.int32)
    tables = np.zeros((len(pairs) + 1, 100), np.int32)
    for i, (slot, length) in enumerate(zip(slots, lengths, strict=True)):
        held = -(-int(length) // BLOCK_SIZE)
        tables[slot, :held] = 1 + 100 * i + np.arange(held)
        other, common = draw(st.integers(0, i)), draw(st.integers(0, 100))
        common = min(common, held, -(-int(lengths[other]) // BLOCK_SIZE))
        tables[slot, :common] = tables[slots[other], :common]
    starts = np.concatenate([[0], np.cumsum(num_rows)]).astype(np.int32)
    return starts, lengths, slots, block_tables(tables)


class Decoded(Counter[tuple[int, int, int]]):
    """(row of T, partial, place) of what the launches of a step leave."""

    def take(self, launch: DecodeWork, step: tuple[I32, I32, I32, BlockTables], sizes: Sizes) -> None:
        starts, lengths, slots, tables = step
        tails = [] if launch.tails is None else launch.tails.tolist()
        assert all(-(-lengths[s] // PARTIAL_KEYS) == which + 1 for s, which, *_ in tails)
        items = launch.items.tolist() + tails
        assert not tails or {s for s, *_ in tails} == {s for s, *_ in items}, "who merges its own, and who all"
        alone = {sequence: slot for sequence, _, _, slot, _ in items}
        first = {sequence: place - which for sequence, which, place, _, _ in items}
        rows = {(row, s) for s in alone for row in range(starts[s], starts[s + 1])}
        before = Counter(sequence for sequence, which, *_, shared in items for _ in range(shared) if which == shared)
        for sequence, which, place, slot, shared in items:
            assert slot == slots[sequence] and shared == before[sequence] <= which
            assert place >= 0 or lengths[sequence] <= PARTIAL_KEYS
            self.update((row, which, place) for row in range(starts[sequence], starts[sequence + 1]))
        if launch.prefix is None:
            assert launch.members is None and not before
            return
        members = launch.members.tolist()
        assert Counter(row for row, _ in members) == Counter(row for row, _ in rows)
        for low, count, which, slot in launch.prefix.tolist():
            assert 0 < count * sizes.group <= prefix_rows(sizes.head_dim)
            for row, target in members[low : low + count]:
                s = int(np.searchsorted(starts, row, side="right")) - 1
                end = (which + 1) * PARTIAL_KEYS
                assert lengths[s] - (starts[s + 1] - starts[s]) >= end, "each row sees all keys"
                blocks = slice(which * PARTIAL_KEYS // BLOCK_SIZE, end // BLOCK_SIZE)
                assert (tables.host[slots[s], blocks] == tables.host[slot, blocks]).all()
                assert target == 16 * first[s] + (row - starts[s]) * sizes.group
                assert which < before[s]
                self[row, which, first[s] + which] += 1


@given(
    step=steps(),
    group=st.sampled_from([1, 2, 3, 4, 7, 8, 16]),
    head_dim=st.sampled_from([64, 256]),
    places=st.integers(6, 60),  # those of the longest sequence at least
    least=st.integers(2, 5),
    least_tails=st.integers(1, 10),
)
def test_every_row_and_every_partial_is_somebodys_once(step, group, head_dim, places, least, least_tails):
    starts, lengths, slots, _ = step
    sizes = Sizes(group, head_dim, places)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_work, "LEAST_SEQUENCES", least)
        patch.setattr(attention_work, "LEAST_SAVED", 1)
        patch.setattr(attention_work, "LEAST_TAILS", least_tails)
        work = plan_attention(*step, sizes=sizes, upload=HostUpload())
    rows: Counter[int] = Counter()
    for sequence, first, count, slot in () if work.prefill is None else work.prefill.tolist():
        assert slot == slots[sequence]
        assert starts[sequence] <= first < first + count <= starts[sequence + 1]
        assert count * group <= prefill_rows(head_dim)
        rows.update(range(first, first + count))
    for launch in work.decodes:
        left = Decoded()
        left.take(launch, step, sizes)
        assert set(left.values()) == {1}
        used = {place for _, _, place in left}
        assert max(used) < places
        for s in {int(np.searchsorted(starts, row, side="right")) - 1 for row, *_ in left}:
            count = -(-lengths[s] // PARTIAL_KEYS)
            for row in range(starts[s], starts[s + 1]):
                partials = sorted((which, place) for r, which, place in left if r == row)
                first = partials[0][1]
                assert (first == -1) == (count == 1)
                assert partials == [(i, first + i) for i in range(count)]
            assert 0 < (starts[s + 1] - starts[s]) * group <= MMA_ROWS
            rows.update(range(starts[s], starts[s + 1]))
    assert rows == Counter(range(starts[-1]))


def decode_step(lengths: I32, tables: BlockTables) -> tuple[I32, I32, I32, BlockTables]:
    """A row each, slot by slot."""
    starts = np.arange(len(lengths) + 1, dtype=np.int32)
    return starts, lengths, starts[:-1], tables


def test_what_sequences_have_in_common_is_read_once():
    """40 behind 1,536 tokens, 9 of which go on together for another partial, among 10 that are alone."""
    own = np.arange(1, 50 * 128 + 1, dtype=np.int32).reshape(50, 128)
    own[:40, :96] = own[0, :96]
    own[:9, 96:112] = own[0, 96:112]
    lengths = np.full(50, 1800, np.int32)
    (launch,) = plan_attention(
        *decode_step(lengths, block_tables(own)), sizes=Sizes(4, 64, 400), upload=HostUpload()
    ).decodes
    read = Counter((which, count) for _, count, which, _ in launch.prefix.tolist())
    assert read == {**{(which, count): n for which in range(6) for count, n in ((16, 2), (8, 1))}, (6, 9): 1}
    assert launch.tails[:, 0].tolist() == list(range(50)) and len(launch.items) == 31 * 1 + 10 * 7


def test_blocks_that_only_end_alike_are_not_shared(monkeypatch: pytest.MonkeyPatch):
    """Whatever stands in a table: a partial is shared where all its blocks are, and all before it."""
    monkeypatch.setattr(attention_work, "LEAST_SAVED", 1)
    tables = np.tile(np.arange(1, 65, dtype=np.int32), (40, 1))
    tables[:, 20] += np.arange(40, dtype=np.int32)
    (launch,) = plan_attention(
        *decode_step(np.full(40, 1000, np.int32), block_tables(tables)), sizes=Sizes(1, 64, 400), upload=HostUpload()
    ).decodes
    assert {which for _, _, which, _ in launch.prefix.tolist()} == {0} and len(launch.items) == 40 * 2
    tables[:, 0] += np.arange(40, dtype=np.int32)
    (launch,) = plan_attention(
        *decode_step(np.full(40, 1000, np.int32), block_tables(tables)), sizes=Sizes(1, 64, 400), upload=HostUpload()
    ).decodes
    assert launch.prefix is None and len(launch.items) == 40 * 4


@pytest.mark.parametrize(
    ("count", "fp8"),
    [(attention_work.LEAST_TAILS - 1, False), (attention_work.LEAST_TAILS, False), (attention_work.LEAST_TAILS, True)],
)
def test_last_partials_of_many_are_apart(count: int, fp8: bool):
    tables = block_tables(np.arange(1, 40 * count + 1, dtype=np.int32).reshape(count, 40))
    lengths = np.where(np.arange(count) % 2, 100, 600).astype(np.int32)
    sizes = Sizes(4, 64, 3 * count, fp8=fp8)
    (launch,) = plan_attention(*decode_step(lengths, tables), sizes=sizes, upload=HostUpload()).decodes
    whole = sum(length // PARTIAL_KEYS for length in lengths.tolist())
    if count < attention_work.LEAST_TAILS or fp8:
        assert launch.tails is None and len(launch.items) == whole + count
    else:
        assert launch.tails[:, 0].tolist() == list(range(count)) and len(launch.items) == whole


def test_work_follows_arrays_that_change_in_place():
    """What is kept of the steps before is found by the values of the arrays, which are the caller's to use again."""
    starts, lengths, slots = (
        np.arange(start, start + count, dtype=np.int32) for start, count in ((0, 5), (9, 4), (5, 4))
    )
    tables = BlockTables(np.zeros((100, 40), np.int32))

    def items() -> list[list[int]]:
        sizes = Sizes(1, 64, 40, padded=True)
        return (
            plan_attention(starts, lengths, slots, tables, sizes=sizes, upload=HostUpload()).decodes[0].items.tolist()
        )

    before = items()
    lengths += 1
    assert items() == before, "no sequence has got another partial"
    lengths[3] = PARTIAL_KEYS + 1
    slots[0] = 77
    after = items()
    assert len(after) == 8 and [item[3] for item in after] == [77, 6, 7, 8, 8, -1, -1, -1]


def test_shapes_of_steps_that_share_are_few():
    """Sequences that come and go change the number of items seldom, and where members lie never."""
    tables = block_tables(np.tile(np.arange(1, 129, dtype=np.int32), (256, 1)))
    shapes = set()
    for count in range(256, 160, -1):
        lengths = np.full(256, 1700, np.int32)
        lengths[count:] = 1  # those that only pad
        work = plan_attention(*decode_step(lengths, tables), sizes=Sizes(4, 64, 2000, padded=True), upload=HostUpload())
        assert len(work.decodes[0].members) == 256
        shapes.add(work.shape)
    assert {prefix for _, prefix, _ in shapes} == {128} and len(shapes) <= 4, shapes


@pytest.mark.parametrize(
    "name", ["TILE_KEYS", "PARTIAL_KEYS", "MMA_ROWS", "PREFILL_WARPS", "PREFIX_WARPS", "DECODE_WARPS"]
)
def test_numbers_of_the_launch_are_those_of_the_kernels(name):
    text = "".join(path.read_text() for path in CUDA.glob("*.cu*"))
    assert re.findall(rf"\b{name} = (\d+)\b", text) == [str(getattr(attention, name))]


@pytest.mark.parametrize("kv_dtype", KV_OPTIONS)
def test_shared_memory_stays_within_what_every_card_has(kv_dtype):
    for head_dim in filter(attention.supports_head_dim, range(1, 400)):
        for shared in (
            attention.prefill_shared,
            attention.prefix_shared,
            attention.tail_shared,
            attention.decode_shared,
        ):
            assert shared(head_dim, kv_dtype) <= 99 * 1024, head_dim
    assert [d for d in range(8, 300, 8) if attention.supports_head_dim(d)] == [*range(16, 129, 16), 160, 192, 224, 256]
