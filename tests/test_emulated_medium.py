"""Our own products for Hopper on the processor: the sources of cuda/ compiled as C++ (cuda_emulator.py)."""

from __future__ import annotations

import functools
import struct

import ml_dtypes
import numpy as np
import pytest
import skinny_laws
from cuda_emulator import EmulatedKernels
from emulated_gpu import EmulatedArray
from gpu_tools import DTYPES, Array, OpDevice, assert_same_bits, rounded

from tinyvllm_cli.backends.gpu import medium
from tinyvllm_cli.config import DtypeName

pytestmark = pytest.mark.emulated

MODES = ("elem", "add")
SHAPES = [(8, 8, 8), (72, 200, 80), (136, 1096, 136)]
ROWS = (17, 40, 64, 100, 137, 256)


@functools.cache
def open_device(dtype: DtypeName) -> OpDevice:
    return OpDevice(dtype, 64, EmulatedKernels(dtype, 64), blas=None, stream=None, place=place)


def place(values: Array) -> Array:
    return np.array(values).view(EmulatedArray)


def tensor_map(address: int, rows: int, columns: int, tile_rows: int, itemsize: int) -> bytes:
    """As tests/emulator/hopper.hpp reads it."""
    return struct.pack("<5Q", address, rows, columns, tile_rows, itemsize).ljust(128, b"\0")


@pytest.fixture(autouse=True)
def _maps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(medium, "tensor_map", tensor_map)


@pytest.fixture(params=DTYPES)
def device(request: pytest.FixtureRequest) -> OpDevice:
    return open_device(request.param)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("n", "k", "ld"), SHAPES)
def test_it_is_right(n: int, k: int, ld: int, mode: str, device: OpDevice):
    for rows in ROWS:
        skinny_laws.is_right(device, rows, n, k, mode, ld=ld, kernels=medium, name="medium")
        skinny_laws.is_one_chain(device, rows, n, k, mode, ld=ld, kernels=medium)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("n", "k", "ld"), [(16, 16, 16), (80, 208, 96), (136, 1104, 136)])
def test_products_of_codes_are_one_chain(n: int, k: int, ld: int, mode: str, device: OpDevice):
    """Bit for bit one float32 sum over K in order, then times the scale of the weight's row, then of the token's."""
    for rows in (1, 16, *ROWS):
        is_one_scaled_chain(device, rows, n, k, mode, ld=ld)


@pytest.mark.parametrize(("dtype", "rows"), [("bfloat16", 81), ("float16", 144)])
def test_blocks_of_two_groups(dtype: DtypeName, rows: int):
    """As for weights of many rows."""
    device, n = open_device(dtype), 4240
    assert medium._groups(n, rows) == 2
    skinny_laws.is_one_chain(device, rows, n, 72, "elem", ld=n, kernels=medium)
    is_one_scaled_chain(device, rows, n, 144, "elem", ld=n)


def is_one_scaled_chain(device: OpDevice, rows: int, n: int, k: int, mode: str, *, ld: int) -> None:
    rng = np.random.default_rng([rows, n, k])
    codes = (rng.standard_normal((rows + n, k), np.float32) * 32).astype(ml_dtypes.float8_e4m3fn)
    numbers, scales = codes.astype(np.float32), rng.random(rows + n, np.float32)
    sums = np.zeros((rows, n), np.float32)
    for column in range(k):
        sums += np.outer(numbers[:rows, column], numbers[rows:, column])  # of 3 bits each: exact
    found = skinny_laws.multiplied(
        device, codes[:rows].view(np.uint8), codes[rows:].view(np.uint8), mode, ld=ld, kernels=medium,
        scales=(scales[:rows], scales[rows:]),
    )  # fmt: skip
    scaled = sums * scales[rows:] * scales[:rows, None]
    expected = scaled + skinny_laws.before_of(mode, rows, n) if mode == "add" else rounded(scaled, device.dtype)
    assert_same_bits(f"{mode}, {rows} rows of {n}x{k}", found, expected)
