"""The attention op: which rows prefill and which decode, laid out for the kernels of cuda/{prefill,decode}.cu."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tinyvllm_cli.types import I32

if TYPE_CHECKING:
    from tinyvllm_cli.backends.gpu.device import Device
    from tinyvllm_cli.backends.gpu.kv import KVCache
    from tinyvllm_cli.backends.gpu.rows import Rows, Upload

# These repeat cuda/keys.cuh, tile.cuh, prefill.cu and decode.cu; a test compares them with the sources.
TILE_KEYS = 64
PARTIAL_KEYS = 256
MMA_ROWS = 16
PREFILL_WARPS = 4
DECODE_WARPS = 4
WARP = 32

MAX_PLACES = 4096  # partials that are kept at once: one launch for 256 sequences of 4,096 tokens
LOG2_E = 1.4426950408889634
ITEM_BYTES = 4 * 4  # of work, i32 [., 4]


def supports_head_dim(head_dim: int) -> bool:
    """Whether the kernels' fragments cover it: any multiple of 16 up to 128, of 32 up to 256."""
    return 0 < head_dim <= 256 and head_dim % (16 * _column_groups(head_dim)) == 0


def prefill_rows(head_dim: int) -> int:
    """Query rows, heads counted, of a block of the prefill kernel."""
    return PREFILL_WARPS // _column_groups(head_dim) * MMA_ROWS


def _column_groups(head_dim: int) -> int:
    """Warps of the prefill kernel that share 16 query rows, each with a part of the columns of V."""
    return 2 if head_dim > 128 else 1


def prefill_shared(head_dim: int) -> int:
    """Shared memory of a block: query rows, columns of the merged partials, stages of a tile of K and one of V."""
    columns, row = head_dim // 8, _row_bytes(head_dim)
    kept = columns if head_dim <= 64 else columns - 3 if head_dim <= 128 else 0
    stages = 2 if head_dim <= 64 else 1
    return prefill_rows(head_dim) * row + kept * PREFILL_WARPS * WARP * 16 + stages * 2 * TILE_KEYS * row


def decode_shared(head_dim: int) -> int:
    """Shared memory of a block: weights of each tile, sums and greatest scores, then tiles of K, or of V."""
    exchange = DECODE_WARPS * (MMA_ROWS * TILE_KEYS * 2 + WARP * 8 + MMA_ROWS * 4)
    tiles = DECODE_WARPS if head_dim <= 128 else 2
    return exchange + tiles * TILE_KEYS * _row_bytes(head_dim)


def _row_bytes(head_dim: int) -> int:
    return 2 * head_dim + (16 if head_dim % 64 else 0)


def partial_places(max_slots: int, max_seq_len: int) -> int:
    """Partials that the workspace holds: all there can be, or MAX_PLACES; at least those of one sequence."""
    of_sequence = math.ceil(max_seq_len / PARTIAL_KEYS)
    return max(min(max_slots * of_sequence, MAX_PLACES), of_sequence)


def upload_limit(max_batch_tokens: int, max_slots: int, max_seq_len: int) -> int:
    """Bytes of work that a step can have at most."""
    partials = max_slots * math.ceil(max_seq_len / PARTIAL_KEYS)
    return ITEM_BYTES * (max_batch_tokens + 2 * (max_slots + partials))  # twice: padded to a power of two


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """Device i32[., 4] each, or none."""

    prefill: Any | None  # sequence, first row of T, rows of T, slot
    # Sequence, which of its partials, the place where it is left (-1: it is the only one), slot. Each for a launch:
    # partials that are kept in the workspace together.
    decodes: tuple[Any, ...]


def plan_attention(
    starts: I32,
    lengths: I32,
    slots: I32,
    *,
    group: int,
    head_dim: int,
    places: int,
    upload: Upload,
    padded: bool = False,
) -> AttentionWork:
    """The work of a step with rows starts[s] .. starts[s + 1] - 1 of sequences of lengths[s] tokens whose blocks
    stand in row slots[s] of the block tables; i32[S + 1], [S], [S].

    group: query heads of a KV head. A sequence whose rows fit into one mma decodes: a block of threads for each of
    its partials. Others prefill: a block for each tile of rows. padded: decoding in powers of two, so that steps of
    about as much work launch as many blocks.
    """
    put = (lambda work: upload.put(_padded(work))) if padded else upload.put
    num_rows = np.diff(starts)
    decodes = (num_rows > 0) & (num_rows * group <= MMA_ROWS)
    prompts = np.flatnonzero(num_rows * group > MMA_ROWS)
    tile_rows = prefill_rows(head_dim) // group
    launches = _decode_items(np.flatnonzero(decodes), slots, _ceil_div(lengths, PARTIAL_KEYS), places)
    return AttentionWork(
        prefill=upload.put(_prefill_tiles(starts, slots, prompts, tile_rows)) if len(prompts) else None,
        decodes=tuple(map(put, launches)),
    )


