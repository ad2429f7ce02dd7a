"""Laws of our own products, on any device for ops: test_gpu_skinny.py and test_gpu_medium.py on the card,
test_emulated_skinny.py on the processor."""

from __future__ import annotations

from typing import Any

import numpy as np
from gpu_tools import NUMPY_DTYPE, Array, OpDevice, assert_close, assert_same_bits, read, rounded

from tinyvllm_cli.backends.gpu import skinny

CHAIN = 24  # products that each read what the one before wrote
MODES = ("elem", "float32", "add")  # of the output; add: into float32
NOISE = 2.0**-9  # what is left of a sum that cancels, as a share of its terms


def operands(device: OpDevice, rows: int, n: int, k: int, *, cancels: bool) -> tuple[Array, Array]:
    """a [rows, k] and weight [n, k], elements as float32. cancels: the second half of a sum takes back nearly all of
    the first, so that the bits in which another order of adding differs are among those that are left."""
    rng = np.random.default_rng([rows, n, k])
    a, weight = rng.standard_normal((rows, k), np.float32), rng.standard_normal((n, k), np.float32)
    if cancels:
        half = k // 2
        weight[:, half : 2 * half] = weight[:, :half]
        a[:, half : 2 * half] = NOISE * a[:, half : 2 * half] - rounded(a[:, :half], device.dtype)
    return rounded(a, device.dtype), rounded(weight, device.dtype)


def before_of(mode: str, rows: int, n: int) -> Array:
    """What a result holds before: NaN, or what is added to."""
    if mode != "add":
        return np.full((rows, n), np.nan, np.float32)
    return np.random.default_rng(n).standard_normal((rows, n), np.float32)


def multiplied(
    device: OpDevice,
    a: Array,
    weight: Array,
    mode: str,
    *,
    ld: int,
    kernels: Any = skinny,
    scales: tuple[Array, Array] | None = None,
) -> Array:
    """The product by the kernels of a module, with NaN in all that must not count; nothing but its rows and columns may
    have changed. scales: where a and weight are codes."""
    (rows, k), n = a.shape, len(weight)
    first = np.full((rows, ld), np.nan, np.float32)
    first[:, :n] = before_of(mode, rows, n)
    out = device.poisoned((rows + 2, ld), NUMPY_DTYPE[device.dtype if mode == "elem" else "float32"], first=first)
    operand = None if scales is None else np.uint8
    given_a = device.poisoned((rows + 2, k), operand, first=a)
    given_weight = device.poisoned((n + 2, k), operand, first=weight)
    arrays = (out.array, given_a.array, given_weight.array[:n], rows)
    if scales is not None:
        arrays += (tuple(device.poisoned((len(scale) + 2,), np.float32, first=scale).array for scale in scales),)
    kernels.multiply(device.kernels, device.stream, *arrays, add=mode == "add")
    found = out.read()
    others = np.isnan(found)
    others[:rows, :n] = True
    assert others.all(), f"{mode}, {rows} rows of {n}x{k}: other rows or columns were written"
    return found[:rows, :n]


def is_right(
    device: OpDevice, rows: int, n: int, k: int, mode: str, *, ld: int, kernels: Any = skinny, name: str = "skinny"
) -> None:
    """Against float64."""
    a, weight = operands(device, rows, n, k, cancels=False)
    found, before = multiplied(device, a, weight, mode, ld=ld, kernels=kernels), np.nan_to_num(before_of(mode, rows, n))
    a64, weight64 = a.astype(np.float64), weight.astype(np.float64)
    assert_close(
        f"{name} {mode}",
        found,
        a64 @ weight64.T + before,
        dtype=device.dtype if mode == "elem" else "float32",
        terms=k,
        scale=np.abs(a64) @ np.abs(weight64).T + np.abs(before),
    )


def is_one_chain(device: OpDevice, rows: int, n: int, k: int, mode: str, *, ld: int, kernels: Any = skinny) -> None:
    """Bit for bit one float32 sum over K in order, from zero, each product added with one rounding: as the processor's
    mma is, where a card's is its own. What is added to comes last."""
    a, weight = operands(device, rows, n, k, cancels=True)
    sums = np.zeros((rows, n), np.float32)
    for column in range(k):
        product = a[:, column, None].astype(np.float64) * weight[:, column]
        sums = (sums + product).astype(np.float32)
    expected = sums + before_of(mode, rows, n) if mode == "add" else sums
    found = multiplied(device, a, weight, mode, ld=ld, kernels=kernels)
    assert_same_bits(
        f"{mode}, {rows} rows of {n}x{k}", found, rounded(expected, device.dtype) if mode == "elem" else expected
    )


