"""What the blocks of the attention kernels are to do in a step: prompts, prefixes that sequences share, decoding."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tinyvllm_cli.backends.gpu.attention import (
    MMA_ROWS,
    PARTIAL_BLOCKS,
    PARTIAL_KEYS,
    prefill_rows,
    prefix_rows,
    tail_warps,
)
from tinyvllm_cli.backends.gpu.graphs import Shape
from tinyvllm_cli.backends.gpu.sharing import Groups, find_groups
from tinyvllm_cli.types import I32

if TYPE_CHECKING:
    from tinyvllm_cli.backends.gpu.rows import Upload
    from tinyvllm_cli.backends.gpu.slots import BlockTables

ITEM_BYTES = 4 * 5  # of decoding, i32 [., 5], the widest
MEMBER_BYTES = 4 * 2
# Fewer sequences, or fewer partials that need not be read, are attended to as if they shared nothing: a launch more
# costs more (H200, 8 KV heads: 62 partials of 64 columns are worth it, 31 are not).
LEAST_SEQUENCES = 8
LEAST_SAVED = 48
# From so many decoding sequences on, the last partial of each gets a warp of its own. Over FP8 that is slower (H200,
# 144 sequences of 200 to 1,600 tokens: 137 us become 133, over FP8 86 would become 97), and where several launches
# follow each other.
LEAST_TAILS = 64


def upload_limit(max_batch_tokens: int, max_slots: int, max_seq_len: int) -> int:
    """Bytes of work that a step can have at most. An item for what many share stands for at least two others."""
    partials = max_slots * math.ceil(max_seq_len / PARTIAL_KEYS)
    items = max_batch_tokens + 2 * (max_slots + partials)  # twice: padded to a power of two
    return ITEM_BYTES * items + MEMBER_BYTES * max_batch_tokens


class DecodeWork(NamedTuple):
    """Of a launch, or of up to three: partials that are kept in the workspace together. i32 arrays."""

    # [., 5] sequence, which of its partials, the place where it is left (-1: it is the only one), slot, how many of the
    # sequence's partials come before those that are items.
    items: Any
    # Where sequences share partials: [., 4] first member, members, which partial of theirs, slot of one of them; and
    # [., 2] the members: row of T; 16 times the place of its sequence's first partial, plus its first row there.
    prefix: Any | None = None
    members: Any | None = None
    # Of many sequences: as items, the last partial of each; it may then be that none is left for those.
    tails: Any | None = None


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """On the device."""

    prefill: Any | None  # i32 [., 4] sequence, first row of T, rows of T, slot
    decodes: tuple[DecodeWork, ...]

    @property
    def shape(self) -> Shape | None:
        """All that decides how a step without prompts is launched; None where that depends on more."""
        if len(self.decodes) != 1:
            return None
        (decode,) = self.decodes
        prefix, tails = decode.prefix, decode.tails
        return (len(decode.items), 0 if prefix is None else len(prefix), 0 if tails is None else len(tails))


class Sizes(NamedTuple):
    """group: query heads of a KV head. places: partials that the workspace holds. padded: decoding in powers of two, so
    that steps of about as much work launch as many blocks. fp8: K and V are held so."""

    group: int
    head_dim: int
    places: int
    padded: bool = False
    fp8: bool = False


def plan_attention(
    starts: I32, lengths: I32, slots: I32, tables: BlockTables, *, sizes: Sizes, upload: Upload
) -> AttentionWork:
    """The work of a step with rows starts[s] .. starts[s + 1] - 1 of sequences of lengths[s] tokens whose blocks
    stand in row slots[s] of the tables; i32[S + 1], [S], [S].

    A sequence whose rows fit into one mma decodes: a block of threads for each of its partials, but for those that it
    has in common with others. Others prefill: a block for each tile of rows.
    """
    partials = _ceil_div(lengths, PARTIAL_KEYS)
    arrays = (starts.tobytes(), partials.tobytes(), slots.tobytes())
    prefill, decodes = _work(*arrays, tables, tables.version, sizes)

    def put(array: I32 | None) -> Any:
        return None if array is None else upload.put(array)

    return AttentionWork(put(prefill), tuple([DecodeWork(*map(put, decode)) for decode in decodes]))


@lru_cache(maxsize=2)  # most steps have the work of the step before: a sequence gets a partial once in 256 steps
def _work(
    starts: bytes,
    partials: bytes,
    slots: bytes,
    tables: BlockTables,
    version: int,  # noqa: ARG001 - it is looked up by it
    sizes: Sizes,
) -> tuple[I32 | None, list[DecodeWork]]:
    """AttentionWork on the host, only to be read, of arrays of i32 as bytes. version: of the tables, which change."""
    first_rows, num_partials, of_sequences = (np.frombuffer(array, np.int32) for array in (starts, partials, slots))
    num_rows = first_rows[1:] - first_rows[:-1]
    query_rows = num_rows * sizes.group
    prompts = np.flatnonzero(query_rows > MMA_ROWS)
    prefill = None
    if len(prompts):
        tile_rows = prefill_rows(sizes.head_dim) // sizes.group
        prefill = _prefill_tiles(prompts, first_rows, num_rows, of_sequences, tile_rows)
    decoding = np.flatnonzero((query_rows > 0) & (query_rows <= MMA_ROWS)).astype(np.int32)
    few = _Few(decoding, first_rows[decoding], num_rows[decoding], of_sequences[decoding], num_partials[decoding])
    parts = few.launches(sizes.places)
    many = len(decoding) >= LEAST_TAILS and len(parts) == 1 and not sizes.fp8
    decodes = [_decode_work(part, tables, sizes, many=many) for part in parts]
    for decode in decodes:
        for array in decode:
            if array is not None:
                array.setflags(write=False)
    return prefill, decodes


def _prefill_tiles(sequences: Any, starts: I32, num_rows: I32, slots: I32, tile_rows: int) -> I32:
    """i32[., 4]: sequence, first row, rows, slot. The last rows first: they have the most keys, and take longest."""
    tiles = _ceil_div(num_rows[sequences], tile_rows)
    work = _repeated(tiles, sequences, starts[sequences], num_rows[sequences], slots[sequences])
    offset = _counts(tiles) * tile_rows
    work[:, 1] += offset
    work[:, 2] = np.minimum(work[:, 2] - offset, tile_rows)
    return work[::-1].copy()


@dataclass(frozen=True, slots=True)
class _Few:
    """Sequences of few rows, i32[S] each."""

    sequences: I32
    starts: I32  # first rows of T
    num_rows: I32
    slots: I32
    num_partials: I32

    def launches(self, places: int) -> list[_Few]:
        """In parts: the partials of all together may need more places than there are."""
        kept = np.where(self.num_partials > 1, self.num_partials, 0)  # in the workspace
        parts, first = [], 0
        while first < len(kept):
            count = max(1, int(kept[first:].cumsum().searchsorted(places, side="right")))
            arrays = (self.sequences, self.starts, self.num_rows, self.slots, self.num_partials)
            parts.append(_Few(*(array[first : first + count] for array in arrays)))
            first += count
        return parts

    def places(self) -> I32:
        """Where the partials of each begin; -1 of an only one."""
        kept = np.where(self.num_partials > 1, self.num_partials, 0)
        found: I32 = np.where(kept > 0, kept.cumsum() - kept, -1).astype(np.int32)
        return found


def _decode_work(few: _Few, tables: BlockTables, sizes: Sizes, *, many: bool) -> DecodeWork:
    """On the host. many: whether last partials are apart; behind shared prefixes they always are."""
    places, groups = few.places(), _groups(few, tables)
    shared = np.zeros_like(places) if groups is None else groups.partials_shared()
    own = few.num_partials - shared
    items = _repeated(own, few.sequences, shared, places + shared, few.slots, shared)
    which = _counts(own)
    items[:, 1] += which
    items[:, 2] += which  # that of an only partial, 0, leaves the -1
    pad = _padded if sizes.padded else np.ascontiguousarray
    prefix, members, tails = None, None, None
    if groups is not None:
        prefix = pad(_prefix_items(few, groups, prefix_rows(sizes.head_dim) // sizes.group))
        members = _members(few, groups.order, places, sizes.group)
    if tail_warps(sizes.head_dim) and (groups is not None or many):
        ends = own.cumsum() - 1
        tails = pad(items[ends])
        items = np.delete(items, ends, axis=0)
    return DecodeWork(pad(items), prefix, members, tails)


def _groups(few: _Few, tables: BlockTables) -> Groups | None:
    """Those that are worth a launch. Of what they may share, all rows see all keys: not the last partial, nor the one
    before it where it may end among several rows."""
    whole = np.maximum(few.num_partials - 1 - (few.num_rows > 1), 0)
    groups = find_groups(tables.host, few.slots, whole, partial_blocks=PARTIAL_BLOCKS, least=LEAST_SEQUENCES)
    return groups if groups is not None and groups.partials_saved() >= LEAST_SAVED else None


def _prefix_items(few: _Few, groups: Groups, rows_each: int) -> I32:
    """i32[., 4] of the prefix kernel: members of each group in parts of rows_each, for each partial."""
    before = np.concatenate([[0], few.num_rows[groups.order].cumsum()]).astype(np.int32)
    first, end = before[groups.first], before[groups.end]
    parts = _ceil_div(end - first, rows_each)
    chunks = _repeated(parts, first, end, groups.low, few.slots[groups.order[groups.first]])
    chunks[:, 0] += _counts(parts) * rows_each
    chunks[:, 1] = np.minimum(chunks[:, 1] - chunks[:, 0], rows_each)
    levels = (groups.high - groups.low).repeat(parts)
    items = chunks.repeat(levels, axis=0)
    items[:, 2] += _counts(levels)
    return items


def _members(few: _Few, order: I32, places: I32, group: int) -> I32:
    """i32[T, 2] of the rows of all sequences, in that order of the sequences."""
    num_rows = few.num_rows[order]
    members = _repeated(num_rows, few.starts[order], places[order] * MMA_ROWS)
    members += _counts(num_rows)[:, None] * np.array([1, group], np.int32)
    return members


def _repeated(repeats: I32, *columns: Any) -> I32:
    """i32[., columns]: row i of the columns repeats[i] times."""
    rows = np.empty((len(repeats), len(columns)), np.int32)
    for i, column in enumerate(columns):
        rows[:, i] = column
    return rows.repeat(repeats, axis=0)


def _padded(work: I32) -> I32:
    """With as many items of nothing to do as make a power of two."""
    count = 1 << (len(work) - 1).bit_length() if len(work) else 0
    target = np.full((count, work.shape[1]), -1, np.int32)
    target[: len(work)] = work
    return target


def _counts(repeats: Any) -> Any:
    """0 .. repeats[i] - 1 for each i, one after another."""
    ends = repeats.cumsum(dtype=np.int32)
    return np.arange(ends[-1], dtype=np.int32) - (ends - repeats).repeat(repeats)


def _ceil_div(a: Any, b: int) -> Any:  # of an int or of an array
    return -(-a // b)
