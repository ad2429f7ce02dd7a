"""Our own products of few rows on the processor: the sources of cuda/ compiled as C++ (cuda_emulator.py)."""

from __future__ import annotations

import functools
import re

import numpy as np
import pytest
import skinny_laws
from cuda_emulator import EmulatedKernels
from gpu_tools import DTYPES, OpDevice

from tinyvllm_cli.backends.gpu import skinny
from tinyvllm_cli.backends.gpu.kernels import kernel_sources
from tinyvllm_cli.backends.gpu.ops import NORM_THREADS
from tinyvllm_cli.config import DtypeName

pytestmark = pytest.mark.emulated


@functools.cache
def open_device(dtype: DtypeName) -> OpDevice:
    return OpDevice(dtype, 64, EmulatedKernels(dtype, 64), blas=None, stream=None, place=np.array)


@pytest.fixture(params=DTYPES)
def device(request: pytest.FixtureRequest) -> OpDevice:
    return open_device(request.param)


@pytest.mark.parametrize("mode", skinny_laws.MODES)
@pytest.mark.parametrize("rows", range(1, 17))
def test_any_number_of_rows(rows: int, mode: str, device: OpDevice):
    skinny_laws.is_right(device, rows, 24, 576, mode, ld=32)
    skinny_laws.is_one_chain(device, rows, 24, 576, mode, ld=32)


@pytest.mark.parametrize("mode", skinny_laws.MODES)
@pytest.mark.parametrize("rows", [3, 11])
@pytest.mark.parametrize(
    ("n", "k", "ld"),
    [
        (1, 8, 1),  # less of everything than a block takes
        (16, 16, 16),
        (15, 24, 16),
        (17, 512, 24),  # K is one stage
        (31, 520, 31),  # and 8 columns
        (33, 1536, 40),  # as many stages as fit into shared memory
        (9, 1576, 9),
        (40, 2080, 40),
        (7, 4072, 8),  # the ring goes round twice
    ],
)
def test_any_shape(n: int, k: int, ld: int, rows: int, mode: str, device: OpDevice):
    skinny_laws.is_one_chain(device, rows, n, k, mode, ld=ld)


@pytest.mark.parametrize("mode", skinny_laws.MODES)
@pytest.mark.parametrize("rows", [3, 5, 16])
def test_weights_of_many_rows(rows: int, mode: str, device: OpDevice):
    skinny_laws.is_one_chain(device, rows, skinny.HIGH_FROM + 17, 40, mode, ld=skinny.HIGH_FROM + 24)


def test_a_card_with_little_shared_memory(monkeypatch: pytest.MonkeyPatch):
    device = open_device("bfloat16")
    monkeypatch.setattr(device.kernels, "shared_limit", 163 << 10)
    before = device.kernels.counts["skinny_add_deep"]
    skinny_laws.is_one_chain(device, 2, 24, 3080, "add", ld=24)
    assert device.kernels.counts["skinny_add_deep"] == before


@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("rows", range(1, skinny.MAX_NORMED_ROWS + 1))
@pytest.mark.parametrize(("n", "k"), [(16, 8), (48, 40), (80, 576), (64, 2048), (112, 2056), (64, 4096)])
def test_norm_product_and_silu_in_one_have_the_bits_of_each(
    n: int, k: int, rows: int, with_bias: bool, device: OpDevice
):
    skinny_laws.is_as_its_parts(device, rows, n, k, with_bias=with_bias)


@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("head_dim", [64, 80, 256])
def test_all_before_attention_in_one_has_the_bits_of_each(head_dim: int, with_bias: bool):
    kernels = EmulatedKernels("bfloat16", head_dim)
    device = OpDevice("bfloat16", head_dim, kernels, blas=None, stream=None, place=np.array)
    for rows in range(1, skinny.MAX_NORMED_ROWS + 1):
        skinny_laws.is_as_its_parts_up_to_the_cache(device, rows, 72, with_bias=with_bias)


def test_the_constants_of_a_launch_are_those_of_the_kernel():
    sources = kernel_sources()
    for name in ("Deep", "Low", "High"):
        [numbers] = re.findall(rf"using {name} = Tiling<(\d+), (\d+), (\d+)>;", sources["skinny.cuh"])
        assert tuple(map(int, numbers)) == getattr(skinny, name.upper()), name
    assert "constexpr int PAIR = 32;" in sources["skinny.cuh"] and skinny.PAIR == 32
    assert "NORM_WARPS = 8;" in sources["normed.cuh"] and skinny.NORMED_THREADS == 8 * 32 == NORM_THREADS
