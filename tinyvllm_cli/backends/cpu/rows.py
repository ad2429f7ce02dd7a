"""A step with everything resolved: positions, tokens and KV rows as plain numbers."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from tinyvllm_cli.backends.cpu.slots import Slots
from tinyvllm_cli.backends.row_layout import check_blocks, row_layout
from tinyvllm_cli.config import BLOCK_SIZE
from tinyvllm_cli.types import I32, U32, Batch, Limits

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
    targets: I32 | None  # [R], as in Batch
    mask_rows: I32 | None  # [R], as in Batch
    top_logprobs: int  # as in Batch
    masks: U32 | None = None  # [M, ceil(V / 32)], once they are there


def resolve_rows(batch: Batch, limits: Limits, kept: Slots) -> Rows:
    """Fill in what the batch leaves to the device: -1 in num_computed is what it counted, in token_ids what it holds.

    A malformed batch is a bug of the caller: ValueError.
    """
    layout = row_layout(batch, limits, kept.counted)
    check_blocks(batch.block_tables, layout.num_blocks, limits)
    sequence, positions = layout.sequence, layout.positions
    blocks = batch.block_tables[sequence, positions // BLOCK_SIZE]
    row_slots = batch.slots[sequence]
    return Rows(
        slots=row_slots,
        token_ids=np.where(batch.token_ids == -1, kept.token_table[row_slots, positions], batch.token_ids),
        positions=positions,
        kv_rows=blocks * np.int32(BLOCK_SIZE) + positions % np.int32(BLOCK_SIZE),
        groups=tuple(_groups(_tiles(batch.block_tables, batch.query_start_loc, layout.lengths))),
        # Copies, as a step that waits for its mask reads them when the caller may have changed his own.
        logits_indices=batch.logits_indices.copy(),
        sample_slots=batch.sample_slots.copy(),
        targets=None if batch.targets is None else batch.targets.copy(),
        mask_rows=None if batch.mask_rows is None else batch.mask_rows.copy(),
        top_logprobs=batch.top_logprobs,
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
