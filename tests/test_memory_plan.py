"""Memory of the CUDA backend as far as it is arithmetic: the plan, the arena, rounding."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinyvllm_cli.backends.gpu import memory
from tinyvllm_cli.backends.gpu.loading import round_into
from tinyvllm_cli.backends.gpu.memory import ALIGNMENT, RESERVE, Arena, fit_memory, plan_memory
from tinyvllm_cli.config import EngineConfig, ModelConfig, RopeConfig
from tinyvllm_cli.errors import ModelError, UsageError

LLAMA_1B = ModelConfig(
    architecture="LlamaForCausalLM",
    hidden_size=2048,
    intermediate_size=8192,
    num_layers=16,
    num_heads=32,
    num_kv_heads=8,
    head_dim=64,
    vocab_size=128256,
    max_position=131072,
    rms_norm_eps=1e-5,
    rope=RopeConfig(),
    tied_head=True,
)
GIB = 2**30
UNITS = {"GiB": GIB, "MiB": 2**20}


def engine(**options: Any) -> EngineConfig:
    return EngineConfig(**{"slots": 256, "max_batch_tokens": 8192, "dtype": "bfloat16"} | options)


# ---------------------------------------------------------------- the plan


def test_the_weights_of_a_1b_are_what_its_shapes_say():
    """2 bytes a weight of its 1,235,814,400, of which the norms are float32."""
    plan = plan_memory(LLAMA_1B, engine(), wanted=4096, num_blocks=10)
    norms = (2 * 16 + 1) * 2048
    assert plan.weights == 2 * (1_235_814_400 - norms) + 4 * norms
    assert plan.pool == 10 * 16 * 2 * 8 * 16 * 64 * 2


def test_in_fp8_a_weight_of_a_layer_is_a_byte_and_a_row_has_a_scale():
    """The 1B has 973,078,528 weights in its 16 layers, and 23,552 rows in each. Activations that products read have 8
    bits, with a scale for each of 8,192 rows; those of attention are there in 16 bits as well."""
    plans = [plan_memory(LLAMA_1B, engine(dtype=dtype), wanted=4096, num_blocks=10) for dtype in ("bfloat16", "fp8")]
    plain, fp8 = plans
    assert plain.weights - fp8.weights == 973_078_528 - 4 * 16 * (3072 + 2048 + 16384 + 2048)
    assert plain.activations - fp8.activations == 8192 * (2048 + 8192) - 8192 * (2048 + 4)
    assert plain.pool == fp8.pool


@given(free=st.integers(4 * GIB, 200 * GIB), share=st.floats(0.05, 1), slots=st.integers(1, 300))
def test_the_pool_is_the_largest_that_fits(free: int, share: float, slots: int):
    options = engine(slots=slots, gpu_memory=share)
    allowed = min(int(share * free), free - RESERVE)
    try:
        plan = fit_memory(LLAMA_1B, options, free)
    except ModelError:
        assert plan_memory(LLAMA_1B, options, wanted=131072, num_blocks=2).total > allowed
        return
    assert plan.total <= allowed
    more = plan_memory(LLAMA_1B, options, wanted=131072, num_blocks=plan.num_blocks + 1)
    assert more.total > allowed or plan.num_blocks == 1 + slots * 8192
    assert plan.max_seq_len == min(131072, 16 * (plan.num_blocks - 1))


def test_all_slots_can_be_full_where_there_is_room():
    plan = fit_memory(LLAMA_1B, engine(slots=3, max_model_len=1000), 100 * GIB)
    assert (plan.num_blocks, plan.max_seq_len) == (1 + 3 * 63, 1000)


def test_gpu_memory_is_a_share_of_what_is_free_or_bytes():
    by_share, by_bytes = (fit_memory(LLAMA_1B, engine(gpu_memory=m), 40 * GIB) for m in (0.5, 20 * GIB))
    assert by_share == by_bytes
    assert fit_memory(LLAMA_1B, engine(gpu_memory=1.0), 40 * GIB).total <= 40 * GIB - RESERVE
    assert fit_memory(LLAMA_1B, engine(gpu_memory=400 * GIB), 40 * GIB).total <= 40 * GIB - RESERVE


@pytest.mark.parametrize(("length", "tokens"), [(None, 16), (131072, 131072)])
def test_a_model_that_does_not_fit_is_told_with_the_figures(length: int | None, tokens: int):
    options = engine(max_model_len=length)
    with pytest.raises(ModelError) as caught:
        fit_memory(LLAMA_1B, options, 3 * GIB)
    message = str(caught.value)
    plan = plan_memory(LLAMA_1B, options, wanted=131072, num_blocks=1 + tokens // 16)
    figures = [float(figure) * UNITS[unit] for figure, unit in re.findall(r"([\d.]+) (GiB|MiB)", message)]
    others = plan.activations + plan.tables + plan.uploads + plan.workspace
    wanted = [plan.weights, others, plan.pool, plan.total, 3 * GIB, 2.7 * GIB]
    assert figures == [pytest.approx(nbytes, abs=0.0051 * GIB) for nbytes in wanted]
    assert f"one sequence of {tokens} tokens" in message and "\n" not in message
    assert ("--max-model-len" in message) == (length is not None)
    assert all(option in message for option in ("--slots", "--gpu-memory", "--backend cpu"))


def test_more_than_the_context_is_refused():
    with pytest.raises(UsageError, match="--max-model-len 131073"):
        fit_memory(LLAMA_1B, engine(max_model_len=131073), 100 * GIB)


# ---------------------------------------------------------------- the arena


@given(st.lists(st.tuples(st.lists(st.integers(0, 9), max_size=3), st.sampled_from([np.float32, np.int32, np.uint8]))))
def test_arrays_of_an_arena_are_aligned_and_apart(rooms: list[tuple[list[int], Any]]):
    taken: list[tuple[int, int]] = []

    def view(start: int, shape: tuple[int, ...], dtype: Any) -> None:
        taken.append((start, start + int(np.prod(shape)) * np.dtype(dtype).itemsize))

    arena = Arena(memory.total_bytes((tuple(shape), dtype) for shape, dtype in rooms), view)
    for shape, dtype in rooms:
        arena.take(tuple(shape), dtype)
    assert all(start % ALIGNMENT == 0 for start, _ in taken)
    assert all(end <= start for (_, end), (start, _) in pairwise(taken))
    assert arena.used == arena.nbytes and all(end <= arena.nbytes for _, end in taken)
    with pytest.raises(AssertionError, match="planned"):
        arena.take((1,), np.uint8)


# ---------------------------------------------------------------- weights


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_rounding_is_to_nearest_even_and_keeps_what_is_no_number(dtype: Any):
    elem, step = np.dtype(dtype), 2.0**-8 if dtype is ml_dtypes.bfloat16 else 2.0**-11
    values = np.array([1 + step, 1 + 3 * step, -1 - step, np.inf, -np.inf, np.nan, 2.0**127, -0.0], np.float32)
    wanted = [1, 1 + 4 * step, -1, np.inf, -np.inf, np.nan, 2.0**127 if step == 2.0**-8 else np.inf, 0]
    for out in (np.empty(8, elem), np.empty(8, np.float32)):
        round_into(out, values, elem)
        np.testing.assert_array_equal(out.astype(np.float64), wanted)
        assert np.signbit(out[7].astype(np.float32))
