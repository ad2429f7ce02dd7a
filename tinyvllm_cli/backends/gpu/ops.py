"""The ops of the decoder on the GPU: the names, signatures and meaning of backends/cpu/ops.py.

Each op enqueues its kernels (cuda/) and products on the device's stream and returns at once. What it hands back are
the first rows of one of the device's buffers, which the op of the same name overwrites in the next layer or step.
Products run on more rows than a step has (padded_rows in cublas.py) and get the whole buffers behind x and h for that;
what they leave past a step's rows is never read. Activations between ops are of the dtype of the weights (elem); x,
norms, biases and logits are float32. Weights in FP8 are multiplied with codes: norms and SiLU make them at once, what
attention gives gets a kernel of its own.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from tinyvllm_cli.backends.gpu import skinny
from tinyvllm_cli.backends.gpu.attention import attend
from tinyvllm_cli.backends.gpu.quantize import quantize_rows, row_threads
from tinyvllm_cli.backends.gpu.sample import sample
from tinyvllm_cli.model.parameters import Array, Weight

if TYPE_CHECKING:
    from tinyvllm_cli.backends.gpu.device import Device
    from tinyvllm_cli.backends.gpu.kv import KVCache
    from tinyvllm_cli.backends.gpu.rows import Rows

__all__ = [
    "attention",
    "down_proj_add",
    "embed",
    "gate_up_silu",
    "norm_lm_head",
    "out_proj_add",
    "qkv_rope_write",
    "sample",
]

EMBED_THREADS = 512  # at most: each then loads 8 numbers and no more, where they are enough
NORM_THREADS = 256  # the order of a norm's sum, and so its bits, depend on it
# Of rope_write: heads that a lane takes at once where rows are many, and what are few; the most threads of a block.
ROPE_HEADS, FEW_ROPE_ROWS, MAX_ROPE_THREADS = 3, 256, 128
GROUP = 8  # numbers of a thread in the kernels that go number by number
GROUP_THREADS = 256
WARP = 32


def place_blocks(device: Device, rows: Rows) -> None:
    """What the step has new goes into the block tables; comes before all ops, and outside of graphs."""
    if rows.changes is not None:
        count = len(rows.changes)
        args = (rows.block_tables, rows.changes, count)
        device.launch("place_blocks", (_ceil_div(count, GROUP_THREADS),), GROUP_THREADS, args)


def embed(device: Device, table: Weight, rows: Rows) -> Array:
    """x f32[T, H] = table[token]; the row's token, resolved, goes into the token table. NaN outside the vocabulary."""
    x, ids = device.buffers.x, rows.token_table
    (num_ids, hidden), max_seq_len = table.data.shape, ids.shape[1]
    sizes = (rows.num_rows, hidden, num_ids, max_seq_len)
    args = (x, table.data, rows.token_ids, rows.positions, rows.slots, ids, *sizes)
    threads = min(EMBED_THREADS, _ceil_div(hidden, GROUP * WARP) * WARP)
    device.launch("embed", (rows.num_rows,), threads, args)
    return x[: rows.num_rows]


def qkv_rope_write(
    device: Device,
    x: Array,
    cache: KVCache,
    rows: Rows,
    *,
    layer: int,
    norm: Array,
    eps: float,
    qkv: Weight,
    bias: Array | None,
    q_norm: Array | None,
    k_norm: Array | None,
    rope: tuple[Array, Array],
) -> Array:
    """q elem[T, Hq, D], rotated; K and V of the rows go into their blocks."""
    q, y, num_rows = device.buffers.q, device.buffers.qkv, rows.num_rows
    num_layers, num_kv_heads = cache.blocks.shape[1], cache.blocks.shape[3]
    num_heads = q.shape[1]
    sizes = (num_rows, num_heads, num_kv_heads, rows.width, layer, num_layers)
    places = (rows.positions, rows.slots, rows.block_tables)
    few = num_rows <= skinny.MAX_NORMED_ROWS
    if few and q_norm is None and cache.kv_dtype == "auto" and _norms_on_the_way(device, qkv, y, num_rows):
        all_in_one = (q, cache.blocks, x, norm, qkv.data, bias, *rope, *places, *sizes, x.shape[1], eps)
        skinny.normed_qkv(device.kernels, device.stream, qkv.data, all_in_one, num_rows)
        return q[:num_rows]
    _norm_product(device, x, norm, eps, qkv, y, num_rows)
    args = (q, cache.blocks, y, bias, q_norm, k_norm, *rope, *places, *sizes, eps)
    shape = rope_shape(num_rows, num_heads + 2 * num_kv_heads, q.shape[2])
    device.launch("rope_write", *shape, args)
    return q[:num_rows]


@lru_cache(maxsize=1)  # all layers of a step ask the same
def rope_shape(num_rows: int, heads: int, head_dim: int) -> tuple[tuple[int, int], int]:
    """The grid of rope_write and the threads of a block. Few rows take the least time with a head for each lane, many
    with several: what a lane loads once for all of them is much, and more bytes are on their way."""
    octets = head_dim // 16
    lanes = min(8, 1 << (octets - 1).bit_length())
    heads_each = 1 if num_rows <= FEW_ROPE_ROWS or octets > lanes else ROPE_HEADS
    threads = _ceil_div(heads, heads_each) * lanes
    parts = _ceil_div(threads, MAX_ROPE_THREADS)
    return (num_rows, parts), _ceil_div(threads, parts * WARP) * WARP


