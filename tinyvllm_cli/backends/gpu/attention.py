"""The attention op: which rows prefill and which decode, laid out for the kernels of cuda/{prefill,decode}.cu."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from tinyvllm_cli.config import KVDtypeName
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


@cache  # asked for in every layer, as the others
def prefill_rows(head_dim: int) -> int:
    """Query rows, heads counted, of a block of the prefill kernel."""
    return PREFILL_WARPS // _column_groups(head_dim) * MMA_ROWS


def _column_groups(head_dim: int) -> int:
    """Warps of the prefill kernel that share 16 query rows, each with a part of the columns of V."""
    return 2 if head_dim > 128 else 1


@cache
def prefill_shared(head_dim: int, kv_dtype: KVDtypeName) -> int:
    """Shared memory of a block: query rows, columns of the merged partials, stages of a tile of K and one of V."""
    columns, row = head_dim // 8, _row_bytes(head_dim)
    kept = columns if head_dim <= 64 else columns - 3 if head_dim <= 128 else 0
    stages, tile = 2 if head_dim <= 64 else 1, TILE_KEYS * row + _scales_bytes(kv_dtype)
    return prefill_rows(head_dim) * row + kept * PREFILL_WARPS * WARP * 16 + stages * 2 * tile


@cache
def decode_shared(head_dim: int, kv_dtype: KVDtypeName) -> int:
    """Shared memory of a block: weights of each tile, sums and greatest scores, then tiles of K, or of V."""
    exchange = DECODE_WARPS * (MMA_ROWS * TILE_KEYS * 2 + WARP * 8 + MMA_ROWS * 4 + 2 * _scales_bytes(kv_dtype))
    if kv_dtype == "fp8":
        return exchange + DECODE_WARPS * TILE_KEYS * _code_row_bytes(head_dim)
    return exchange + (DECODE_WARPS if head_dim <= 128 else 2) * TILE_KEYS * _row_bytes(head_dim)


def _row_bytes(head_dim: int) -> int:
    return 2 * head_dim + (16 if head_dim % 64 else 0)


def _code_row_bytes(head_dim: int) -> int:
    pieces = head_dim // 16
    return 16 * (pieces if pieces & (pieces - 1) == 0 else pieces | 1)


def _scales_bytes(kv_dtype: KVDtypeName) -> int:
    return TILE_KEYS * 2 if kv_dtype == "fp8" else 0


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
    partials = _ceil_div(lengths, PARTIAL_KEYS)
    prefill, decodes = _work(
        starts.tobytes(), partials.tobytes(), slots.tobytes(), group, prefill_rows(head_dim) // group, places, padded
    )
    return AttentionWork(None if prefill is None else upload.put(prefill), tuple(map(upload.put, decodes)))


@lru_cache(maxsize=2)  # most steps have the work of the step before: a sequence gets a partial once in 256 steps
def _work(
    starts: bytes, partials: bytes, slots: bytes, group: int, tile_rows: int, places: int, padded: bool
) -> tuple[I32 | None, list[I32]]:
    """AttentionWork on the host, only to be read, of arrays of i32 as bytes."""
    first_rows, num_partials, of_sequences = (np.frombuffer(array, np.int32) for array in (starts, partials, slots))
    num_rows = first_rows[1:] - first_rows[:-1]
    query_rows = num_rows * group
    prompts = np.flatnonzero(query_rows > MMA_ROWS)
    decoding = np.flatnonzero((query_rows > 0) & (query_rows <= MMA_ROWS))
    prefill = _prefill_tiles(prompts, first_rows, num_rows, of_sequences, tile_rows) if len(prompts) else None
    decodes = _decode_items(decoding, of_sequences[decoding], num_partials[decoding], places)
    if padded:
        decodes = list(map(_padded, decodes))
    for work in decodes if prefill is None else [prefill, *decodes]:
        work.setflags(write=False)
    return prefill, decodes


def _prefill_tiles(sequences: Any, starts: I32, num_rows: I32, slots: I32, tile_rows: int) -> I32:
    """i32[., 4]: sequence, first row, rows, slot. The last rows first: they have the most keys, and take longest."""
    tiles = _ceil_div(num_rows[sequences], tile_rows)
    work = _repeated(tiles, sequences, starts[sequences], num_rows[sequences], slots[sequences])
    offset = _counts(tiles) * tile_rows
    work[:, 1] += offset
    work[:, 2] = np.minimum(work[:, 2] - offset, tile_rows)
    return work[::-1].copy()


def _decode_items(sequences: Any, slots: I32, num_partials: I32, places: int) -> list[I32]:
    """The work of each launch; the partials of all sequences together may need more places than there are."""
    kept = np.where(num_partials > 1, num_partials, 0)  # in the workspace
    launches = []
    while len(sequences):
        ends = kept.cumsum()
        count = max(1, int(ends.searchsorted(places, side="right")))
        first = np.where(kept > 0, ends - kept, -1)  # place
        work = _repeated(num_partials[:count], sequences[:count], 0, first[:count], slots[:count])
        which = _counts(num_partials[:count])
        work[:, 1] = which
        work[:, 2] += which  # that of an only partial, 0, leaves the -1
        launches.append(work)
        sequences, slots, num_partials, kept = (array[count:] for array in (sequences, slots, num_partials, kept))
    return launches


def _repeated(repeats: I32, *columns: Any) -> I32:
    """i32[., 4]: row i of the columns, or of a number, repeats[i] times."""
    rows = np.empty((len(repeats), 4), np.int32)
    for i, column in enumerate(columns):
        rows[:, i] = column
    return rows.repeat(repeats, axis=0)


def _padded(work: I32) -> I32:
    """With as many items of nothing to do as make a power of two."""
    target = np.full((1 << (len(work) - 1).bit_length(), 4), -1, np.int32)
    target[: len(work)] = work
    return target


def attend(device: Device, q: Any, cache: KVCache, rows: Rows, *, layer: int) -> Any:
    """h elem [T, Hq D] of q elem [T, Hq, D]; the op `attention` of backends/cpu/ops.py."""
    num_heads, head_dim = q.shape[1:]
    num_layers, num_kv_heads = cache.blocks.shape[1], cache.blocks.shape[3]
    group = num_heads // num_kv_heads
    sizes = (group, -(-(1 << 16) // group), num_kv_heads, rows.width, layer, num_layers)
    tail = (rows.block_tables, *sizes, LOG2_E / math.sqrt(head_dim))
    buffers, pool = device.buffers, cache.blocks
    out, work = buffers.attended, rows.attention
    if work.prefill is not None:
        device.launch(
            "attend_prefill",
            (len(work.prefill), num_kv_heads),
            PREFILL_WARPS * WARP,
            (out, q, pool, work.prefill, rows.positions, *tail),
            shared=prefill_shared(head_dim, cache.kv_dtype),
        )
    for items in work.decodes:
        device.launch(
            "attend_decode",
            (len(items), num_kv_heads),
            DECODE_WARPS * WARP,
            (out, buffers.partials, buffers.tickets, q, pool, items, rows.query_start_loc, rows.lengths, *tail),
            shared=decode_shared(head_dim, cache.kv_dtype),
        )
    return out[: rows.num_rows]


def _counts(repeats: Any) -> Any:
    """0 .. repeats[i] - 1 for each i, one after another."""
    ends = repeats.cumsum(dtype=np.int32)
    return np.arange(ends[-1], dtype=np.int32) - (ends - repeats).repeat(repeats)


def _ceil_div(a: Any, b: int) -> Any:  # of an int or of an array
    return -(-a // b)
