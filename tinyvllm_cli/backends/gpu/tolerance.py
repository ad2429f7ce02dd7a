"""How far an op on the GPU may be from NumPy's on equal inputs: what its roundings can add up to, element by element.

The GPU rounds to 16 bits what products read and write; sums are float32 on both sides, in another order. A rounding is
off by `unit` of the number at most, and roundings fall either way: a sum of terms each off by a share u of itself is
off by about u sqrt(sum of terms^2), here called the spread, and in sums of K products u sqrt(K) sum |term|, at most
u K times the spread (Higham & Mary, "A new approach to probabilistic rounding error analysis", 2019).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from tinyvllm_cli.backends import fp8_rows
from tinyvllm_cli.backends.cpu import ops
from tinyvllm_cli.backends.cpu.gemm import Device
from tinyvllm_cli.backends.cpu.kv import KVCache
from tinyvllm_cli.backends.cpu.rows import Rows
from tinyvllm_cli.config import DtypeName
from tinyvllm_cli.model.parameters import Weight
from tinyvllm_cli.model.weights.layout import INTERLEAVE
from tinyvllm_cli.types import F32

CERTAIN = 4  # times the expected error: no element of millions is further off by chance
FLOAT32_UNIT = np.float32(2.0**-24)
# Tensor cores add 32 products of FP8 at once to a sum that keeps about 14 bits (DeepSeek-V3 Technical Report, 2024,
# section 3.3.2, which measured Hopper's); codes are made of numbers whose last bits differ, by a share of a little.
ACCUMULATOR_UNIT, ACCUMULATOR_STEP = 2.0**-12, 32
A_LITTLE = 2.0**-18


@dataclass(frozen=True, slots=True)
class Roundoff:
    """Greatest error of rounding a number to the nearest of a format."""

    unit: float  # share of the number: half the distance from 1 to the next
    smallest: float  # of numbers next to zero: half the least above it

    def of(self, values: F32) -> F32:
        error: F32 = np.abs(values) * np.float32(self.unit) + np.float32(self.smallest)
        return error


ROUNDOFF: dict[DtypeName, Roundoff] = {
    "bfloat16": Roundoff(2.0**-8, 2.0**-134),
    "float16": Roundoff(2.0**-11, 2.0**-25),
}


def product(device: Device, a: F32, weight: Weight, unit: float) -> F32:
    """Of a [T, K] @ weight [N, K].T in float32, where a is off by `unit` of itself, or rounded to FP8: [T, N]."""
    if weight.format == "fp8":
        return _fp8_product(device, a, weight.data)
    return _spread(device, a, weight.data) * np.float32(CERTAIN * (unit + a.shape[1] * FLOAT32_UNIT))


def _spread(device: Device, a: F32, weight: F32) -> F32:
    spread: F32 = np.sqrt(device.product(a * a, weight * weight))
    return spread


def accumulated(sums: Any, spread: Any, k: int) -> Any:
    """Of sums of k products of codes. Each addition rounds off a share of what the sum has come to: on its way it is
    off from a straight line to its end by about its spread. Roundings fall either way."""
    return (np.abs(sums) + spread) * np.float32(ACCUMULATOR_UNIT * math.sqrt(k / ACCUMULATOR_STEP))


def _fp8_product(device: Device, a: F32, weight: F32) -> F32:
    """Sums go through an accumulator of few bits. Both sides round a to codes, but where it lies on the border of two
    and differs in its last bits, they take one each."""
    scales = fp8_rows.quantize_rows(a)[1][:, None]
    low, high = (
        (a * np.float32(1 + sign * A_LITTLE) / scales).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scales
        for sign in (-1, 1)
    )
    k, spread = a.shape[1], _spread(device, high, weight)
    errors = _spread(device, high - low, weight) + spread * np.float32(A_LITTLE + k * FLOAT32_UNIT)
    errors += accumulated(device.product(high, weight), spread, k)
    return np.float32(CERTAIN) * errors


def product_add(device: Device, before: F32, after: F32, h: F32, weight: Weight) -> F32:
    """Of x += h @ weight.T (+ bias): h comes rounded, x stays float32."""
    last_bits = CERTAIN * FLOAT32_UNIT * np.maximum(np.abs(before), np.abs(after))
    return product(device, h, weight, 0) + last_bits


def qkv(
    device: Device,
    x: F32,
    *,
    roundoff: Roundoff,
    num_kv_heads: int,
    head_dim: int,
    norm: F32,
    eps: float,
    qkv: Weight,
    bias: F32 | None,
    q_norm: F32 | None,
    k_norm: F32 | None,
) -> tuple[F32, F32, F32]:
    """Of q [T, Hq, D], K and V [T, Hkv, D] before they are rounded: normed rows and their product are."""
    normed = ops.rms_norm(x, norm, eps)
    y = device.product(ops.operand(normed, qkv), qkv.data)
    error = (product(device, normed, qkv, roundoff.unit) + roundoff.of(y)).reshape(len(y), -1, head_dim)
    heads = (y if bias is None else y + bias).reshape(error.shape)
    q, k = slice(None, -2 * num_kv_heads), slice(-2 * num_kv_heads, -num_kv_heads)
    if q_norm is not None and k_norm is not None:
        error[:, q] = _normed(heads[:, q], error[:, q], q_norm, eps)
        error[:, k] = _normed(heads[:, k], error[:, k], k_norm, eps)
    return _rotated(error[:, q]), _rotated(error[:, k]), error[:, -num_kv_heads:]


def _normed(y: F32, error: F32, weight: F32, eps: float) -> F32:
    """Of y / r * weight, r = sqrt(mean(y^2) + eps): r is off by the root mean square of the errors at most."""
    r = np.sqrt(np.square(y).mean(axis=-1, keepdims=True) + np.float32(eps))
    r_error = np.sqrt(np.square(error).mean(axis=-1, keepdims=True))
    scaled: F32 = (error + np.abs(y) / r * r_error) * np.abs(weight) / r
    return scaled


def _rotated(error: F32) -> F32:
    """Of a cos - b sin and b cos + a sin, whatever the angle."""
    half = error.shape[-1] // 2
    pair = np.hypot(error[..., :half], error[..., half:])
    return np.concatenate([pair, pair], axis=-1)


def attention(
    device: Device, q: F32, h: F32, cache: KVCache, magnitudes: KVCache, rows: Rows, *, layer: int, roundoff: Roundoff
) -> F32:
    """Of h [T, Hq D]: weights of keys are rounded before they meet V, and so is h; scores are float32.

    magnitudes: the same K, and |V|, so that attention over it is the sum of weight |v|.
    """
    k, v = cache.tokens[layer]
    head_dim = q.shape[-1]
    longest_key = np.linalg.norm(k, axis=-1).max()
    scores = CERTAIN * head_dim * FLOAT32_UNIT * np.linalg.norm(q, axis=-1) * longest_key / math.sqrt(head_dim)
    sums = ops.attention(device, q, magnitudes, rows, layer=layer).reshape(q.shape)
    # An error of a score is that share of its weight, and of the sum that weights are divided by. Weights next to zero
    # are off by a number of their own, once a key.
    error: F32 = sums * (2 * roundoff.unit + 2 * scores[..., None])
    error += (rows.positions + 1)[:, None, None] * np.float32(roundoff.smallest) * np.abs(v).max()
    return error.reshape(h.shape) + roundoff.of(h)


def gate_up_silu(
    device: Device, x: F32, h: F32, *, roundoff: Roundoff, norm: F32, eps: float, weight: Weight, bias: F32 | None
) -> F32:
    """Of h [T, I] = SiLU(gate) * up: normed rows, gate, up and h are rounded."""
    normed = ops.rms_norm(x, norm, eps)
    y = device.product(ops.operand(normed, weight), weight.data)
    error = product(device, normed, weight, roundoff.unit) + roundoff.of(y)
    shape = (len(y), -1, 2, INTERLEAVE)
    (gate, up), (gate_error, up_error) = (
        (pairs[:, :, 0], pairs[:, :, 1])
        for pairs in ((y if bias is None else y + bias).reshape(shape), error.reshape(shape))
    )
    silu = np.abs(gate / (1 + np.exp(-gate)))
    steepest = np.float32(1.1)  # of SiLU, at 2.4
    h_error: F32 = silu * up_error + steepest * gate_error * (np.abs(up) + up_error)
    return h_error.reshape(h.shape) + (_codes_roundoff(h) if weight.format == "fp8" else roundoff.of(h))


def _codes_roundoff(rows: F32) -> F32:
    """Of rows as codes: 3 bits of mantissa, and 2^-9 of the scale is the least number."""
    scales = fp8_rows.quantize_rows(rows)[1][..., None]
    return Roundoff(2.0**-4, 0).of(rows) + scales * np.float32(2.0**-10)


def norm_lm_head(device: Device, x: F32, rows: Rows, *, roundoff: Roundoff, norm: F32, eps: float, head: Weight) -> F32:
    """Of logits [R, V]: the normed rows are rounded."""
    return product(device, ops.rms_norm(x[rows.logits_indices], norm, eps), head, roundoff.unit)


def logprobs(wanted: F32, vocab_size: int) -> F32:
    """Of log-softmax in float32: the logarithm of a sum of so many terms, and the difference of numbers of its size."""
    roundings = np.float32(math.sqrt(vocab_size)) + 4 * (1 + np.abs(wanted))
    return roundings * np.float32(CERTAIN * FLOAT32_UNIT)
