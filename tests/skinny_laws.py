"""Laws of our own products of few rows, on any device for ops: test_gpu_skinny.py on the card, test_emulated_skinny.py
on the processor."""

from __future__ import annotations

import numpy as np
from gpu_tools import NUMPY_DTYPE, Array, OpDevice, assert_close, assert_same_bits, rounded

from tinyvllm_cli.backends.gpu import skinny

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


def multiplied(device: OpDevice, a: Array, weight: Array, mode: str, *, ld: int) -> Array:
    """The product, with NaN in all that must not count; nothing but its rows and columns may have changed."""
    (rows, k), n = a.shape, len(weight)
    first = np.full((rows, ld), np.nan, np.float32)
    first[:, :n] = before_of(mode, rows, n)
    out = device.poisoned((rows + 2, ld), NUMPY_DTYPE[device.dtype if mode == "elem" else "float32"], first=first)
    given_a, given_weight = device.poisoned((rows + 2, k), first=a), device.poisoned((n + 2, k), first=weight)
    arrays = (out.array, given_a.array, given_weight.array[:n])
    skinny.multiply(device.kernels, device.stream, *arrays, rows, add=mode == "add")
    found = out.read()
    others = np.isnan(found)
    others[:rows, :n] = True
    assert others.all(), f"{mode}, {rows} rows of {n}x{k}: other rows or columns were written"
    return found[:rows, :n]


def is_right(device: OpDevice, rows: int, n: int, k: int, mode: str, *, ld: int) -> None:
    """Against float64."""
    a, weight = operands(device, rows, n, k, cancels=False)
    found, before = multiplied(device, a, weight, mode, ld=ld), np.nan_to_num(before_of(mode, rows, n))
    a64, weight64 = a.astype(np.float64), weight.astype(np.float64)
    assert_close(
        f"skinny {mode}",
        found,
        a64 @ weight64.T + before,
        dtype=device.dtype if mode == "elem" else "float32",
        terms=k,
        scale=np.abs(a64) @ np.abs(weight64).T + np.abs(before),
    )


def is_one_chain(device: OpDevice, rows: int, n: int, k: int, mode: str, *, ld: int) -> None:
    """Bit for bit one float32 sum over K in order, from zero, each product added with one rounding: as the processor's
    mma is, where a card's is its own. What is added to comes last."""
    a, weight = operands(device, rows, n, k, cancels=True)
    sums = np.zeros((rows, n), np.float32)
    for column in range(k):
        product = a[:, column, None].astype(np.float64) * weight[:, column]
        sums = (sums + product).astype(np.float32)
    expected = sums + before_of(mode, rows, n) if mode == "add" else sums
    found = multiplied(device, a, weight, mode, ld=ld)
    assert_same_bits(
        f"{mode}, {rows} rows of {n}x{k}", found, rounded(expected, device.dtype) if mode == "elem" else expected
    )