def _prefill_tiles(starts: I32, slots: I32, sequences: Any, tile_rows: int) -> I32:
    """i32[., 4]: sequence, first row, rows, slot. The last rows first: they have the most keys, and take longest."""
    num_rows = (starts[1:] - starts[:-1])[sequences]
    tiles = _ceil_div(num_rows, tile_rows)
    sequence = np.repeat(sequences, tiles)[::-1]
    offset = (_counts(tiles) * tile_rows)[::-1]
    rows = np.minimum(np.repeat(num_rows, tiles)[::-1] - offset, tile_rows)
    return _columns(sequence, starts[sequence] + offset, rows, slots[sequence])


def _decode_items(sequences: Any, slots: I32, num_partials: I32, places: int) -> list[I32]:
    """The work of each launch; the partials of all of them together may need more places than there are."""
    kept = np.where(num_partials[sequences] > 1, num_partials[sequences], 0)
    launches = []
    while len(sequences):
        count = max(1, int(np.searchsorted(np.cumsum(kept), places, side="right")))
        launches.append(_decode_launch(sequences[:count], slots, num_partials[sequences[:count]], kept[:count]))
        sequences, kept = sequences[count:], kept[count:]
    return launches


def _decode_launch(sequences: Any, slots: I32, partials: Any, kept: Any) -> I32:
    first_place = np.cumsum(kept) - kept
    which = _counts(partials)
    place = np.where(np.repeat(kept, partials) > 0, np.repeat(first_place, partials) + which, -1)
    sequence = np.repeat(sequences, partials)
    return _columns(sequence, which, place, slots[sequence])


def _columns(*columns: Any) -> I32:
    """i32[., 4]"""
    work = np.empty((len(columns[0]), 4), np.int32)
    for i, column in enumerate(columns):
        work[:, i] = column
    return work


def _padded(work: I32) -> I32:
    """With as many items of nothing to do as make a power of two."""
    target = np.full((1 << (len(work) - 1).bit_length(), 4), -1, np.int32)
    target[: len(work)] = work
    return target


def attend(device: Device, q: Any, cache: KVCache, rows: Rows, *, layer: int) -> Any:
    """h elem [T, Hq D] of q elem [T, Hq, D]; the op `attention` of backends/cpu/ops.py."""
    num_heads, head_dim = q.shape[1:]
    num_layers, num_kv_heads = cache.blocks.shape[1], cache.blocks.shape[3]
    sizes = (num_heads, num_kv_heads, rows.width, layer, num_layers)
    tail = (rows.block_tables, *map(np.int32, sizes), np.float32(LOG2_E / math.sqrt(head_dim)))
    buffers, pool = device.buffers, cache.blocks
    out, work = buffers.attended, rows.attention
    if work.prefill is not None:
        device.launch(
            "attend_prefill",
            (len(work.prefill), num_kv_heads),
            PREFILL_WARPS * WARP,
            (out, q, pool, work.prefill, rows.positions, *tail),
            shared=prefill_shared(head_dim),
        )
    for items in work.decodes:
        device.launch(
            "attend_decode",
            (len(items), num_kv_heads),
            DECODE_WARPS * WARP,
            (out, buffers.partials, buffers.tickets, q, pool, items, rows.query_start_loc, rows.lengths, *tail),
            shared=decode_shared(head_dim),
        )
    return out[: rows.num_rows]


def _counts(repeats: Any) -> Any:
    """0 .. repeats[i] - 1 for each i, one after another."""
    return np.arange(repeats.sum()) - np.repeat(np.cumsum(repeats) - repeats, repeats)


def _ceil_div(a: Any, b: int) -> Any:  # of an int or of an array
    return -(-a // b)
