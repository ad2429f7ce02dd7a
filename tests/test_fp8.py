"""K and V in FP8: against the format's definition, at every border, and each head by itself."""

import math
from fractions import Fraction
from itertools import pairwise

import fp8_reference
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tinyvllm_cli.backends.fp8 import dequantize, mixed_keys, mixed_queries, quantize, rounded

pytestmark = pytest.mark.filterwarnings("error")

EXPONENTS = range(-22, 8)  # of a scale
LARGEST = np.float32(57_344)  # 448 * 2^7
F8 = ml_dtypes.float8_e4m3fn


def f32(values: object) -> np.ndarray:
    return np.array(values, np.float32)


def next_up(value: float) -> np.float32:
    return np.nextafter(np.float32(value), np.float32(np.inf))


def borders() -> list[np.float32]:
    """Every value of e4m3, half way between any two, and the numbers of float32 next to that."""
    values = [float(value) for value in fp8_reference.MAGNITUDES]
    ties = [np.float32((low + high) / 2) for low, high in pairwise(values)]
    return [*map(np.float32, values), *ties, *(np.nextafter(tie, np.float32(end)) for tie in ties for end in (0, 448))]


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Of float32, -0.0 apart from 0.0; any NaN is as good as another."""
    number = ~(np.isnan(a) & np.isnan(b))
    return a.shape == b.shape and np.array_equal(a.view(np.uint32)[number], b.view(np.uint32)[number])


def check(heads: np.ndarray) -> None:
    """Codes, scales and values [N, head_dim] are those of the definition, bit for bit."""
    codes, scales = quantize(heads)
    assert (codes.dtype, codes.shape) == (np.uint8, heads.shape)
    assert (scales.dtype, scales.shape) == (np.float32, heads.shape[:-1])
    for head, found, scale in zip(heads, codes.tolist(), scales.tolist(), strict=True):
        wanted_codes, wanted_scale = fp8_reference.quantized(head)
        assert scale == wanted_scale or (math.isnan(scale) and math.isnan(wanted_scale)), (head, scale, wanted_scale)
        assert math.isnan(scale) or found == wanted_codes, (head, found, wanted_codes)
    assert same_bits(dequantize(codes, scales), fp8_reference.rounded(heads))
    assert same_bits(rounded(heads), dequantize(codes, scales))


# ---------------------------------------------------------------- the reference


def test_the_definition_has_the_values_of_another_library():
    table = np.arange(256, dtype=np.uint8).view(F8).astype(np.float64)
    for code, value in enumerate(table.tolist()):
        wanted = fp8_reference.e4m3_value(code & 0x7F)
        assert math.isnan(value) if wanted is None else Fraction(value) == wanted * (-1 if code & 0x80 else 1), code
    assert all(low < high for low, high in pairwise(fp8_reference.MAGNITUDES))
    assert fp8_reference.MAGNITUDES[-1] == 448


def test_another_library_rounds_as_the_definition():
    """At every value, half way between any two, and beside that."""
    numbers = f32(borders())
    found = numbers.astype(F8).view(np.uint8).tolist()
    assert found == [fp8_reference.nearest_code(Fraction(n)) for n in numbers.tolist()]


# ---------------------------------------------------------------- borders


def test_zeros_keep_their_signs():
    heads = f32([[0.0, -0.0, 0.0], [5.0, -0.0, 0.0]])
    check(heads)
    assert same_bits(rounded(heads), heads)
    assert quantize(heads)[1].tolist() == [2**-22, 2**-6]


@pytest.mark.parametrize("e", EXPONENTS)
def test_a_scale_holds_what_448_of_it_reaches_and_no_more(e: int):
    top = f32(448 * 2.0**e)
    heads = f32([[top, 1e-3 * top, 0], [-next_up(top), top, -top / 3], [np.nextafter(top, f32(0)), -top, top / 5]])
    check(heads)
    scales = quantize(heads)[1].tolist()
    assert scales[0] == scales[2] == 2.0**e
    assert math.isnan(scales[1]) if e == EXPONENTS[-1] else scales[1] == 2.0 ** (e + 1)


@pytest.mark.parametrize("e", EXPONENTS)
def test_every_tie_goes_to_the_even_code(e: int):
    """Under each scale every half-way point, and its neighbours, in one head that has 448 of the scale."""
    head = f32(borders())
    heads = f32([head, -head]) * f32(2.0**e)
    check(heads)
    assert quantize(heads)[1].tolist() == [2.0**e] * 2


def test_what_is_under_the_smallest_scale_becomes_few_codes_or_none():
    step = 2.0 ** (-22 - 9)  # the smallest code of the smallest scale
    heads = f32([[2.0**-23, -(2.0**-30), step, step / 2, next_up(step / 2), -1.5 * step, 1e-40, -1e-45]])
    check(heads)
    assert rounded(heads)[0, 2:].tolist() == [step, 0, step, -2 * step, 0, 0]
    assert np.signbit(rounded(heads)[0, -1])


BROKEN = [np.nan, np.inf, -np.inf, next_up(LARGEST), -next_up(LARGEST), 1e5, -3e38]


@pytest.mark.parametrize("value", BROKEN, ids=str)
def test_what_no_scale_holds_makes_its_own_head_nan(value: float):
    heads = np.random.default_rng(0).standard_normal((3, 4, 16)).astype(np.float32)
    whole = rounded(heads)
    heads[1, 2, 5] = value
    assert np.argwhere(np.isnan(quantize(heads)[1])).tolist() == [[1, 2]]
    broken = rounded(heads)
    assert np.isnan(broken[1, 2]).all()
    broken[1, 2] = whole[1, 2]
    assert same_bits(broken, whole)
    check(heads.reshape(12, 16))


def test_the_largest_number_is_held():
    heads = f32([[LARGEST, -LARGEST, 1.0], [-LARGEST, 55_000, 0.1]])
    check(heads)
    assert rounded(heads)[0, :2].tolist() == [LARGEST, -LARGEST]


# ---------------------------------------------------------------- anything


NUMBERS = st.one_of(
    st.floats(width=32),
    st.floats(-60_000, 60_000, width=32),
    st.floats(-(2.0**-20), 2.0**-20, width=32),
    st.sampled_from(f32([0.0, -0.0, 448, LARGEST, *BROKEN]).tolist()),
)
HEADS = arrays(np.float32, st.tuples(st.integers(1, 4), st.integers(1, 12)), elements=NUMBERS)


@given(HEADS)
def test_any_head_is_rounded_as_the_definition_says(heads: np.ndarray):
    check(heads)


@pytest.mark.parametrize("exponent", [-35, -22, -10, -3, 0, 4, 12, 15])
def test_heads_of_a_model_are_rounded_as_the_definition_says(exponent: int):
    rng = np.random.default_rng(exponent + 100)
    check((rng.standard_normal((8, 64)) * 2.0 ** (exponent + rng.integers(-2, 3, (8, 1)))).astype(np.float32))


@given(HEADS)
def test_a_head_depends_on_itself_alone(heads: np.ndarray):
    codes, scales = quantize(heads)
    for order in (slice(None, None, -1), np.r_[1 : len(heads), 0]):
        moved, moved_scales = quantize(heads[order])
        number = ~np.isnan(moved_scales)
        assert same_bits(moved_scales, scales[order].copy())
        assert np.array_equal(moved[number], codes[order][number])
    alone = np.stack([rounded(head) for head in heads])
    assert same_bits(rounded(heads), alone)
    assert same_bits(rounded(heads[None, :, None]), alone[None, :, None])
    wide = np.repeat(heads, 2, axis=1)[:, ::2]  # not in one piece
    assert same_bits(rounded(wide), alone)


@given(HEADS)
def test_what_was_rounded_stays_and_is_exact_in_bfloat16(heads: np.ndarray):
    once = rounded(heads)
    assert same_bits(rounded(once), once)
    assert same_bits(once.astype(ml_dtypes.bfloat16).astype(np.float32), once)


@pytest.mark.parametrize("head_dim", [4, 12, 16, 64, 80, 96, 128, 160, 256])
def test_mixing_is_a_hadamard_transform_that_keeps_scores(head_dim: int):
    q, k = np.random.default_rng(head_dim).standard_normal((2, 5, head_dim)).astype(np.float32)
    matrix, n = fp8_reference.hadamard(head_dim)
    keys, queries = mixed_keys(k), mixed_queries(q)
    np.testing.assert_allclose(keys, k @ matrix * 2.0 ** -math.ceil(math.log2(n) / 2), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose((queries * keys).sum(-1), (q * k).sum(-1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("head_dim", [2, 6, 10])
def test_narrow_heads_are_not_mixed(head_dim: int):
    heads = np.random.default_rng(0).standard_normal((3, head_dim)).astype(np.float32)
    assert np.array_equal(mixed_keys(heads), heads)
    assert np.array_equal(mixed_queries(heads), heads)
