"""The attention op: which rows prefill and which decode, laid out for the kernels of cuda/attention.cu."""

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

# These repeat cuda/tile.cuh and cuda/attention.cu; a test compares them with the sources.
TILE_KEYS = 64
PARTIAL_KEYS = 256
MMA_ROWS = 16
PREFILL_WARPS = 4
MERGE_THREADS = 128
WARP = 32

MAX_PLACES = 4096  # partials that are kept at once: one launch for 256 sequences of 4,096 tokens
LOG2_E = 1.4426950408889634
ITEM_BYTES = 3 * 4  # of work, i32 [., 3]


def supports_head_dim(head_dim: int) -> bool:
    """Whether the kernels' fragments cover it: any multiple of 16 up to 128, of 32 up to 256."""
    return 0 < head_dim <= 256 and head_dim % (16 * column_groups(head_dim)) == 0


def column_groups(head_dim: int) -> int:
    """Warps that share 16 query rows, each with a part of the columns of V."""
    return 2 if head_dim > 128 else 1


def prefill_rows(head_dim: int) -> int:
    """Query rows, heads counted, of a block of the prefill kernel."""
    return PREFILL_WARPS // column_groups(head_dim) * MMA_ROWS


def shared_bytes(head_dim: int) -> tuple[int, int]:
    """Shared memory of a block of the prefill and of the decode kernel: query rows, then stages of K and V."""
    row = 2 * head_dim + 16
    tile = 2 * TILE_KEYS * row
    prefill_stages = 2 if head_dim <= 128 else 1
    return prefill_rows(head_dim) * row + prefill_stages * tile, MMA_ROWS * row + tile


def partial_places(max_slots: int, max_seq_len: int) -> int:
    """Partials that the workspace holds: all there can be, or MAX_PLACES; at least those of one sequence."""
    of_sequence = math.ceil(max_seq_len / PARTIAL_KEYS)
    return max(min(max_slots * of_sequence, MAX_PLACES), of_sequence)


def upload_limit(max_batch_tokens: int, max_slots: int, max_seq_len: int) -> int:
    """Bytes of work that a step can have at most."""
    partials = max_slots * math.ceil(max_seq_len / PARTIAL_KEYS)
    return ITEM_BYTES * (max_batch_tokens + 2 * (2 * max_slots + partials))  # twice: padded to powers of two


@dataclass(frozen=True, slots=True)
class Decode:
    """Sequences whose partials fit into the workspace together."""

    items: Any  # device i32[., 3]: sequence, which of its partials, its place (-1: the only one of its sequence)
    merges: Any | None  # device i32[., 3]: sequence, first place, how many


@dataclass(frozen=True, slots=True)
class AttentionWork:
    prefill: Any | None  # device i32[., 3]: sequence, first row of T, rows of T
    decodes: tuple[Decode, ...]


