"""FP8 for products with weights: each row of a matrix as e4m3 codes with one float32 scale, by its own values alone.

x [K] is a row: of activations those of one token, of a weight [N, K] those of one output channel:

    scale = max |x| / 448                  1 where max |x| is less than 2^-100
    codes = e4m3fn(x * (448 / max |x|))    to nearest, ties to even; 448 is the largest finite code, so none overflows
    value = code * scale

and a product of such rows is the sum of code * code over K, times both scales. Where x has a NaN or an infinity the
scale is NaN or infinite, and so is what comes of the row: it shows in the logits.

e4m3fn is the format of Micikevicius et al., "FP8 Formats for Deep Learning", 2022. cuda/codes.cuh has the same bits.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from tinyvllm_cli.types import F32, U8

E4M3_MAX = np.float32(448)  # 1.75 * 2^8
LEAST = np.float32(2.0**-100)  # a row below it is one of zeros: 448 / LEAST is far from the end of float32


def quantize_rows(x: F32) -> tuple[U8, F32]:
    """Codes u8[..., K] and scales f32[...] of rows f32[..., K]. Where a scale is not finite the codes say nothing."""
    greatest = np.abs(x).max(axis=-1)
    with np.errstate(all="ignore"):
        zero = greatest < LEAST  # False where it is NaN
        scales = np.where(zero, np.float32(1), greatest / E4M3_MAX)
        factors = np.where(zero, np.float32(1), E4M3_MAX / greatest)
        codes = (x * factors[..., None]).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return codes, scales


def dequantize_rows(codes: U8, scales: F32) -> F32:
    """The values f32[..., K] that codes u8[..., K] stand for under scales f32[...]."""
    with np.errstate(invalid="ignore"):  # 0 under an infinite scale
        values: F32 = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * scales[..., None]
    return values


def rounded_rows(x: F32) -> F32:
    """Rows f32[..., K] as a product in FP8 sees them."""
    return dequantize_rows(*quantize_rows(x))
