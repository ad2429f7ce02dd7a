"""The attention op: its kernels (cuda/{prefill,prefix,tail,decode,ahead}.cu), and the memory that they work in."""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING, Any

from tinyvllm_cli.config import BLOCK_SIZE, KVDtypeName

if TYPE_CHECKING:
    from tinyvllm_cli.backends.gpu.device import Device
    from tinyvllm_cli.backends.gpu.kv import KVCache
    from tinyvllm_cli.backends.gpu.rows import Rows

# These repeat cuda/keys.cuh, tile.cuh and the kernels' files; a test compares them with the sources.
TILE_KEYS = 64
PARTIAL_KEYS = 256
MMA_ROWS = 16
PREFILL_WARPS = 4
PREFIX_WARPS = 4
DECODE_WARPS = 4
WARP = 32

PARTIAL_BLOCKS = PARTIAL_KEYS // BLOCK_SIZE  # KV blocks of a partial
AHEAD_BLOCKS = 128  # of threads, at most, of attend_ahead: each takes most of a multiprocessor's shared memory
MAX_PLACES = 4096  # partials that are kept at once: one launch for 256 sequences of 4,096 tokens
LOG2_E = 1.4426950408889634


def supports_head_dim(head_dim: int) -> bool:
    """Whether the kernels' fragments cover it: any multiple of 16 up to 128, of 32 up to 256."""
    return 0 < head_dim <= 256 and head_dim % (16 * _column_groups(head_dim)) == 0


@cache  # asked for in every layer, as the others
def prefill_rows(head_dim: int) -> int:
    """Query rows, heads counted, of a block of the prefill kernel."""
    return PREFILL_WARPS // _column_groups(head_dim) * MMA_ROWS


@cache
def prefix_rows(head_dim: int) -> int:
    """Likewise of the prefix kernel."""
    return PREFIX_WARPS // _column_groups(head_dim) * MMA_ROWS


@cache
def tail_warps(head_dim: int) -> int:
    """Warps of a block of the tail kernel, a sequence each; 0: the kernel is not for heads so wide."""
    return 4 if head_dim <= 64 else 2 if head_dim <= 128 else 0


def _column_groups(head_dim: int) -> int:
    """Warps of both kernels that share 16 query rows, each with a part of the columns of V."""
    return 2 if head_dim > 128 else 1


@cache
def prefill_shared(head_dim: int, kv_dtype: KVDtypeName) -> int:
    """Shared memory of a block: query rows, columns of the merged partials, stages of a tile of K and one of V."""
    columns, row = head_dim // 8, _row_bytes(head_dim)
    kept = columns if head_dim <= 64 else columns - 3 if head_dim <= 128 else 0
    tiles = _stages(head_dim) * _stage_bytes(head_dim, kv_dtype)
    return prefill_rows(head_dim) * row + kept * PREFILL_WARPS * WARP * 16 + tiles


@cache
def prefix_shared(head_dim: int, kv_dtype: KVDtypeName) -> int:
    """Shared memory of a block: query rows, stages of a tile of K and one of V."""
    return prefix_rows(head_dim) * _row_bytes(head_dim) + _stages(head_dim) * _stage_bytes(head_dim, kv_dtype)


@cache
def tail_shared(head_dim: int, kv_dtype: KVDtypeName) -> int:
    """Shared memory of a block: query rows, a tile of K and one of V for each warp."""
    return tail_warps(head_dim) * (MMA_ROWS * _row_bytes(head_dim) + _stage_bytes(head_dim, kv_dtype))


@cache
def decode_shared(head_dim: int, kv_dtype: KVDtypeName) -> int:
    """Shared memory of a block: weights of each tile, sums and greatest scores, then tiles of K, or of V."""
    tiles = DECODE_WARPS if kv_dtype == "fp8" or head_dim <= 128 else 2
    return _exchange_bytes(kv_dtype) + tiles * _decode_tile_bytes(head_dim, kv_dtype)


@cache
def ahead_shared(head_dim: int, kv_dtype: KVDtypeName) -> int:
    """Likewise of attend_ahead: all tiles of K and of V."""
    return _exchange_bytes(kv_dtype) + 2 * DECODE_WARPS * _decode_tile_bytes(head_dim, kv_dtype)


def _exchange_bytes(kv_dtype: KVDtypeName) -> int:
    return DECODE_WARPS * (MMA_ROWS * TILE_KEYS * 2 + WARP * 8 + MMA_ROWS * 4 + 2 * _scales_bytes(kv_dtype))


def _decode_tile_bytes(head_dim: int, kv_dtype: KVDtypeName) -> int:
    return TILE_KEYS * (_code_row_bytes if kv_dtype == "fp8" else _row_bytes)(head_dim)


def _stages(head_dim: int) -> int:
    return 2 if head_dim <= 64 else 1


def _stage_bytes(head_dim: int, kv_dtype: KVDtypeName) -> int:
    """A tile of K and one of V."""
    return 2 * (TILE_KEYS * _row_bytes(head_dim) + _scales_bytes(kv_dtype))


def _row_bytes(head_dim: int) -> int:
    return 2 * head_dim + (16 if head_dim % 64 else 0)


def _code_row_bytes(head_dim: int) -> int:
    pieces = head_dim // 16
    return 16 * (pieces if pieces & (pieces - 1) == 0 else pieces | 1)


def _scales_bytes(kv_dtype: KVDtypeName) -> int:
    return TILE_KEYS * 2 if kv_dtype == "fp8" else 0


@cache
def partial_places(max_slots: int, max_seq_len: int) -> int:
    """Partials that the workspace holds: all there can be, or MAX_PLACES; at least those of one sequence."""
    of_sequence = math.ceil(max_seq_len / PARTIAL_KEYS)
    return max(min(max_slots * of_sequence, MAX_PLACES), of_sequence)


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
    of_rows = (rows.query_start_loc, rows.lengths)
    for decode in work.decodes:
        if decode.prefix is not None:
            device.launch(
                "attend_prefix",
                (len(decode.prefix), num_kv_heads),
                PREFIX_WARPS * WARP,
                (buffers.partials, q, pool, decode.prefix, decode.members, *tail),
                shared=prefix_shared(head_dim, cache.kv_dtype),
            )
        prefixes, tails = decode.prefix is not None, decode.tails is not None
        grid = (len(decode.items), num_kv_heads)
        of_items = (out, buffers.partials, buffers.tickets, q, pool, decode.items, *of_rows)
        ahead = ahead_shared(head_dim, cache.kv_dtype)
        few = grid[0] * grid[1] <= AHEAD_BLOCKS and not (prefixes or tails)
        if few and ahead <= device.kernels.shared_limit:
            device.launch("attend_ahead", grid, DECODE_WARPS * WARP, (*of_items, *tail), shared=ahead)
            continue
        device.launch(
            "attend_decode",
            grid,
            DECODE_WARPS * WARP,
            (*of_items, prefixes, tails, *tail),
            shared=decode_shared(head_dim, cache.kv_dtype),
        )
        if decode.tails is not None:
            count, warps, behind = len(decode.tails), tail_warps(head_dim), prefixes or len(decode.items) > 0
            device.launch(
                "attend_tail",
                (-(-count // warps), num_kv_heads),
                warps * WARP,
                (out, buffers.partials, q, pool, decode.tails, count, behind, *of_rows, *tail),
                shared=tail_shared(head_dim, cache.kv_dtype),
            )
    return out[: rows.num_rows]