def attention(device: Device, q: Array, cache: KVCache, rows: Rows, *, layer: int) -> Array:
    """h elem[T, Hq D]: each row over positions 0..p of its own sequence."""
    return attend(device, q, cache, rows, layer=layer)


def out_proj_add(device: Device, x: Array, h: Array, *, weight: Weight, bias: Array | None) -> None:
    """x f32[T, H] += h elem[T, Hq D] @ weight.T (+ bias), in place. x and h as `embed` and `attention` return them."""
    h, num_rows = device.buffers.attended, len(x)
    if weight.scale is not None:
        rows, h = h, device.buffers.attended_codes
        quantize_rows(device, h, device.buffers.row_scales, rows, num_rows)
    _product_add(device, h, weight, bias, num_rows)


def gate_up_silu(device: Device, x: Array, *, norm: Array, eps: float, weight: Weight, bias: Array | None) -> Array:
    """h elem[T, I] = SiLU(gate) * up of the normed rows; weight [2 I, H], its rows in turn 8 of gate, 8 of up. In FP8
    its codes."""
    h, y, num_rows = device.buffers.activated, device.buffers.gate_up, len(x)
    if num_rows <= skinny.MAX_NORMED_ROWS and _norms_on_the_way(device, weight, y, num_rows):
        skinny.normed_silu(device.kernels, device.stream, h, x, norm, weight.data, bias, num_rows, eps)
        return h[:num_rows]
    _norm_product(device, x, norm, eps, weight, y, num_rows)
    inner = h.shape[1]
    if weight.scale is not None:
        args = (h, device.buffers.row_scales, y, bias, num_rows, inner)
        device.launch("silu_mul_codes", (num_rows,), row_threads(inner), args)
        return h[:num_rows]
    blocks = _ceil_div(num_rows * inner, GROUP * GROUP_THREADS)
    device.launch("silu_mul", (blocks,), GROUP_THREADS, (h, y, bias, num_rows, inner))
    return h[:num_rows]


def down_proj_add(device: Device, x: Array, h: Array, *, weight: Weight, bias: Array | None) -> None:  # noqa: ARG001
    """x f32[T, H] += h elem[T, I] @ weight.T (+ bias), in place. x and h as `embed` and `gate_up_silu` return them."""
    _product_add(device, device.buffers.activated, weight, bias, len(x))


def norm_lm_head(device: Device, x: Array, rows: Rows, *, norm: Array, eps: float, head: Weight) -> Array:
    """Raw logits f32[R, V] of the sampled rows; in memory a row is followed by a few numbers of padding."""
    picked, logits, num_sampled = device.buffers.picked, device.buffers.logits, rows.num_sampled
    if num_sampled:  # else a chunk of a prompt without its last row
        _rms_norm(device, picked, x, norm, eps, num_sampled, rows.logits_indices)
        device.blas.product(logits, picked, head.data, num_sampled)
    return logits[:num_sampled, : len(head.data)]


def _norm_product(device: Device, x: Array, norm: Array, eps: float, weight: Weight, out: Array, num_rows: int) -> None:
    """out[:num_rows] = normed x @ weight.T."""
    if num_rows <= skinny.MAX_NORMED_ROWS and _norms_on_the_way(device, weight, out, num_rows):
        skinny.normed_product(device.kernels, device.stream, out, x, norm, weight.data, num_rows, eps)
        return
    normed = device.buffers.normed
    if weight.scale is None:
        _rms_norm(device, normed, x, norm, eps, num_rows, None)
        device.blas.product(out, normed, weight.data, num_rows)
        return
    scales, hidden = device.buffers.row_scales, x.shape[1]
    args = (normed, scales, x, norm, num_rows, hidden, eps)
    device.launch("rms_norm_codes", (num_rows,), row_threads(hidden), args)
    device.blas.product(out, normed, weight.data, num_rows, scales=(scales, weight.scale))


def _norms_on_the_way(device: Device, weight: Weight, out: Array, num_rows: int) -> bool:
    """Whether one kernel norms and multiplies so few rows: where our own is taken for the product of the normed ones.
    To ask takes the host a while, which steps of more rows do not have."""
    normed, data = device.buffers.normed, weight.data
    may = weight.scale is None and data.shape[1] <= skinny.MAX_NORMED_COLUMNS
    return may and device.blas.is_own(out, normed, data, num_rows)


def _rms_norm(
    device: Device, y: Array, x: Array, weight: Array, eps: float, num_rows: int, picked: Array | None
) -> None:
    args = (y, x, weight, picked, num_rows, x.shape[1], eps)
    device.launch("rms_norm", (num_rows,), NORM_THREADS, args)


def _product_add(device: Device, h: Array, weight: Weight, bias: Array | None, num_rows: int) -> None:
    x = device.buffers.x
    scales = None if weight.scale is None else (device.buffers.row_scales, weight.scale)
    device.blas.product(x, h, weight.data, num_rows, add=True, scales=scales)
    if bias is not None:
        hidden = x.shape[1]
        blocks = _ceil_div(num_rows * hidden, GROUP * GROUP_THREADS)
        device.launch("add_bias", (blocks,), GROUP_THREADS, (x, bias, num_rows, hidden))


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
