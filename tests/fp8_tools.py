"""Planes of an FP8 cache as the GPU has them (cuda/kv.cuh), by backends/fp8.py, and queries as attention takes them."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from tinyvllm_cli.backends import fp8

BLOCK = 16
SCALES_BYTES = 2 * BLOCK

U8 = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]


def planes_of(values: F32) -> U8:
    """Bytes u8[..., BLOCK * D + scales] of values [..., BLOCK, D]. NaN where a number is too great for the format."""
    with np.errstate(invalid="ignore", over="ignore"):
        codes, scales = fp8.quantize(values)
    raw = scales.astype(ml_dtypes.bfloat16).view(np.uint8)
    return np.concatenate([codes.reshape(*codes.shape[:-2], -1), raw], axis=-1)


def codes_of(planes: U8) -> tuple[U8, U8]:
    """(codes u8[..., BLOCK, D], bytes of the scales u8[..., BLOCK, 2])."""
    codes, raw = planes[..., :-SCALES_BYTES], planes[..., -SCALES_BYTES:]
    return codes.reshape(*codes.shape[:-1], BLOCK, -1), raw.reshape(*raw.shape[:-1], BLOCK, 2)


def scales_of(raw: U8) -> F32:
    """The scales f32[...] that bytes u8[..., 2] are."""
    return np.ascontiguousarray(raw).view(ml_dtypes.bfloat16)[..., 0].astype(np.float32)


def values_of(planes: U8) -> F32:
    """What attention sees: [..., BLOCK, D]."""
    codes, raw = codes_of(planes)
    with np.errstate(invalid="ignore"):
        return fp8.dequantize(np.ascontiguousarray(codes), scales_of(raw))


def queries_of(q: npt.NDArray[Any]) -> npt.NDArray[np.float16]:
    """q[..., D] as cuda/rope_write.cu leaves it for attention over FP8: of each 16 columns, the first two of each four
    stand before the last two.
    """
    fours = q.astype(np.float16).reshape(*q.shape[:-1], -1, 4, 2, 2)
    return np.ascontiguousarray(fours.swapaxes(-2, -3)).reshape(q.shape)


def columns_of(queries: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The other way round: q[..., D] by its columns."""
    pairs = queries.reshape(*queries.shape[:-1], -1, 2, 4, 2)
    return np.ascontiguousarray(pairs.swapaxes(-2, -3)).reshape(queries.shape)
