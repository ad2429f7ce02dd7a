"""Our own products of few rows on a card: right, with cublasLt's bits, and in order where they start ahead of time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import skinny_laws
from gpu_tools import DTYPES, NUMPY_DTYPE, Array, OpDevice, assert_same_bits, open_device, read

from tinyvllm_cli.backends.gpu import skinny
from tinyvllm_cli.backends.gpu.cublas import padded_rows
from tinyvllm_cli.config import DtypeName

pytestmark = pytest.mark.gpu

# (N, K) of the weights of a layer, then of the head.
LLAMA_1B = ((3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192), (128256, 2048))
LLAMA_8B = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
SMOLLM2_135M = ((960, 576), (576, 576), (3072, 576), (576, 1536), (49152, 576))
HEAD_ROWS = 40_000  # a weight with more rows is a head, whose results are float32


@pytest.mark.parametrize("mode", skinny_laws.MODES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k", "ld"), [(1, 8, 1), (17, 72, 24), (1000, 2056, 1024), (3071, 248, 3072)])
def test_it_is_right(n: int, k: int, ld: int, dtype: DtypeName, mode: str):
    for rows in range(1, skinny.MAX_ROWS + 1):
        skinny_laws.is_right(open_device(dtype), rows, n, k, mode, ld=ld)


@pytest.mark.parametrize("cancels", [True, False], ids=["cancelling", "ordinary"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), [*LLAMA_1B, *LLAMA_8B, *SMOLLM2_135M], ids=str)
def test_the_bits_are_those_of_cublaslt(n: int, k: int, dtype: DtypeName, cancels: bool):
    """Of 1 to 16 rows beside those that the library's first algorithm without split K gives 16 rows, and each alone."""
    device, most = open_device(dtype), skinny.MAX_ROWS
    distinct = min(n, 4000)
    a_host, some = skinny_laws.operands(device, most, distinct, k, cancels=cancels)
    capacity = padded_rows(most, add=True)
    a = device.upload(np.resize(a_host, (capacity, k)), dtype)
    weight = device.upload(np.resize(some.astype(NUMPY_DTYPE[dtype]), (n, k)))
    before = np.resize(np.random.default_rng(n).standard_normal(8000, np.float32), (capacity, n))
    problems = []
    for mode in ("float32",) if n > HEAD_ROWS else skinny_laws.MODES:
        start = before if mode == "add" else np.zeros((most, n), np.float32)
        dtype_out: DtypeName = dtype if mode == "elem" else "float32"

        def run(product: Any, rows: int, start: Array = start, to: DtypeName = dtype_out, add: bool = mode == "add"):
            out = device.upload(start, to)
            product(out, a, weight, rows, add=add)
            return read(out)[:rows]

        wanted = run(device.blas.product, most)
        for rows in range(1, most + 1):
            for name, product in (("cublasLt", device.blas.product), ("skinny", ours(device))):
                try:
                    assert_same_bits(f"{n}x{k} {dtype} {mode}, {rows} rows, {name}", run(product, rows), wanted[:rows])
                except AssertionError as error:
                    problems.append(str(error))
    assert not problems, f"{len(problems)} products have other bits:\n" + "\n".join(problems[:20])
    assert device.blas.fallbacks == []


@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(16384, 2048), (6144, 4096), (3072, 576), (80, 40)], ids=str)
def test_norm_product_and_silu_in_one_have_the_bits_of_each(n: int, k: int, dtype: DtypeName, with_bias: bool):
    for rows in range(1, skinny.MAX_NORMED_ROWS + 1):
        skinny_laws.is_as_its_parts(open_device(dtype), rows, n, k, with_bias=with_bias)


@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [576, 4096])
def test_all_before_attention_in_one_has_the_bits_of_each(k: int, dtype: DtypeName, head_dim: int, with_bias: bool):
    for rows in range(1, skinny.MAX_NORMED_ROWS + 1):
        skinny_laws.is_as_its_parts_up_to_the_cache(open_device(dtype, head_dim), rows, k, with_bias=with_bias)


def ours(device: OpDevice) -> Any:
    def product(out: Any, a: Any, weight: Any, rows: int, *, add: bool) -> None:
        skinny.multiply(device.kernels, device.stream, out, a, weight, rows, add=add)

    return product


@pytest.mark.parametrize("captured", [False, True], ids=["launched", "in-a-graph"])
@pytest.mark.parametrize("rows", [1, 8, 16])
def test_a_product_waits_for_what_it_reads(rows: int, captured: bool):
    skinny_laws.waits_for_what_it_reads(open_device("bfloat16"), rows, captured=captured)
