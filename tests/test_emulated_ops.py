"""The laws of kernels and ops on the processor: the sources of cuda/ compiled as C++ (cuda_emulator.py)."""

from __future__ import annotations

import functools
import itertools
from types import SimpleNamespace

import kernel_laws
import numpy as np
import op_laws
import pytest
from cuda_emulator import EmulatedKernels
from emulated_gpu import product
from gpu_tools import DTYPES, OpDevice

from tinyvllm_cli.backends.gpu import ops
from tinyvllm_cli.backends.gpu.kernels import kernel_sources
from tinyvllm_cli.config import DtypeName

pytestmark = pytest.mark.emulated


@functools.cache
def open_device(dtype: DtypeName, head_dim: int = 64) -> OpDevice:
    kernels, blas = EmulatedKernels(dtype, head_dim), SimpleNamespace(product=product, is_own=lambda *arrays: False)
    return OpDevice(dtype, head_dim, kernels, blas, stream=None, place=np.array)


@pytest.fixture(params=DTYPES)
def device(request: pytest.FixtureRequest) -> OpDevice:
    return open_device(request.param)


@pytest.mark.parametrize(("num_rows", "hidden"), [(1, 64), (5, 576), (3, 4096)])
@pytest.mark.parametrize("picked", [False, True])
def test_rms_norm(num_rows: int, hidden: int, picked: bool, device: OpDevice):
    kernel_laws.rms_norm(device, num_rows, hidden, picked=picked)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("head_dim", "heads", "kv_heads"), [(16, 2, 1), (64, 9, 3), (80, 32, 8), (96, 4, 2), (128, 16, 1), (256, 4, 1)]
)
def test_rope_write(head_dim: int, heads: int, kv_heads: int, dtype: DtypeName):
    device = open_device(dtype, head_dim)
    kernel_laws.rope_write(device, 7, heads, kv_heads, bias=False, norms=False)
    kernel_laws.rope_write(device, 43, heads, kv_heads, bias=True, norms=True)


@pytest.mark.parametrize(("head_dim", "heads", "kv_heads"), [(48, 5, 2), (64, 9, 3), (128, 16, 1)])
def test_rope_write_of_many_rows(head_dim: int, heads: int, kv_heads: int):
    device = open_device("bfloat16", head_dim)
    kernel_laws.rope_write(device, ops.FEW_ROPE_ROWS + 1, heads, kv_heads, bias=True, norms=True)


@pytest.mark.parametrize("num_rows", [1, ops.FEW_ROPE_ROWS, 8192])
def test_rope_write_is_launched_with_threads_for_all_heads(num_rows: int):
    source = kernel_sources()["rope_write.cu"]
    assert f"OCTETS_PER_LANE == 1 ? {ops.ROPE_HEADS} : 1;" in source and "MOST_THREADS = 256;" in source
    for head_dim, heads in itertools.product(range(16, 257, 16), (3, 15, 48, 144)):
        octets = head_dim // 16
        lanes = 8 if octets > 4 else 4 if octets > 2 else octets
        (rows, parts), threads = ops.rope_shape(num_rows, heads, head_dim)
        at_once = ops.ROPE_HEADS if octets <= lanes else 1
        assert rows == num_rows and threads % 32 == 0 and threads <= 256
        assert parts * threads // lanes * at_once >= heads


@pytest.mark.parametrize(("num_rows", "inner"), [(1, 8), (3, 1544)])
@pytest.mark.parametrize("bias", [False, True])
def test_silu_mul(num_rows: int, inner: int, bias: bool, device: OpDevice):
    kernel_laws.silu_mul(device, num_rows, inner, bias=bias)


@pytest.mark.parametrize(("num_rows", "hidden"), [(1, 8), (5, 576)])
def test_add_bias(num_rows: int, hidden: int, device: OpDevice):
    kernel_laws.add_bias(device, num_rows, hidden)


@pytest.mark.parametrize(("num_rows", "hidden"), [(1, 64), (61, 1032)])
def test_embed(num_rows: int, hidden: int, device: OpDevice):
    op_laws.embed(device, ops, num_rows, hidden)


@pytest.mark.parametrize("count", [1, 256, 300])
def test_place_blocks(count: int, device: OpDevice):
    op_laws.place_blocks(device, ops, count)


@pytest.mark.parametrize("extras", [False, True], ids=["plain", "bias-and-head-norms"])
def test_qkv_rope_write(extras: bool, device: OpDevice):
    op_laws.qkv_rope_write(device, ops, 21, 6, 2, extras=extras)


@pytest.mark.parametrize("num_rows", [1, 11])
@pytest.mark.parametrize("bias", [False, True])
def test_gate_up_silu(num_rows: int, bias: bool, device: OpDevice):
    op_laws.gate_up_silu(device, ops, num_rows, bias=bias)


@pytest.mark.parametrize("bias", [False, True])
def test_projections_add_to_the_residual_in_place(bias: bool, device: OpDevice):
    op_laws.projection_add(device, ops.out_proj_add, "attended", 11, bias=bias)
    op_laws.projection_add(device, ops.down_proj_add, "activated", 11, bias=bias)


@pytest.mark.parametrize("num_sampled", [0, 1, 6])
def test_norm_lm_head(num_sampled: int, device: OpDevice):
    op_laws.norm_lm_head(device, ops, 9, num_sampled)