def is_as_its_parts(device: OpDevice, rows: int, n: int, k: int, *, with_bias: bool) -> None:
    """The kernels that norm, multiply and apply SiLU have the bits of those that do one thing each."""
    rng, elem, eps = np.random.default_rng([rows, n, k]), NUMPY_DTYPE[device.dtype], 1e-5
    x, norm, bias = (rng.standard_normal(shape, np.float32) for shape in ((rows + 1, k), (k,), (n,)))
    placed = (
        device.poisoned((rows + 2, k), np.float32, first=x).array,
        device.poisoned((k,), np.float32, first=norm).array,
    )
    weight = device.poisoned((n + 2, k), first=rounded(rng.standard_normal((n, k), np.float32), device.dtype)).array[:n]
    added = device.poisoned((n,), np.float32, first=bias).array if with_bias else None
    normed, product, wanted, found, silu, of_silu = (
        device.poisoned((rows + 1, columns), elem) for columns in (k, n, n + 8, n + 8, n // 2, n // 2)
    )

    def launch(name: str, blocks: int, *args: Any) -> None:
        device.kernels.launch(name, (blocks,), 256, args, stream=device.stream)

    launch("rms_norm", rows, normed.array, *placed, None, rows, k, eps)
    for out in (product, wanted):
        skinny.multiply(device.kernels, device.stream, out.array, normed.array, weight, rows, add=False)
    launch("silu_mul", -(-rows * n // 2 // 2048), silu.array, product.array, added, rows, n // 2)
    skinny.normed_product(device.kernels, device.stream, found.array, *placed, weight, rows, eps)
    skinny.normed_silu(device.kernels, device.stream, of_silu.array, *placed, weight, added, rows, eps)
    assert_same_bits(f"product, {rows} rows of {n}x{k}", found.read(), wanted.read())
    assert_same_bits(f"silu, {rows} rows of {n}x{k}", of_silu.read(), silu.read())
    assert np.isfinite(found.read()[:rows, :n]).all() and np.isfinite(of_silu.read()[:rows]).all()


def is_as_its_parts_up_to_the_cache(device: OpDevice, rows: int, k: int, *, with_bias: bool) -> None:
    """The kernel that norms, multiplies, turns and writes q, K and V has the bits of those that do one thing each."""
    heads, kv_heads, layers, layer, width, eps = 5, 2, 3, 1, 4, 1e-5
    head_dim, columns = device.head_dim, (heads + 2 * kv_heads) * device.head_dim
    rng, elem = np.random.default_rng([rows, k, head_dim]), NUMPY_DTYPE[device.dtype]

    def given(array: Array, dtype: Any = np.float32) -> Any:
        return device.poisoned(array.shape, dtype, first=array).array

    x, norm, bias = (given(rng.standard_normal(shape, np.float32)) for shape in ((rows, k), (k,), (columns,)))
    weight = given(rounded(rng.standard_normal((columns, k), np.float32), device.dtype), elem)
    angles = rng.random((16 * width, head_dim // 2), np.float32)
    cos, sin = given(np.cos(angles)), given(np.sin(angles))
    positions = given(rng.permutation(16 * width)[:rows], np.int32)
    slots, tables = (
        given(rng.permutation(4)[:rows], np.int32),
        given(1 + rng.permutation(5 * width).reshape(5, width), np.int32),
    )
    places = (cos, sin, positions, slots, tables)
    added = bias if with_bias else None
    normed, product = device.poisoned((rows, k), elem).array, device.poisoned((rows, columns), elem).array
    sizes = (rows, heads, kv_heads, width, layer, layers)
    wanted, found = (
        (
            device.poisoned((rows + 1, heads, head_dim), elem),
            device.poisoned((5 * width + 1, layers, 2, kv_heads, 16, head_dim), elem),
        )
        for _ in range(2)
    )

    def launch(name: str, blocks: int, threads: int, *args: Any) -> None:
        device.kernels.launch(name, (blocks,), threads, args, stream=device.stream)

    launch("rms_norm", rows, 256, normed, x, norm, None, rows, k, eps)
    skinny.multiply(device.kernels, device.stream, product, normed, weight, rows, add=False)
    q, cache = (output.array for output in wanted)
    launch("rope_write", rows, 128, q, cache, product, added, None, None, *places, *sizes, eps)
    q, cache = (output.array for output in found)
    args = (q, cache, x, norm, weight, added, *places, *sizes, k, eps)
    skinny.normed_qkv(device.kernels, device.stream, weight, args, rows)
    for what, one, other in zip(("q", "K and V"), found, wanted, strict=True):
        assert_same_bits(f"{what}, {rows} rows, K {k}", one.read(), other.read())
    assert (
        np.isfinite(found[0].read()[:rows]).all()
        and np.isfinite(found[1].read()).sum() == rows * 2 * kv_heads * head_dim
    )


def waits_for_what_it_reads(device: OpDevice, rows: int, *, captured: bool, kernels: Any = skinny) -> None:
    """Each product of a chain reads what the one before wrote, and starts while that one runs, where the card can do
    so. The weights permute and halve, so the end is exact and known."""
    size = 2048
    rng = np.random.default_rng(rows)
    orders = [rng.permutation(size) for _ in range(CHAIN)]
    x = rng.integers(-8, 9, (rows, size)).astype(np.float32)
    weights = []
    for order in orders:
        host = np.zeros((size, size), NUMPY_DTYPE[device.dtype])
        host[np.arange(size), order] = 0.5
        weights.append(device.upload(host))
    wanted = x
    for order in orders:
        wanted = wanted[:, order] * np.float32(0.5)
    buffers = [device.upload(x, device.dtype), device.upload(np.zeros_like(x), device.dtype)]
    first = device.upload(x, device.dtype)

    def enqueue() -> None:
        for i, weight in enumerate(weights):
            arrays = (buffers[(i + 1) % 2], buffers[i % 2], weight)
            kernels.multiply(device.kernels, device.stream, *arrays, rows, add=False)

    enqueue()  # the kernel is loaded
    read(buffers[0])
    graph = None
    if captured:
        device.stream.begin_capture()
        enqueue()
        graph = device.stream.end_capture()
    for turn in range(20):
        buffers[0].data.copy_from_device(first.data, first.nbytes)
        read(buffers[0])
        enqueue() if graph is None else graph.launch(device.stream)
        assert_same_bits(f"turn {turn}", read(buffers[CHAIN % 2]), rounded(wanted, device.dtype))
