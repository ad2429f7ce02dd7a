"""Our own products of 17 to 256 rows on a card: right, with the bits of cublasLt and of few rows, and in order where
they start ahead of time."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import skinny_laws
from gpu_tools import DTYPES, NUMPY_DTYPE, Array, OpDevice, assert_same_bits, open_device, read, rounded

from tinyvllm_cli.backends.gpu import medium, skinny

pytestmark = pytest.mark.gpu

LLAMA_1B = ((3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192))
LLAMA_8B = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
SMOLLM2_135M = ((960, 576), (576, 576), (3072, 576), (576, 1536))
ROWS = (17, 33, 64, 100, 144, 160, 176, 193, 224, 256)
MODES = ("elem", "add")


@pytest.fixture(params=DTYPES)
def device(request: pytest.FixtureRequest) -> OpDevice:
    device = open_device(request.param)
    if device.kernels.arch != medium.ARCH:
        pytest.skip("a card without wgmma")
    return device


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("n", "k", "ld"), [(8, 8, 8), (72, 200, 80), (1000, 2056, 1024), (3080, 248, 3088)])
def test_it_is_right(n: int, k: int, ld: int, mode: str, device: OpDevice):
    for rows in (*range(17, 80, 5), *range(80, 257, 16)):
        skinny_laws.is_right(device, rows, n, k, mode, ld=ld, kernels=medium, name="medium")


@pytest.mark.parametrize("cancels", [True, False], ids=["cancelling", "ordinary"])
@pytest.mark.parametrize(("n", "k"), [*LLAMA_1B, *LLAMA_8B, *SMOLLM2_135M], ids=str)
def test_the_bits_are_those_of_cublaslt_and_of_few_rows(n: int, k: int, cancels: bool, device: OpDevice):
    most = medium.MAX_ROWS
    a_host, some = skinny_laws.operands(device, most, min(n, 4000), k, cancels=cancels)
    a = device.upload(a_host, device.dtype)
    weight = device.upload(np.resize(some.astype(NUMPY_DTYPE[device.dtype]), (n, k)))
    before = np.resize(np.random.default_rng(n).standard_normal(8000, np.float32), (most, n))
    problems = []
    for mode in MODES:
        add = mode == "add"

        def run(product: Any, rows: int, add: bool = add) -> Array:
            out = device.upload(before, "float32" if add else device.dtype)
            product(out, a, weight, rows, add=add)
            found = read(out)
            assert_same_bits("rows behind", found[rows:], rounded(before[rows:], "float32" if add else device.dtype))
            return found[:rows]

        wanted = device.upload(before, "float32" if add else device.dtype)
        device.blas.product(wanted, a, weight, most, add=add)
        wanted = read(wanted)
        for rows, product in [(skinny.MAX_ROWS, of(device, skinny)), *((rows, of(device, medium)) for rows in ROWS)]:
            try:
                assert_same_bits(f"{n}x{k} {device.dtype} {mode}, {rows} rows", run(product, rows), wanted[:rows])
            except AssertionError as error:
                problems.append(str(error))
    assert not problems, f"{len(problems)} products have other bits:\n" + "\n".join(problems[:20])


def random_codes(rng: np.random.Generator, rows: int, k: int) -> tuple[Array, Array]:
    """e4m3 codes and a scale for each row."""
    numbers = 32 * rng.standard_normal((rows, k), np.float32)
    return numbers.astype(ml_dtypes.float8_e4m3fn).view(np.uint8), 2 * rng.random(rows, np.float32) / 32**2


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("n", "k", "ld"), [(16, 16, 16), (80, 208, 96), (1008, 2064, 1024), (8464, 272, 8464)])
def test_products_of_codes_are_right(n: int, k: int, ld: int, mode: str, device: OpDevice):
    """Against float64, as far as the tensor cores' sums go (docs/fp8.md); nothing else is written."""
    rng, add = np.random.default_rng([n, k]), mode == "add"
    (a, a_scales), (weight, weight_scales) = random_codes(rng, 256, k), random_codes(rng, n, k)
    given = tuple(device.upload(array) for array in (a, weight))
    scales = tuple(device.upload(array) for array in (a_scales, weight_scales))
    numbers = [codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64) for codes in (a, weight)]
    exact = (numbers[0] @ numbers[1].T) * a_scales[:, None].astype(np.float64) * weight_scales
    size = (np.abs(numbers[0]) @ np.abs(numbers[1]).T) * a_scales[:, None] * weight_scales
    before = rng.standard_normal((256, ld), np.float32)
    out_dtype = "float32" if add else device.dtype
    for rows in (*range(1, 80, 5), *range(80, 257, 16)):
        out = device.upload(before, out_dtype)
        medium.multiply(device.kernels, device.stream, out, *given, rows, scales, add=add)
        found, kept = read(out), rounded(before, out_dtype)
        assert_same_bits("what is behind", found[rows:], kept[rows:])
        assert_same_bits("what is beside", found[:rows, n:], kept[:rows, n:])
        wanted = exact[:rows] + (before[:rows, :n] if add else 0)
        error = np.abs(found[:rows, :n] - wanted) - np.abs(wanted) * (0 if add else 2.0**-8)
        assert (error <= 2.0**-12 * size[:rows] + 1e-6).all(), f"{rows} rows of {n}x{k}: off by {error.max()}"


@pytest.mark.parametrize(("n", "k"), [*LLAMA_1B, *LLAMA_8B], ids=str)
def test_the_bits_of_products_of_codes_are_those_of_cublaslt(n: int, k: int, device: OpDevice):
    rng, most = np.random.default_rng([n, k]), medium.MAX_ROWS
    (a, a_scales), (some, weight_scales) = random_codes(rng, most, k), random_codes(rng, min(n, 4000), k)
    a, weight = device.upload(a), device.upload(np.resize(some, (n, k)))
    scales = (device.upload(a_scales), device.upload(np.resize(weight_scales, n)))
    before = np.resize(rng.standard_normal(8000, np.float32), (most, n))
    for add in (False, True):
        dtype = "float32" if add else device.dtype
        wanted = device.upload(before, dtype)
        device.blas.product(wanted, a, weight, most, add=add, scales=scales)
        wanted = read(wanted)
        for rows in (1, 2, 8, 16, *ROWS):
            out = device.upload(before, dtype)
            medium.multiply(device.kernels, device.stream, out, a, weight, rows, scales, add=add)
            assert_same_bits(f"{n}x{k} {dtype}, {rows} rows", read(out)[:rows], wanted[:rows])


def of(device: OpDevice, kernels: Any) -> Any:
    def product(out: Any, a: Any, weight: Any, rows: int, *, add: bool) -> None:
        kernels.multiply(device.kernels, device.stream, out, a, weight, rows, add=add)

    return product


@pytest.mark.parametrize("captured", [False, True], ids=["launched", "in-a-graph"])
@pytest.mark.parametrize("rows", [17, 96, 256])
def test_a_product_waits_for_what_it_reads(rows: int, captured: bool, device: OpDevice):
    skinny_laws.waits_for_what_it_reads(device, rows, captured=captured, kernels=medium)
