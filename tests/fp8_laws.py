"""What rope_write leaves in an FP8 cache, on any device for ops: the codes and scales of backends/fp8.py.

test_gpu_fp8.py runs these laws on the card, test_emulated_fp8.py on the processor. The pool is poisoned first.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
from fp8_reference import hadamard
from fp8_tools import SCALES_BYTES, codes_of, columns_of, scales_of
from gpu_tools import Array, OpDevice, assert_close, rounded
from kernel_laws import (
    BLOCK,
    EPS,
    LAYER,
    NORM_TERMS,
    NUM_LAYERS,
    elements,
    on_device,
    random,
    rope_tables,
    step_rows,
    written_heads,
)

from tinyvllm_cli.backends import fp8
from tinyvllm_cli.backends.gpu.ops import rope_shape

U8 = npt.NDArray[np.uint8]


def run_rope_write(
    device: OpDevice, rows: SimpleNamespace, qkv: Array, kv_heads: int, rope: tuple[Array, Array], bias: Array | None
) -> tuple[Array, U8, Array]:
    """(q [T, Hq, D], codes u8[k|v, T, Hkv, D], scales f32[k|v, T, Hkv]) of the rows; the rest of the pool must be as it
    was.
    """
    heads = qkv.shape[1]
    shape = (rows.num_blocks, NUM_LAYERS, 2, kv_heads, BLOCK * device.head_dim + SCALES_BYTES)
    q = device.poisoned((len(qkv), heads - 2 * kv_heads, device.head_dim), np.float16)
    cache = device.poisoned(shape, np.uint8)
    given: Any = on_device(device, rows)
    places = (given.positions, given.slots, given.block_tables)
    sizes = map(np.int32, (len(qkv), heads - 2 * kv_heads, kv_heads, rows.width, LAYER, NUM_LAYERS))
    optional = (None if bias is None else device.upload(bias), None, None)
    args = (q, cache, device.upload(qkv, device.dtype), *optional, *map(device.upload, rope), *places)
    device.launch("rope_write", *rope_shape(len(qkv), heads, device.head_dim), (*args, *sizes, np.float32(EPS)))
    blocks, offsets = rows.block_tables[rows.slots, rows.positions // BLOCK], rows.positions % BLOCK
    found = []
    for held in map(np.copy, codes_of(cache.read())):
        found.append(held[blocks, LAYER, :, :, offsets].swapaxes(0, 1))
        held[blocks, LAYER, :, :, offsets] = 0xFF
        assert (held == 0xFF).all(), "bytes of the pool were written that are no row's"
    return q.read(), found[0], scales_of(found[1])


def codes_and_scales(device: OpDevice, num_rows: int, kv_heads: int) -> None:
    """Heads that nothing turns: of every magnitude and next to every border, with zeros, NaN and infinities."""
    rng = np.random.default_rng([num_rows, device.head_dim])
    rows, half = step_rows(rng, num_rows), device.head_dim // 2
    qkv = elements(device, rng, num_rows, 1 + 2 * kv_heads, device.head_dim)
    exponents = rng.integers(-30 if device.dtype == "bfloat16" else -12, 13, qkv.shape[:2])
    qkv = rounded(np.ldexp(qkv, exponents[..., None]), device.dtype)
    edges = np.array([0, 448, 449, 450, 57344, 57600, 65504, 2**-13, 448 * 2**-9], np.float32)
    qkv[: len(edges), 1:, 0] = rounded(edges, device.dtype)[:num_rows, None]
    qkv[0, 1:] = 0
    qkv[1, 1:, 1:] *= 2**-8
    qkv[-1, 1, -1], qkv[-2, 1, 0], qkv[-3, -1, half] = np.nan, np.inf, -np.inf
    still = (np.ones((200, half), np.float32), np.zeros((200, half), np.float32))
    _, codes, scales = run_rope_write(device, rows, qkv, kv_heads, still, None)
    with np.errstate(invalid="ignore", over="ignore"):
        k, v = np.split(qkv[:, 1:], 2, axis=1)
        wanted_codes, wanted_scales = fp8.quantize(np.stack([fp8.mixed_keys(k), v]))
    np.testing.assert_array_equal(scales, wanted_scales)
    there = ~np.isnan(wanted_scales)
    assert not there.all(), "NaN was tried"
    unsigned_zero = np.where(np.arange(256) == 0x80, 0, np.arange(256))  # -0 + 0 is 0, where nothing turns as well
    np.testing.assert_array_equal(unsigned_zero[codes[there]], unsigned_zero[wanted_codes[there]])


def written(device: OpDevice, num_rows: int, num_heads: int, kv_heads: int) -> None:
    """Turned heads with a bias, against float64: q up to rounding, K and V off by half a step of their codes."""
    rng = np.random.default_rng([num_rows, num_heads, device.head_dim])
    rows, heads = step_rows(rng, num_rows), num_heads + 2 * kv_heads
    qkv, bias = elements(device, rng, num_rows, heads, device.head_dim), random(rng, heads, device.head_dim)
    cos, sin = rope = rope_tables(rng, device.head_dim)
    found_q, codes, scales = run_rope_write(device, rows, qkv, kv_heads, rope, bias)
    q, k, v = written_heads(qkv, kv_heads, bias, None, None, cos[rows.positions], sin[rows.positions])
    matrix, n = hadamard(device.head_dim)
    shift = n.bit_length() - 1
    q, k = q @ matrix / 2 ** (shift // 2), k @ matrix / 2 ** (shift - shift // 2)
    magnitude = np.abs(q).max(axis=-1, keepdims=True)
    assert_close("rope_write q for FP8", columns_of(found_q), q, dtype="float16", terms=NORM_TERMS, scale=magnitude)
    found = fp8.dequantize(np.ascontiguousarray(codes), scales)
    for name, actual, wanted, scale in zip("kv", found, (k, v), scales.astype(np.float64), strict=True):
        greatest = np.abs(wanted).max(axis=-1, keepdims=True)
        step = np.maximum(np.abs(wanted) * 2**-4, scale[..., None] * 2**-10)
        op = f"rope_write {name} in FP8"
        assert_close(op, actual, wanted, dtype="float32", terms=NORM_TERMS, scale=greatest, slack=1.001 * step)
