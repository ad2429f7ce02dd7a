"""The attention kernels on a GPU: against float64, and the same bits however a sequence is cut into steps."""

import gpu_tools
import numpy as np
import pytest
from attention_cases import Heads, Machine, check_close, check_few_rows, check_same_bits, check_shared

from tinyvllm_cli.backends.gpu import attention_work

pytestmark = pytest.mark.gpu


def machine(heads: Heads) -> Machine:
    import cupy

    device = gpu_tools.open_device(heads.dtype, heads.head_dim, heads.kv_dtype)

    def get(array):
        cupy.cuda.runtime.deviceSynchronize()
        return array.reshape(-1).view(np.uint8).get().view(array.dtype).reshape(array.shape)

    return Machine(device.launch, gpu_tools.to_gpu, get)


@pytest.mark.parametrize("dtype", gpu_tools.DTYPES)
@pytest.mark.parametrize(
    ("query", "kv", "head_dim"),
    [(32, 8, 64), (9, 3, 64), (4, 4, 80), (3, 1, 96), (8, 1, 128), (16, 1, 128), (4, 2, 256), (2, 2, 16)],
)
def test_attention_is_that_of_float64(query, kv, head_dim, dtype):
    heads = Heads(query, kv, head_dim, dtype)
    check_close(machine(heads), heads, gpu_tools.assert_close)


@pytest.mark.parametrize("heads", [Heads(8, 2, 64), Heads(9, 3, 64, "float16"), Heads(2, 1, 128), Heads(2, 2, 256)])
def test_a_row_has_the_same_bits_in_any_step(heads):
    check_same_bits(machine(heads), heads, gpu_tools.assert_same_bits, length=1050)


@pytest.mark.parametrize("dtype", gpu_tools.DTYPES)
@pytest.mark.parametrize(
    ("query", "kv", "head_dim"),
    [(1, 1, 64), (16, 1, 64), (32, 8, 64), (9, 3, 64), (8, 2, 80), (7, 1, 96), (32, 8, 128), (8, 4, 256), (5, 1, 48)],
)
def test_few_rows_have_the_bits_of_a_prompt(query, kv, head_dim, dtype):
    heads = Heads(query, kv, head_dim, dtype)
    check_few_rows(machine(heads), heads, gpu_tools.assert_same_bits)


@pytest.mark.parametrize("dtype", gpu_tools.DTYPES)
@pytest.mark.parametrize(
    ("query", "kv", "head_dim"),
    [(8, 2, 64), (3, 1, 80), (8, 1, 128), (4, 2, 160), (2, 1, 256), (16, 1, 16), (5, 1, 32)],
)
def test_over_an_fp8_cache(query, kv, head_dim, dtype):
    heads = Heads(query, kv, head_dim, dtype, "fp8")
    check_close(machine(heads), heads, gpu_tools.assert_close)
    check_few_rows(machine(heads), heads, gpu_tools.assert_same_bits)


@pytest.mark.parametrize("heads", [Heads(8, 2, 64, kv_dtype="fp8"), Heads(4, 1, 128, "float16", "fp8")])
def test_rows_over_an_fp8_cache_have_the_same_bits_in_any_step(heads):
    check_same_bits(machine(heads), heads, gpu_tools.assert_same_bits, length=1050)


@pytest.mark.parametrize("dtype", gpu_tools.DTYPES)
@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
@pytest.mark.parametrize(
    ("query", "kv", "head_dim"),
    [(32, 8, 64), (9, 3, 64), (1, 1, 80), (7, 1, 96), (32, 8, 128), (16, 1, 128), (4, 2, 256), (5, 1, 48)],
)
def test_a_row_has_the_same_bits_whether_a_prefix_is_shared(query, kv, head_dim, dtype, kv_dtype, monkeypatch):
    monkeypatch.setattr(attention_work, "LEAST_SEQUENCES", 2)
    monkeypatch.setattr(attention_work, "LEAST_SAVED", 1)
    heads = Heads(query, kv, head_dim, dtype, kv_dtype)
    check_shared(machine(heads), heads, gpu_tools.assert_same_bits, scale=3)
