"""Our own products of few rows on the processor: the sources of cuda/ compiled as C++ (cuda_emulator.py)."""

from __future__ import annotations

import functools
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import skinny_laws
from cuda_emulator import EmulatedKernels
from gpu_tools import DTYPES, NUMPY_DTYPE, OpDevice

from tinyvllm_cli.backends.gpu import ops, skinny
from tinyvllm_cli.backends.gpu.kernels import kernel_sources
from tinyvllm_cli.backends.gpu.ops import NORM_THREADS
from tinyvllm_cli.config import DtypeName
from tinyvllm_cli.model.parameters import Weight

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


class Products:
    """Of Blas, what runs by our own kernels; few_in_one: whether ops may take those that norm."""

    def __init__(self, kernels: EmulatedKernels, few_in_one: bool) -> None:
        self.kernels, self.few_in_one = kernels, few_in_one

    def is_own(self, *arrays: Any) -> bool:
        return self.few_in_one

    def product(self, out: Any, a: Any, weight: Any, rows: int) -> None:
        skinny.multiply(self.kernels, None, out, a, weight, rows, add=False)


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_ops_give_the_same_bits_where_few_rows_go_through_one_kernel(rows: int):
    """And more than few go through it nowhere."""
    hidden, inner, heads, kv_heads, width = 128, 192, 4, 2, 4
    rng, elem, columns = np.random.default_rng(rows), NUMPY_DTYPE["bfloat16"], (heads + 2 * kv_heads) * 64
    qkv, gate_up = (Weight((rng.standard_normal((n, hidden)) / 10).astype(elem)) for n in (columns, 2 * inner))
    x, norm = rng.standard_normal((rows, hidden), np.float32), rng.standard_normal(hidden, np.float32)
    rope = (rng.random((64, 32), np.float32), rng.random((64, 32), np.float32))
    tables = 1 + np.arange(3 * width, dtype=np.int32).reshape(3, width) % 8
    numbers = np.arange(rows, dtype=np.int32)
    step = SimpleNamespace(num_rows=rows, width=width, positions=5 + numbers, slots=numbers % 2, block_tables=tables)

    def bits(few_in_one: bool) -> tuple[list[bytes], int]:
        kernels = EmulatedKernels("bfloat16", 64)
        shapes = {"q": (8, heads, 64), "qkv": (8, columns), "normed": (8, hidden), "gate_up": (8, 2 * inner)}
        buffers = {name: np.zeros(shape, elem) for name, shape in {**shapes, "activated": (8, inner)}.items()}
        device = OpDevice("bfloat16", 64, kernels, Products(kernels, few_in_one), None, np.array)
        device = device.with_buffers(**buffers)
        cache = SimpleNamespace(blocks=np.zeros((9, 2, 2, kv_heads, 16, 64), elem), kv_dtype="auto")
        given = {"norm": norm, "eps": 1e-5, "bias": None}
        q = ops.qkv_rope_write(device, x, cache, step, layer=1, qkv=qkv, q_norm=None, k_norm=None, rope=rope, **given)
        h = ops.gate_up_silu(device, x, weight=gate_up, **given)
        return [q.tobytes(), h.tobytes(), cache.blocks.tobytes()], kernels.counts["normed_qkv"]

    (apart, none), (together, some) = bits(False), bits(True)
    assert together == apart and none == 0 and some == (rows <= skinny.MAX_NORMED_ROWS)


def test_the_constants_of_a_launch_are_those_of_the_kernel():
    sources = kernel_sources()
    for name in ("Deep", "Low", "High"):
        [numbers] = re.findall(rf"using {name} = Tiling<(\d+), (\d+), (\d+)>;", sources["skinny.cuh"])
        assert tuple(map(int, numbers)) == getattr(skinny, name.upper()), name
    assert "constexpr int PAIR = 32;" in sources["skinny.cuh"] and skinny.PAIR == 32
    assert "NORM_WARPS = 8;" in sources["normed.cuh"] and skinny.NORMED_THREADS == 8 * 32 == NORM_THREADS
