"""The ops of the decoder in NumPy: the meaning of every GPU kernel, under the same names and signatures.

T rows, R of them sampled; H hidden size, D head_dim, Hq query heads over Hkv KV heads, I intermediate size,
V vocabulary. All arithmetic is float32. The device runs products with weights, rows (rows.py) say which row is what.
What meets a weight in FP8 is rounded to it first, each row by itself (backends/fp8_rows.py).
"""

from __future__ import annotations

import math

import numpy as np

from tinyvllm_cli.backends import fp8, fp8_rows
from tinyvllm_cli.backends.cpu.gemm import Device
from tinyvllm_cli.backends.cpu.kv import KVCache
from tinyvllm_cli.backends.cpu.rows import TILE_ROWS, Group, Rows
from tinyvllm_cli.backends.cpu.sample import sample
from tinyvllm_cli.model.parameters import Weight
from tinyvllm_cli.model.weights.layout import INTERLEAVE
from tinyvllm_cli.types import F32

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

CAUSAL = np.triu(np.full((TILE_ROWS, TILE_ROWS), -np.inf, np.float32), 1)  # key j of row i: hidden where j > i


def embed(device: Device, table: Weight, rows: Rows) -> F32:  # noqa: ARG001  (a GPU launches on it)
    """x [T, H] = table[token]. A token that no draw could give (-1, -2) is NaN, so that its sequence stays NaN."""
    x: F32 = table.data.take(rows.token_ids, axis=0, mode="clip")
    x[rows.token_ids < 0] = np.nan
    return x


