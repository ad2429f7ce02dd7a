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


def test_the_constants_of_a_launch_are_those_of_the_kernel():
    source = kernel_sources()["skinny.cu"]
    for name in ("COLUMNS", "STAGES", "MULTIPLIERS"):
        assert re.findall(rf"constexpr int {name} = (\d+);", source) == [str(getattr(skinny, name))], name
