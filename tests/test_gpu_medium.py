"""Our own products of 17 to 256 rows on a card: right, with the bits of cublasLt and of few rows, and in order where
they start ahead of time."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import skinny_laws
from gpu_tools import DTYPES, NUMPY_DTYPE, Array, OpDevice, assert_same_bits, open_device, read, rounded

from tinyvllm_cli.backends.gpu import medium, ops, skinny
from tinyvllm_cli.backends.gpu.cublas import Blas, padded_rows
from tinyvllm_cli.config import DtypeName

pytestmark = pytest.mark.gpu

LLAMA_1B = ((3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192))
LLAMA_8B = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
SMOLLM2_135M = ((960, 576), (576, 576), (3072, 576), (576, 1536))
ROWS = (17, 33, 64, 100, 144, 193, 256)
MODES = ("elem", "add")


def needs_wgmma(device: OpDevice) -> OpDevice:
    if device.kernels.arch != medium.ARCH:
        pytest.skip("a card without wgmma")
    return device


@pytest.fixture(params=DTYPES)
def device(request: pytest.FixtureRequest) -> OpDevice:
    return needs_wgmma(open_device(request.param))


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


def of(device: OpDevice, kernels: Any) -> Any:
    def product(out: Any, a: Any, weight: Any, rows: int, *, add: bool) -> None:
        kernels.multiply(device.kernels, device.stream, out, a, weight, rows, add=add)

    return product


@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize(("n", "k"), [(16384, 2048), (28672, 512), (3072, 576), (80, 40)], ids=str)
def test_product_and_silu_in_one_have_the_bits_of_each(n: int, k: int, with_bias: bool, device: OpDevice):
    for rows in ROWS:
        rng, elem, inner = np.random.default_rng([rows, n, k]), NUMPY_DTYPE[device.dtype], n // 2
        a, host = (rng.standard_normal(shape, np.float32) for shape in ((rows + 2, k), (n, k)))
        bias = device.upload(rng.standard_normal(n, np.float32)) if with_bias else None
        placed, weight = device.upload(a, device.dtype), device.upload(host, device.dtype)
        product, wanted, found = (device.poisoned((rows + 1, columns), elem) for columns in (n, inner, inner))
        medium.multiply(device.kernels, device.stream, product.array, placed, weight, rows, add=False)
        blocks = -(-rows * inner // 2048)
        device.launch("silu_mul", (blocks,), 256, (wanted.array, product.array, bias, rows, inner))
        medium.activated(device.kernels, device.stream, found.array, placed, weight, bias, rows)
        assert_same_bits(f"silu, {rows} rows of {n}x{k}", found.read(), wanted.read())
        assert np.isfinite(found.read()[:rows]).all()


@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "heads", "kv_heads"), [(64, 32, 8), (64, 9, 3), (128, 32, 8), (32, 3, 2)])
def test_all_behind_the_norm_in_one_has_the_bits_of_each(
    head_dim: int, heads: int, kv_heads: int, dtype: DtypeName, with_bias: bool
):
    device, k = needs_wgmma(open_device(dtype, head_dim)), 576
    elem, layers, layer, width, slots = NUMPY_DTYPE[dtype], 3, 1, 8, 300
    columns = (heads + 2 * kv_heads) * head_dim
    rng = np.random.default_rng([head_dim, heads])
    weight = device.upload(rng.standard_normal((columns, k), np.float32), dtype)
    y = device.upload(rng.standard_normal((medium.MAX_ROWS, k), np.float32), dtype)
    bias = device.upload(rng.standard_normal(columns, np.float32)) if with_bias else None
    angles = rng.random((16 * width, head_dim // 2), np.float32)
    cos, sin = device.upload(np.cos(angles)), device.upload(np.sin(angles))
    tables = device.upload(1 + rng.permutation(slots * width).astype(np.int32).reshape(slots, width))
    for rows in ROWS:
        positions = device.upload(rng.integers(0, 16 * width, rows).astype(np.int32))
        of_row = device.upload(rng.permutation(slots)[:rows].astype(np.int32))
        product = device.poisoned((rows, columns), elem).array
        sizes = (rows, heads, kv_heads, width, layer, layers)
        places = (cos, sin, positions, of_row, tables)
        wanted, found = (
            (
                device.poisoned((rows + 1, heads, head_dim), elem),
                device.poisoned((slots * width + 1, layers, 2, kv_heads, 16, head_dim), elem),
            )
            for _ in range(2)
        )
        medium.multiply(device.kernels, device.stream, product, y, weight, rows, add=False)
        blocks = rows * (heads + 2 * kv_heads)
        device.launch("rope_write", (blocks,), 32, (*wanted, product, bias, None, None, *places, *sizes, 1e-5))
        args = (found[0].array, found[1].array, bias, *places, *sizes)
        medium.qkv(device.kernels, device.stream, y, weight, head_dim, args, rows)
        for what, one, other in zip(("q", "K and V"), found, wanted, strict=True):
            assert_same_bits(f"{what}, {rows} rows of {head_dim}", one.read(), other.read())
        assert np.isfinite(found[0].read()[:rows]).all()
        assert np.isfinite(found[1].read()).sum() == rows * 2 * kv_heads * head_dim


@pytest.mark.parametrize("captured", [False, True], ids=["launched", "in-a-graph"])
@pytest.mark.parametrize("rows", [17, 96, 256])
def test_a_product_waits_for_what_it_reads(rows: int, captured: bool, device: OpDevice):
    skinny_laws.waits_for_what_it_reads(device, rows, captured=captured, kernels=medium)


@pytest.mark.parametrize("rows", [17, 100, 256])
def test_ops_give_the_same_bits_where_what_follows_a_product_is_done_on_the_way(
    rows: int, device: OpDevice, monkeypatch: pytest.MonkeyPatch
):
    hidden, inner, heads, kv_heads, width, capacity = 576, 1536, 9, 3, 8, 272
    rng, elem, columns = np.random.default_rng(rows), device.dtype, (heads + 2 * kv_heads) * 64
    qkv, gate_up = (
        SimpleNamespace(data=device.upload(rng.standard_normal((n, hidden)) / 24, elem)) for n in (columns, 2 * inner)
    )
    x = device.upload(rng.standard_normal((rows, hidden), np.float32))
    norm = device.upload(rng.standard_normal(hidden, np.float32))
    rope = tuple(device.upload(rng.random((16 * width, 32), np.float32)) for _ in range(2))
    step = SimpleNamespace(
        num_rows=rows,
        width=width,
        positions=device.upload(rng.integers(0, 16 * width, rows).astype(np.int32)),
        slots=device.upload(rng.permutation(256)[:rows].astype(np.int32)),
        block_tables=device.upload(1 + rng.permutation(256 * width).astype(np.int32).reshape(256, width)),
    )
    shapes = {"q": (capacity, heads, 64), "qkv": (capacity, columns), "normed": (capacity, hidden)}
    shapes |= {"gate_up": (capacity, 2 * inner), "activated": (capacity, inner)}

    def bits(follows: bool) -> tuple[list[bytes], int]:
        monkeypatch.setattr(medium, "FOLLOWS", follows)
        blas = Blas.create(device.stream, device.upload(np.zeros(32 << 20, np.uint8)), device.kernels)
        placed = replace(device, blas=blas).with_buffers(
            **{name: device.upload(np.zeros(shape), elem) for name, shape in shapes.items()}
        )
        buffers = placed.buffers
        for weight, out in ((qkv, buffers.qkv), (gate_up, buffers.gate_up)):
            placed.blas.choose_own(True, out, buffers.normed, weight.data, padded_rows(rows))
        blocks = device.upload(np.zeros((256 * width + 1, 2, 2, kv_heads, 16, 64)), elem)
        cache, before = SimpleNamespace(blocks=blocks, kv_dtype="auto"), placed.kernels.counts["medium_qkv"]
        given = {"norm": norm, "eps": 1e-5, "bias": None}
        q = ops.qkv_rope_write(placed, x, cache, step, layer=1, qkv=qkv, q_norm=None, k_norm=None, rope=rope, **given)
        h = ops.gate_up_silu(placed, x, weight=gate_up, **given)
        found = [read(q), read(h), read(blocks)]
        assert all(np.isfinite(array).all() and array.any() for array in found)
        blas.close()
        return [array.tobytes() for array in found], placed.kernels.counts["medium_qkv"] - before

    (apart, none), (together, some) = bits(False), bits(True)
    assert together == apart and (none, some) == (0, 1)
