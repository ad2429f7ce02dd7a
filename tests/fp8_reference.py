"""FP8 of K and V again, from the definition of the format: slow, in exact fractions, with no library that knows it."""

from __future__ import annotations

import math
from bisect import bisect_left
from fractions import Fraction

import numpy as np
import numpy.typing as npt


def e4m3_value(code: int) -> Fraction | None:
    """Of a code that is not negative; None: NaN, the only one. 4 bits of exponent with bias 7, 3 of mantissa."""
    exponent, mantissa = code >> 3, code & 7
    if code == 0x7F:
        return None
    if exponent == 0:
        return Fraction(mantissa, 8) / 2**6
    return (1 + Fraction(mantissa, 8)) * Fraction(2) ** (exponent - 7)


MAGNITUDES = [value for code in range(128) if (value := e4m3_value(code)) is not None]  # ascending; the place is a code


def nearest_code(magnitude: Fraction) -> int:
    """Of what is at most 448; of two that are as near the even one, whose last bit of mantissa is 0."""
    above = bisect_left(MAGNITUDES, magnitude)
    if MAGNITUDES[above] == magnitude:
        return above
    down, up = magnitude - MAGNITUDES[above - 1], MAGNITUDES[above] - magnitude
    if down == up:
        return above - above % 2
    return above - (down < up)


def scale_of(head: list[float]) -> Fraction | None:
    """None: NaN."""
    if not all(map(math.isfinite, head)):
        return None
    amax = max(abs(Fraction(x)) for x in head)
    return next((Fraction(2) ** e for e in range(-22, 8) if amax <= 448 * Fraction(2) ** e), None)


def quantized(head: npt.NDArray[np.float32]) -> tuple[list[int], float]:
    """(codes, scale) of one head [head_dim]; no codes where the scale is NaN."""
    numbers = head.tolist()
    scale = scale_of(numbers)
    if scale is None:
        return [], math.nan
    codes = [nearest_code(abs(Fraction(x)) / scale) | 0x80 * (math.copysign(1, x) < 0) for x in numbers]
    return codes, float(scale)


def rounded(heads: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Heads [..., head_dim] as the cache gives them back."""
    return np.apply_along_axis(_rounded_head, -1, heads).astype(np.float32)


def _rounded_head(head: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    codes, scale = quantized(head)
    if math.isnan(scale):
        return np.full(len(head), math.nan)
    signs = [-1.0 if code & 0x80 else 1.0 for code in codes]
    return np.array([sign * float(MAGNITUDES[code & 0x7F]) * scale for sign, code in zip(signs, codes, strict=True)])


def hadamard(head_dim: int) -> tuple[npt.NDArray[np.float64], int]:
    """(H [head_dim, head_dim] of 1, -1 and 0, n): numbers are mixed by Sylvester's matrix of n, the greatest power of 2
    in head_dim, of those whose indices differ in the lowest bit, the half of the head, or the log2(n / 4) bits of
    the place in the half above the lowest. An index's bits are a column's, too.
    """
    n = math.gcd(head_dim, 1 << 30)
    half = head_dim // 2

    def address(d: int) -> tuple[int, int]:  # what it is mixed among, its place there
        in_half = d % half
        pair, place = divmod(in_half // 2, n // 4)
        return pair, in_half % 2 | d // half << 1 | place << 2

    matrix = np.zeros((head_dim, head_dim))
    for row in range(head_dim):
        for column in range(head_dim):
            (group, i), (other, j) = address(row), address(column)
            if group == other:
                matrix[row, column] = (-1) ** (i & j).bit_count()
    return matrix, n
