"""The attention kernels on the processor: against float64, and the same bits however a sequence is cut into steps."""

from functools import partial

import gpu_tools
import numpy as np
import pytest
from attention_cases import Heads, Machine, check_close, check_few_rows, check_same_bits, check_shared
from cuda_emulator import EmulatedKernels

from tinyvllm_cli.backends.gpu import attention_work

pytestmark = pytest.mark.emulated


def machine(heads: Heads) -> Machine:
    launch = partial(EmulatedKernels(heads.dtype, heads.head_dim, heads.kv_dtype).launch, stream=None)
    return Machine(launch, np.ascontiguousarray, np.array)


@pytest.mark.parametrize(
    "heads",
    [
        Heads(4, 1, 64),
        Heads(9, 3, 64, "float16"),
        Heads(1, 1, 80),
        Heads(3, 1, 96, "float16"),
        Heads(8, 1, 128),
        Heads(2, 1, 256),
        Heads(16, 1, 16, "float16"),
    ],
    ids=str,
)
def test_attention_is_that_of_float64(heads):
    check_close(machine(heads), heads, gpu_tools.assert_close)


@pytest.mark.parametrize("heads", [Heads(4, 1, 64), Heads(1, 1, 256)], ids=str)
def test_a_row_has_the_same_bits_in_any_step(heads):
    check_same_bits(machine(heads), heads, gpu_tools.assert_same_bits, length=530)


@pytest.mark.parametrize(
    "heads",
    [
        *(Heads(group, 1, 64) for group in (1, 2, 3, 5, 8, 16)),
        Heads(4, 2, 80, "float16"),
        Heads(7, 1, 96),
        Heads(4, 1, 128, "float16"),
        Heads(8, 2, 128),
        Heads(4, 1, 256),
        Heads(5, 1, 48),
    ],
    ids=str,
)
def test_few_rows_have_the_bits_of_a_prompt(heads):
    check_few_rows(machine(heads), heads, gpu_tools.assert_same_bits)


OVER_FP8 = [
    Heads(4, 1, 64, kv_dtype="fp8"),
    Heads(8, 1, 128, "float16", kv_dtype="fp8"),
    Heads(2, 1, 80, kv_dtype="fp8"),
    Heads(3, 1, 96, "float16", kv_dtype="fp8"),
    Heads(2, 1, 256, kv_dtype="fp8"),
    Heads(16, 1, 16, kv_dtype="fp8"),
    Heads(4, 2, 32, kv_dtype="fp8"),
]


@pytest.mark.parametrize("heads", OVER_FP8, ids=str)
def test_over_an_fp8_cache(heads):
    check_close(machine(heads), heads, gpu_tools.assert_close)
    check_few_rows(machine(heads), heads, gpu_tools.assert_same_bits)


def test_rows_over_an_fp8_cache_have_the_same_bits_in_any_step():
    heads = Heads(8, 2, 64, kv_dtype="fp8")
    check_same_bits(machine(heads), heads, gpu_tools.assert_same_bits, length=530)


@pytest.mark.parametrize("heads", [Heads(4, 1, 64), Heads(2, 1, 80, "float16", "fp8")], ids=str)
def test_a_row_has_the_same_bits_whether_a_prefix_is_shared(heads, monkeypatch):
    monkeypatch.setattr(attention_work, "LEAST_SEQUENCES", 2)
    monkeypatch.setattr(attention_work, "LEAST_SAVED", 1)
    check_shared(machine(heads), heads, gpu_tools.assert_same_bits)
