"""Products on a card: against float64, with the same bits for a row in any batch, and captured into a graph."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from gpu_tools import DTYPES, NUMPY_DTYPE, Array, OpDevice, assert_close, assert_same_bits, read, rounded, to_gpu

from tinyvllm_cli.backends.gpu.cublas import Blas, padded_rows
from tinyvllm_cli.config import DtypeName

pytestmark = pytest.mark.gpu

WORKSPACE = 32 << 20  # bytes, as a backend gives
# (N, K) of the weights of a layer, then of the head.
LLAMA_1B = ((3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192), (128256, 2048))
SMOLLM2_135M = ((960, 576), (576, 576), (3072, 576), (576, 1536), (49152, 576))
HEAD_ROWS = 40_000  # a weight with more rows is a head: float32 logits, of fewer rows
ROOM = 192  # rows behind the last: for those that start further down
MODES = ("elem", "float32", "add")  # of the output; add: into float32


@pytest.fixture(scope="module")
def stream() -> Any:
    import cupy

    return cupy.cuda.Stream(non_blocking=True)


@pytest.fixture(scope="module")
def blas(stream: Any) -> Iterator[Blas]:
    made = Blas.create(stream, to_gpu(np.zeros(WORKSPACE, np.uint8)))
    yield made
    made.close()


def device_of(blas: Blas, dtype: DtypeName) -> OpDevice:
    """For arrays of that dtype; no kernels."""
    return OpDevice(dtype, 64, kernels=None, blas=blas, stream=None, place=to_gpu)


def random_elem(rng: np.random.Generator, shape: tuple[int, ...], dtype: DtypeName) -> Array:
    """float32 numbers that are of the dtype."""
    return rounded(rng.standard_normal(shape, np.float32), dtype)


# ---------------------------------------------------------------- right


@pytest.mark.parametrize("function", ["product", "gemm_ex"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "n", "k", "ld"),
    [
        (1, 8, 8, 8),
        (3, 24, 72, 64),
        (5, 960, 576, 960),
        (9, 1000, 136, 1024),
        (17, 576, 1544, 576),
        (65, 3071, 248, 3072),
        (300, 584, 1000, 640),
        (2, 32001, 64, 32064),
        (33, 49153, 576, 49216),
    ],
)
def test_product_is_right(blas: Blas, rows: int, n: int, k: int, ld: int, dtype: DtypeName, mode: str, function: str):
    """With NaN in all that must not count: the output before, its other columns, the padding rows of a."""
    rng, device = np.random.default_rng(rows * n * k), device_of(blas, dtype)
    padded = padded_rows(rows, add=mode == "add")
    capacity, out_dtype = padded + 1, dtype if mode == "elem" else "float32"
    a, weight = random_elem(rng, (rows, k), dtype), random_elem(rng, (n, k), dtype)
    before = np.full((rows, ld), np.nan, np.float32)
    before[:, :n] = rng.standard_normal((rows, n)) if mode == "add" else 0
    out = device.poisoned((capacity, ld), NUMPY_DTYPE[out_dtype], first=before if mode == "add" else None)
    padded_a = device.poisoned((capacity, k), first=a)
    getattr(blas, function)(out.array, padded_a.array, device.upload(weight, dtype), rows, add=mode == "add")
    found, before = out.read(), before[:, :n]
    a64, weight64 = a.astype(np.float64), weight.astype(np.float64)
    assert_close(
        f"{function} {mode}",
        found[:rows, :n],
        a64 @ weight64.T + before,
        dtype=out_dtype,
        terms=k,
        scale=np.abs(a64) @ np.abs(weight64).T + np.abs(before),
    )
    assert np.isnan(found[:, n:]).all(), "columns past N were written"
    assert np.isnan(found[padded:]).all(), "rows past the padded ones were written"


# ---------------------------------------------------------------- the same bits in any batch


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), [*LLAMA_1B, *SMOLLM2_135M], ids=str)
def test_a_row_has_the_same_bits_in_any_batch(blas: Blas, n: int, k: int, dtype: DtypeName):
    """Rows start at another place of one matrix for each number of rows; the reference is all rows at once."""
    most, rng, device = 320 if n > HEAD_ROWS else 1024, np.random.default_rng(n + k), device_of(blas, dtype)
    a = device.upload(rng.standard_normal((most + ROOM, k), np.float32), dtype)
    weight = device.upload(np.resize(rng.standard_normal((min(n, 8000), k), np.float32), (n, k)), dtype)
    before = device.upload(np.resize(rng.standard_normal((ROOM, 8000), np.float32), (most + ROOM, n)))
    problems = []
    for mode in ("float32",) if n > HEAD_ROWS else MODES:
        reference = run_rows(device, a, weight, before, 0, most, mode)
        for rows in row_counts(most):
            for start in (0, 1, 29, 60) if rows < 3 else (rows * 7 % 61,):
                found = run_rows(device, a, weight, before, start, rows, mode)
                kept = min(rows, most - start)  # the reference has no more
                try:
                    assert_same_bits(f"{n}x{k} {dtype} {mode}", found[:kept], reference[start : start + kept])
                except AssertionError as error:
                    problems.append(f"{rows} rows from row {start}: {error}")
    assert not problems, f"{len(problems)} batches give rows other bits than {most} rows:\n" + "\n".join(problems[:20])


def row_counts(most: int) -> list[int]:
    """Every number of rows that 1 to 300 rows run on, some that are padded, and 1,024."""
    counts = {padded_rows(rows) for rows in range(1, 301)} | {3, 5, 17, 65, 300, 1024}
    return sorted(count for count in counts if count <= most)


def run_rows(device: OpDevice, a: Any, weight: Any, before: Any, start: int, rows: int, mode: str) -> Array:
    """The product of `rows` rows of a from `start` on; mode add: into the same rows of `before`."""
    whole = slice(start, start + padded_rows(rows, add=mode == "add"))
    if mode == "add":
        out = to_gpu(read(before[whole]))  # a copy: `before` is wanted again
    else:
        dtype = NUMPY_DTYPE[device.dtype if mode == "elem" else "float32"]
        out = device.poisoned((padded_rows(rows), weight.shape[0]), dtype).array
    device.blas.product(out, a[whole], weight, rows, add=mode == "add")
    return read(out)[:rows]


# ---------------------------------------------------------------- in a graph


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rows", [1, 5, 64, 257])
def test_a_captured_product_gives_the_same_bits(blas: Blas, stream: Any, rows: int, mode: str):
    rng, device = np.random.default_rng(rows), device_of(blas, "bfloat16")
    capacity = padded_rows(rows, add=mode == "add")
    a = device.upload(rng.standard_normal((capacity, 576)), "bfloat16")
    weight = device.upload(rng.standard_normal((960, 576)), "bfloat16")
    dtype: DtypeName = "bfloat16" if mode == "elem" else "float32"
    first = device.upload(rng.standard_normal((capacity, 960)), dtype)
    out = device.upload(np.zeros(first.shape), dtype)

    def reset() -> None:
        out.data.copy_from_device(first.data, first.nbytes)
        read(out)  # waits

    def multiply() -> None:
        blas.product(out, a, weight, rows, add=mode == "add")

    reset()
    multiply()
    eager = read(out)
    with stream:
        stream.begin_capture()
        multiply()
        graph = stream.end_capture()
    for _ in range(2):
        reset()
        graph.launch(stream)
        assert_same_bits(f"captured {mode} of {rows} rows", read(out), eager)


# ---------------------------------------------------------------- last: what the tests above ran on


def test_every_product_above_had_an_algorithm_without_split_k(blas: Blas):
    assert blas.fallbacks == []


def test_the_version_is_that_of_the_packages(blas: Blas):
    assert re.fullmatch(r"1[23]\.\d+\.\d+", blas.version)
