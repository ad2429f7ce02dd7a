"""Cosine and sine tables of rotary position embeddings, in float32 step by step as the reference makes them."""

from __future__ import annotations

import math

import numpy as np

from tinyvllm_cli.config import RopeConfig
from tinyvllm_cli.types import F32


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> F32:
    """inv_freq f32[head_dim / 2]: theta^(-2 i / head_dim), then scaled (Su et al. 2021, section 3.2.2)."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    # The power in float64, then rounded: float32 powers are off by an ulp in one of six on some processors, and an ulp
    # of a high frequency is 0.008 radians at position 131,071.
    inv_freq: F32 = np.reciprocal(np.power(rope.theta, exponents, dtype=np.float64).astype(np.float32))
    if rope.freq_factors is not None:
        inv_freq /= np.array(rope.freq_factors, np.float32)
    if rope.type == "linear":
        inv_freq /= np.float32(rope.factor)
    elif rope.type == "llama3":
        inv_freq = _scale_llama3(inv_freq, rope)
    return inv_freq


def _scale_llama3(inv_freq: F32, rope: RopeConfig) -> F32:
    """Llama 3.1's scaling: long wavelengths are divided by factor, short ones kept, between them a linear blend."""
    factor, low, high, original = (
        np.float32(value)
        for value in (rope.factor, rope.low_freq_factor, rope.high_freq_factor, rope.original_max_position)
    )
    # A number over a tensor is the reciprocal times the number in the reference, which rounds twice.
    wavelength = np.reciprocal(inv_freq) * np.float32(2 * math.pi)
    smooth = (np.reciprocal(wavelength) * original - low) / (high - low)
    blend = (1 - smooth) * inv_freq / factor + smooth * inv_freq
    return np.where(
        wavelength > original / low, inv_freq / factor, np.where(wavelength < original / high, inv_freq, blend)
    )


def rope_tables(rope: RopeConfig, head_dim: int, num_positions: int) -> tuple[F32, F32]:
    """cos and sin f32[num_positions, head_dim / 2] of position * inv_freq.

    The angle is rounded to float32 before cos and sin, as the reference rounds it: exact angles would miss the values
    that models were trained with by 1e-4 at position 8192.
    """
    angles = np.arange(num_positions, dtype=np.float32)[:, None] * inverse_frequencies(rope, head_dim)
    return np.cos(angles), np.sin(angles)
