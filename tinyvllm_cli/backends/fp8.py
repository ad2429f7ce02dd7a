"""FP8 for K and V: a head of a token as e4m3 codes with one scale, by its own values alone.

x [head_dim] is K or V of one KV head of one token as it was computed, in float32:

    scale = 2^e, e the least integer with max |x| <= 448 * 2^e, and at least -22
    codes = e4m3fn(x / scale)     to nearest, ties to even; 448 is the largest finite code, so none overflows
    value = code * scale          what attention reads

Where max |x| is more than 448 * 2^7 = 57,344, or x has a NaN or an infinity, the scale is NaN and so is every value of
the head: it shows in the logits and clips nothing.

K is mixed before it is rounded, and q likewise: both are multiplied by a Hadamard matrix, which changes no score, for
H K . H q = n K . q. The errors of a few great channels, which many models have in K, then add up by chance and not in
step (QuaRot, Ashkboos et al. 2024).

The scale is a power of two, as in the OCP Microscaling formats (MX specification 1.0, 2023): values have the four
significant bits of their code, so that bfloat16 and float32 hold them exactly, and scores may be multiplied with it
later. float16 has all codes and bfloat16 all scales: attention on a GPU computes in float16, and multiplies scores and
weights with the scales in float32. e4m3fn is the format of Micikevicius et al. 2022: sign, 4 bits of exponent with
bias 7, 3 of mantissa.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from tinyvllm_cli.types import F32, U8

E4M3_MAX = 448.0  # 1.75 * 2^8
MIN_EXPONENT, MAX_EXPONENT = -22, 7  # of a scale


def mixed_keys(heads: F32) -> F32:
    """K f32[..., head_dim] as it is rounded: H K times the power of two next below 1 / sqrt(n), or that itself."""
    return _hadamard(heads) * np.float32(2.0 ** -(_mixed_size(heads).bit_length() // 2))


def mixed_queries(heads: F32) -> F32:
    """q f32[..., head_dim] for mixed keys: H q times what makes scores those of q and K."""
    return _hadamard(heads) * np.float32(2.0 ** -((_mixed_size(heads).bit_length() - 1) // 2))


def _mixed_size(heads: F32) -> int:
    """n: numbers of a head that are mixed with each other, the greatest power of two that divides head_dim; 1, so none,
    where that is less than 4.
    """
    head_dim: int = heads.shape[-1]
    return head_dim & -head_dim if head_dim % 4 == 0 else 1


def _hadamard(heads: F32) -> F32:
    """Sums and differences of numbers, of these, and so on (fast Walsh-Hadamard transform), in the order in which
    cuda/rope_write.cu has them: of neighbours, of the halves of a head as RoPE has them, of pairs of neighbours that
    are 1, 2, 4 ... apart in a half. Of numbers 2 d and 2 d + 1 of both halves, n / 4 values of d in a row are mixed.
    """
    n = _mixed_size(heads)
    if n == 1:
        return heads
    x = heads.reshape(*heads.shape[:-1], 2, heads.shape[-1] // 4, 2)
    x = np.stack([x[..., 0] + x[..., 1], x[..., 0] - x[..., 1]], axis=-1)
    x = np.stack([x[..., 0, :, :] + x[..., 1, :, :], x[..., 0, :, :] - x[..., 1, :, :]], axis=-3)
    apart = 1
    while apart < n // 4:
        pairs = x.reshape(*x.shape[:-2], -1, 2, apart, 2)
        low, high = pairs[..., 0, :, :], pairs[..., 1, :, :]
        x = np.stack([low + high, low - high], axis=-3).reshape(x.shape)
        apart *= 2
    return x.reshape(heads.shape)


def quantize(heads: F32) -> tuple[U8, F32]:
    """Codes u8[..., head_dim] and scales f32[...] of heads f32[..., head_dim].

    Where the scale is NaN the codes say nothing.
    """
    amax = np.abs(heads).max(axis=-1)
    # amax = mantissa * 2^exponent, mantissa in [1/2, 1); 448 = 7/8 * 2^9. At the lower bound it gives MIN_EXPONENT.
    mantissa, exponent = np.frexp(np.maximum(amax, np.float32(E4M3_MAX * 2.0**MIN_EXPONENT)))
    powers = np.ldexp(np.float32(1), exponent - np.where(mantissa <= 7 / 8, 9, 8))
    holds = amax <= E4M3_MAX * 2.0**MAX_EXPONENT  # False where amax is NaN
    scales = np.where(holds, powers, np.float32(np.nan))
    return (heads / scales[..., None]).astype(ml_dtypes.float8_e4m3fn).view(np.uint8), scales


def dequantize(codes: U8, scales: F32) -> F32:
    """The values f32[..., head_dim] that codes u8[..., head_dim] stand for under scales f32[...]."""
    values: F32 = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * scales[..., None]
    return values


def rounded(heads: F32) -> F32:
    """Heads f32[..., head_dim] as a cache in FP8 gives them back."""
    return dequantize(*quantize(heads))
