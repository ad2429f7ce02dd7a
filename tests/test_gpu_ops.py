"""The laws of kernels and ops on the card: all but attention and sample, which have tests of their own."""

from __future__ import annotations

import kernel_laws
import op_laws
import pytest
from gpu_tools import DTYPES, OpDevice, open_device

from tinyvllm_cli.backends.gpu import ops
from tinyvllm_cli.config import DtypeName

pytestmark = pytest.mark.gpu

HEAD_DIMS = (64, 80, 96, 128, 256)
# query heads, KV heads, with bias, with head norms
HEADS = ((9, 3, False, False), (9, 3, True, False), (16, 1, False, True), (32, 8, True, True), (32, 8, False, False))


@pytest.fixture(params=DTYPES)
def device(request: pytest.FixtureRequest) -> OpDevice:
    return open_device(request.param)


@pytest.mark.parametrize(("num_rows", "hidden"), [(1, 64), (3, 576), (17, 4096), (300, 2048), (299, 72), (2, 8192)])
@pytest.mark.parametrize("picked", [False, True], ids=["all-rows", "picked-rows"])
def test_rms_norm(num_rows: int, hidden: int, picked: bool, device: OpDevice):
    kernel_laws.rms_norm(device, num_rows, hidden, picked=picked)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(("heads", "kv_heads", "bias", "norms"), HEADS)
def test_rope_write(heads: int, kv_heads: int, bias: bool, norms: bool, head_dim: int, dtype: DtypeName):
    for num_rows in (1, 45):
        kernel_laws.rope_write(open_device(dtype, head_dim), num_rows, heads, kv_heads, bias=bias, norms=norms)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_rope_write_of_many_rows(head_dim: int, dtype: DtypeName):
    kernel_laws.rope_write(open_device(dtype, head_dim), 300, 9, 3, bias=True, norms=True)


@pytest.mark.parametrize(("num_rows", "inner"), [(1, 8), (3, 1536), (300, 1544), (17, 14336)])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_silu_mul(num_rows: int, inner: int, bias: bool, device: OpDevice):
    kernel_laws.silu_mul(device, num_rows, inner, bias=bias)


@pytest.mark.parametrize(("num_rows", "hidden"), [(1, 8), (3, 576), (299, 2048)])
def test_add_bias(num_rows: int, hidden: int, device: OpDevice):
    kernel_laws.add_bias(device, num_rows, hidden)


@pytest.mark.parametrize(("num_rows", "hidden"), [(1, 64), (7, 576), (61, 1032), (300, 4096)])
def test_embed(num_rows: int, hidden: int, device: OpDevice):
    op_laws.embed(device, ops, num_rows, hidden)


@pytest.mark.parametrize("count", [1, 256, 300])
def test_place_blocks(count: int, device: OpDevice):
    op_laws.place_blocks(device, ops, count)


@pytest.mark.parametrize("num_rows", [1, 3, 21, 300])
@pytest.mark.parametrize("extras", [False, True], ids=["plain", "bias-and-head-norms"])
def test_qkv_rope_write(extras: bool, num_rows: int, device: OpDevice):
    op_laws.qkv_rope_write(device, ops, num_rows, 9, 3, extras=extras)


@pytest.mark.parametrize("num_rows", [1, 5, 33, 300])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_gate_up_silu(bias: bool, num_rows: int, device: OpDevice):
    op_laws.gate_up_silu(device, ops, num_rows, bias=bias)


@pytest.mark.parametrize("num_rows", [1, 5, 33, 300])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_projections_add_to_the_residual_in_place(bias: bool, num_rows: int, device: OpDevice):
    op_laws.projection_add(device, ops.out_proj_add, "attended", num_rows, bias=bias)
    op_laws.projection_add(device, ops.down_proj_add, "activated", num_rows, bias=bias)


@pytest.mark.parametrize(("num_rows", "num_sampled"), [(1, 0), (1, 1), (40, 7), (300, 256)])
def test_norm_lm_head(num_rows: int, num_sampled: int, device: OpDevice):
    op_laws.norm_lm_head(device, ops, num_rows, num_sampled)
