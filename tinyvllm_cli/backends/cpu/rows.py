"""A step with everything resolved: positions, tokens and KV rows as plain numbers, checked where it enters."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from tinyvllm_cli.backends.cpu.slots import Slots
from tinyvllm_cli.config import BLOCK_SIZE
from tinyvllm_cli.types import I32, Batch, Limits

TILE_ROWS = 64  # rows that attend together: more would only meet more keys that the causal mask hides
TILE_SCORES = 1 << 16  # rows times keys of a tile, for each head: the scores stay near the cache
GROUP_TILES = 8  # single rows that share a softmax: fewer calls, and still several groups for several threads


@dataclass(frozen=True, slots=True)
class Tile:
    """Neighbouring rows of one sequence, and where the keys lie that they attend to."""

    start: int  # first of its rows in T
    length: int  # keys: the position of its last row + 1
    blocks: int | I32  # the first block where they are consecutive, else all blocks up to length


@dataclass(frozen=True, slots=True)
class Group:
    """Tiles of equally many rows and not too different lengths, which share a softmax."""

    num_rows: int  # of each tile; 1 where there are several tiles
    length: int  # the greatest
    tiles: tuple[Tile, ...]


@dataclass(frozen=True, slots=True)
class Rows:
    """What ops know of a step of T rows, R of them sampled."""

    slots: I32  # [T]
    token_ids: I32  # [T]; below 0 only as the mark of a failed draw
    positions: I32  # [T]
    kv_rows: I32  # [T] block * BLOCK_SIZE + offset
    groups: tuple[Group, ...]  # cover all rows
    logits_indices: I32  # [R]
    sample_slots: I32  # [R]


def resolve_rows(batch: Batch, limits: Limits, kept: Slots) -> Rows:
    """Fill in what the batch leaves to the device: -1 in num_computed is what it counted, in token_ids what it holds.

    A malformed batch is a bug of the caller: ValueError.
    """
    _check_shapes(batch, limits)
    slots, starts = batch.slots, batch.query_start_loc
    num_rows = np.diff(starts)
    computed = np.where(batch.num_computed < 0, kept.counted[slots], batch.num_computed)
    lengths = computed + num_rows
    _check_blocks(batch.block_tables, np.where(num_rows > 0, lengths, 0), limits)

    sequence = np.repeat(np.arange(len(slots), dtype=np.int32), num_rows)
    positions = np.arange(len(sequence), dtype=np.int32) - (starts[:-1] - computed)[sequence]
    blocks = batch.block_tables[sequence, positions // BLOCK_SIZE]
    row_slots = slots[sequence]
    return Rows(
        slots=row_slots,
        token_ids=np.where(batch.token_ids == -1, kept.token_table[row_slots, positions], batch.token_ids),
        positions=positions,
        kv_rows=blocks * np.int32(BLOCK_SIZE) + positions % np.int32(BLOCK_SIZE),
        groups=tuple(_groups(_tiles(batch.block_tables, starts, lengths))),
        logits_indices=batch.logits_indices,
        sample_slots=batch.sample_slots,
    )


def _tiles(block_tables: I32, starts: I32, lengths: I32) -> Iterator[tuple[int, Tile]]:
    """Number of rows, and tile, of every part of the step."""
    num_blocks = -(-lengths // BLOCK_SIZE)
    step = np.arange(block_tables.shape[1], dtype=np.int32)
    runs = (block_tables == block_tables[:, :1] + step) | (step >= num_blocks[:, None])
    consecutive = runs.all(axis=1).tolist()
    bounds, ends = starts.tolist(), lengths.tolist()
    for s, table in enumerate(block_tables):
        start, end = bounds[s], bounds[s + 1]
        tile_rows = max(1, min(TILE_ROWS, TILE_SCORES // max(1, ends[s])))
        for low in range(start, end, tile_rows):
            num_rows = min(tile_rows, end - low)
            length = ends[s] - (end - low - num_rows)
            blocks = int(table[0]) if consecutive[s] else table[: -(-length // BLOCK_SIZE)]
            yield num_rows, Tile(low, length, blocks)


def _groups(tiles: Iterable[tuple[int, Tile]]) -> Iterator[Group]:
    """Tiles of several rows alone, single rows together: the longest with at most twice the keys of the shortest."""
    singles = []
    for num_rows, tile in tiles:
        if num_rows == 1:
            singles.append(tile)
        else:
            yield Group(num_rows, tile.length, (tile,))
    singles.sort(key=lambda tile: tile.length)
    while singles:
        count = min(GROUP_TILES, bisect_right(singles, 2 * singles[0].length, key=lambda tile: tile.length))
        yield Group(1, singles[count - 1].length, tuple(singles[:count]))
        del singles[:count]


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