def plan_attention(
    starts: I32, lengths: I32, *, group: int, head_dim: int, places: int, upload: Upload, padded: bool = False
) -> AttentionWork:
    """The work of a step with rows starts[s] .. starts[s + 1] - 1 of sequences of lengths[s] tokens, i32[S + 1], [S].

    group: query heads of a KV head. A sequence whose rows fit into one mma decodes: a block of threads for each of
    its partials. Others prefill: a block for each tile of rows. padded: items and merges in powers of two, so that
    steps of about as much work launch as many blocks.
    """
    put = (lambda work: upload.put(_padded(work))) if padded else upload.put
    num_rows = np.diff(starts)
    decodes = (num_rows > 0) & (num_rows * group <= MMA_ROWS)
    tiles = _prefill_tiles(starts, np.flatnonzero(num_rows * group > MMA_ROWS), prefill_rows(head_dim) // group)
    return AttentionWork(
        prefill=upload.put(tiles) if len(tiles) else None,
        decodes=tuple(
            Decode(put(items), put(merges) if len(merges) else None)
            for items, merges in _decode_items(np.flatnonzero(decodes), _ceil_div(lengths, PARTIAL_KEYS), places)
        ),
    )


def _prefill_tiles(starts: I32, sequences: Any, tile_rows: int) -> I32:
    """i32[., 3]: sequence, first row, rows. The last rows first: they have the most keys, and take longest."""
    num_rows = (starts[1:] - starts[:-1])[sequences]
    tiles = _ceil_div(num_rows, tile_rows)
    sequence = np.repeat(sequences, tiles)
    offset = _counts(tiles) * tile_rows
    rows = np.minimum(np.repeat(num_rows, tiles) - offset, tile_rows)
    return np.ascontiguousarray(np.stack([sequence, starts[sequence] + offset, rows], axis=1)[::-1], np.int32)


def _decode_items(sequences: Any, num_partials: I32, places: int) -> list[tuple[I32, I32]]:
    """(items, merges) of each launch; the partials of all of them together may need more places than there are."""
    kept = np.where(num_partials[sequences] > 1, num_partials[sequences], 0)
    launches = []
    while len(sequences):
        count = max(1, int(np.searchsorted(np.cumsum(kept), places, side="right")))
        launches.append(_decode_launch(sequences[:count], num_partials[sequences[:count]], kept[:count]))
        sequences, kept = sequences[count:], kept[count:]
    return launches


def _decode_launch(sequences: Any, partials: Any, kept: Any) -> tuple[I32, I32]:
    first_place = np.cumsum(kept) - kept
    which = _counts(partials)
    place = np.where(np.repeat(kept, partials) > 0, np.repeat(first_place, partials) + which, -1)
    items = np.stack([np.repeat(sequences, partials), which, place], axis=1).astype(np.int32)
    several = kept > 0
    merges = np.stack([sequences[several], first_place[several], kept[several]], axis=1).astype(np.int32)
    return items, merges


def _padded(work: I32) -> I32:
    """With as many items of nothing to do as make a power of two."""
    target = np.full((1 << (len(work) - 1).bit_length(), 3), -1, np.int32)
    target[: len(work)] = work
    return target


def attend(device: Device, q: Any, cache: KVCache, rows: Rows, *, layer: int) -> Any:
    """h elem [T, Hq D] of q elem [T, Hq, D]; the op `attention` of backends/cpu/ops.py."""
    num_heads, head_dim = q.shape[1:]
    num_layers, num_kv_heads = cache.blocks.shape[1], cache.blocks.shape[3]
    sizes = (num_heads, num_kv_heads, rows.width, layer, num_layers)
    scale = np.float32(LOG2_E / math.sqrt(head_dim))
    tail = (*map(np.int32, sizes), scale)
    prefill_shared, decode_shared = shared_bytes(head_dim)
    out, partials, pool = device.buffers.attended, device.buffers.partials, cache.blocks
    starts, lengths, tables = rows.query_start_loc, rows.lengths, rows.block_tables
    prefill, decodes = rows.attention.prefill, rows.attention.decodes
    if prefill is not None:
        device.launch(
            "attend_prefill",
            (len(prefill), num_kv_heads),
            PREFILL_WARPS * WARP,
            (out, q, pool, prefill, rows.positions, tables, *tail),
            shared=prefill_shared,
        )
    for decode in decodes:
        device.launch(
            "attend_decode",
            (len(decode.items), num_kv_heads),
            column_groups(head_dim) * WARP,
            (out, partials, q, pool, decode.items, starts, lengths, tables, *tail),
            shared=decode_shared,
        )
        if decode.merges is not None:
            grid = (len(decode.merges), num_kv_heads)
            device.launch(
                "merge_partials", grid, MERGE_THREADS, (out, partials, decode.merges, starts, *tail[:2], scale)
            )
    return out[: rows.num_rows]


def _counts(repeats: Any) -> Any:
    """0 .. repeats[i] - 1 for each i, one after another."""
    return np.arange(repeats.sum()) - np.repeat(np.cumsum(repeats) - repeats, repeats)


def _ceil_div(a: Any, b: int) -> Any:  # of an int or of an array
    return -(-a // b)