def rms_norm(x: F32, weight: F32, eps: float) -> F32:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis (Zhang & Sennrich 2019)."""
    mean = np.vecdot(x, x)[..., None] / np.float32(x.shape[-1])
    normed: F32 = x / np.sqrt(mean + np.float32(eps))
    normed *= weight
    return normed


def qkv_rope_write(
    device: Device,
    x: F32,
    cache: KVCache,
    rows: Rows,
    *,
    layer: int,
    norm: F32,
    eps: float,
    qkv: Weight,
    bias: F32 | None,
    q_norm: F32 | None,
    k_norm: F32 | None,
    rope: tuple[F32, F32],
) -> F32:
    """q [T, Hq, D], rotated; K and V of the rows go into their blocks. In FP8 q and K are mixed (backends/fp8.py).

    x [T, H]; qkv [(Hq + 2 Hkv) D, H]; q_norm, k_norm [D]: RMSNorm of each head before the rotation (Qwen3).
    RoPE in half-split form (Su et al. 2021): (a, b) -> (a cos - b sin, b cos + a sin), a and b the halves of a head.
    """
    num_kv_heads, head_dim = cache.tokens.shape[2], cache.tokens.shape[4]
    y = device.product(operand(rms_norm(x, norm, eps), qkv), qkv.data)
    if bias is not None:
        y += bias
    heads = y.reshape(len(y), -1, head_dim)
    num_heads = heads.shape[1] - 2 * num_kv_heads
    if q_norm is not None and k_norm is not None:
        heads[:, :num_heads] = rms_norm(heads[:, :num_heads], q_norm, eps)
        heads[:, num_heads:-num_kv_heads] = rms_norm(heads[:, num_heads:-num_kv_heads], k_norm, eps)
    cos, sin = (table[rows.positions][:, None] for table in rope)
    pairs = heads[:, :-num_kv_heads].reshape(len(y), -1, 2, head_dim // 2)
    rotated = pairs * cos[:, :, None]
    rotated[:, :, 0] -= pairs[:, :, 1] * sin
    rotated[:, :, 1] += pairs[:, :, 0] * sin
    rotated = rotated.reshape(len(y), -1, head_dim)
    q, k, v = rotated[:, :num_heads], rotated[:, num_heads:], heads[:, -num_kv_heads:]
    if cache.kv_dtype == "fp8":
        q, k = fp8.mixed_queries(q), fp8.mixed_keys(k)
    cache.write(layer, 0, rows.kv_rows, k)
    cache.write(layer, 1, rows.kv_rows, v)
    return q


def attention(device: Device, q: F32, cache: KVCache, rows: Rows, *, layer: int) -> F32:
    """h [T, Hq D]: softmax(q K^T / sqrt(D)) V of each row over positions 0..p of its own sequence.

    Query head i reads KV head i // (Hq / Hkv) (grouped-query attention, Ainslie et al. 2023).
    """
    h = np.empty(q.shape, np.float32)
    scaled = q * np.float32(1 / math.sqrt(q.shape[-1]))
    device.run(lambda group: _attend(scaled, cache, layer, group, h), rows.groups)
    return h.reshape(len(q), -1)


def _attend(q: F32, cache: KVCache, layer: int, group: Group, h: F32) -> None:
    """Attention of n tiles of t rows each; t = 1 where n > 1. Matrices differ by tile, the softmax is one for all."""
    num_kv_heads, t = cache.tokens.shape[2], group.num_rows
    per_head = q.shape[1] // num_kv_heads
    scores = np.empty((len(group.tiles), num_kv_heads, per_head * t, group.length), np.float32)
    for tile, score in zip(group.tiles, scores, strict=True):
        k = cache.read(layer, 0, tile.blocks, tile.length)
        rows = q[tile.start : tile.start + t].reshape(t, num_kv_heads, per_head, -1).transpose(1, 2, 0, 3)
        np.matmul(rows.reshape(num_kv_heads, per_head * t, -1), k.transpose(0, 2, 1), out=score[:, :, : tile.length])
        score[:, :, tile.length :] = -np.inf
    if t > 1:
        scores.reshape(-1, t, group.length)[:, :, -t:] += CAUSAL[:t, :t]
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    inverse = 1 / scores.sum(axis=-1, keepdims=True)
    for tile, score, scale in zip(group.tiles, scores, inverse, strict=True):
        # Read no sooner: copies of scattered blocks, held for a whole group, would cost more than all the rest.
        mixed = score[:, :, : tile.length] @ cache.read(layer, 1, tile.blocks, tile.length)
        mixed *= scale
        target = h[tile.start : tile.start + t].reshape(t, num_kv_heads, per_head, -1)
        target[:] = mixed.reshape(num_kv_heads, per_head, t, -1).transpose(2, 0, 1, 3)


def out_proj_add(device: Device, x: F32, h: F32, *, weight: Weight, bias: F32 | None) -> None:
    """x [T, H] += h [T, Hq D] @ weight.T (+ bias), in place."""
    _product_add(device, x, h, weight=weight, bias=bias)


def gate_up_silu(device: Device, x: F32, *, norm: F32, eps: float, weight: Weight, bias: F32 | None) -> F32:
    """h [T, I] = SiLU(gate) * up of the normed rows; SiLU(z) = z / (1 + exp(-z)) (SwiGLU, Shazeer 2020).

    weight [2 I, H], its rows in turn 8 of gate, 8 of up.
    """
    normed, w = operand(rms_norm(x, norm, eps), weight), weight.data
    h = np.empty((len(x), len(w) // 2), np.float32)

    def part(columns: slice) -> None:
        y = device.multiply(normed, w[columns])
        if bias is not None:
            y += bias[columns]
        pairs = y.reshape(len(x), -1, 2, INTERLEAVE)
        gate, up = pairs[:, :, 0], pairs[:, :, 1]
        silu = np.negative(gate)
        np.exp(silu, out=silu)
        silu += 1
        np.divide(gate, silu, out=silu)
        target = h[:, columns.start // 2 : columns.stop // 2].reshape(len(x), -1, INTERLEAVE)
        np.multiply(silu, up, out=target)

    device.run(part, device.split(w, len(x)))
    return h


def down_proj_add(device: Device, x: F32, h: F32, *, weight: Weight, bias: F32 | None) -> None:
    """x [T, H] += h [T, I] @ weight.T (+ bias), in place."""
    _product_add(device, x, h, weight=weight, bias=bias)


def norm_lm_head(device: Device, x: F32, rows: Rows, *, norm: F32, eps: float, head: Weight) -> F32:
    """Raw logits [R, V] of the sampled rows."""
    return device.product(rms_norm(x[rows.logits_indices], norm, eps), head.data)


def operand(x: F32, weight: Weight) -> F32:
    """What a weight is multiplied with."""
    return fp8_rows.rounded_rows(x) if weight.format == "fp8" else x


def _product_add(device: Device, x: F32, h: F32, *, weight: Weight, bias: F32 | None) -> None:
    x += device.product(operand(h, weight), weight.data)
    if bias is not None:
        x += bias
