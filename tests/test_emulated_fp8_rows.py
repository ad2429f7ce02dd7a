"""Weights in FP8 without a card: the kernels, what a backend holds and plans, and the bits of rows."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import bit_laws
import fp8_row_laws
import numpy as np
import pytest
from bit_laws import assert_none
from cuda_emulator import EmulatedKernels
from emulated_cuda import Runtime
from emulated_gpu import emulated_gpu
from gpu_bits import NAN, SHUFFLED, Model
from gpu_subject import gpu_backend, to_host
from gpu_tools import DTYPES, OpDevice, rounded
from tiny import make_tiny_model

from tinyvllm_cli.backends.fp8_rows import quantize_rows
from tinyvllm_cli.backends.gpu import loading, ops
from tinyvllm_cli.backends.gpu.backend import open_gpu_backend
from tinyvllm_cli.backends.gpu.parity import compare_prompts
from tinyvllm_cli.config import DtypeName, EngineConfig
from tinyvllm_cli.errors import DeviceError, ModelError
from tinyvllm_cli.model.checkpoint import Checkpoint, open_checkpoint
from tinyvllm_cli.model.parameters import Weight
from tinyvllm_cli.model.random_weights import RandomTensors
from tinyvllm_cli.model.weights.layout import iter_weights

pytestmark = pytest.mark.emulated

TINY: dict[str, Any] = {"dtype": "bfloat16", "attention_bias": True, "mlp_bias": True}
MATRICES = ("qkv", "o", "gate_up", "down")


@functools.cache
def op_device(dtype: DtypeName) -> OpDevice:
    return OpDevice(dtype, 64, EmulatedKernels(dtype, 64), None, stream=None, place=np.array)


@pytest.fixture(params=DTYPES)
def device(request: pytest.FixtureRequest) -> OpDevice:
    return op_device(request.param)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(make_tiny_model(tmp_path_factory.mktemp("tiny"), **TINY))


@pytest.mark.parametrize("columns", [8, 576, 4104, 20000])
def test_rows_have_the_bits_of_numpy(columns: int, device: OpDevice):
    fp8_row_laws.quantized(device, 7, columns)
    fp8_row_laws.quantized(device, 1, columns)


@pytest.mark.parametrize("pieces", [1, 3])
def test_gate_and_up_in_turns(pieces: int, device: OpDevice):
    fp8_row_laws.in_turns(device, pieces, 8, 72)


@pytest.mark.parametrize("hidden", [64, 576, 4104])
def test_norms_become_codes(hidden: int, device: OpDevice):
    fp8_row_laws.norm_codes(device, 6, hidden)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("inner", [16, 1544, 17000])
def test_silu_becomes_codes(inner: int, bias: bool, device: OpDevice):
    fp8_row_laws.silu_codes(device, 4, inner, bias=bias)


# ---------------------------------------------------------------- what a backend holds


@pytest.mark.parametrize("chunk", [1, 3000, 1 << 24])
def test_weights_are_those_of_numpy(chunk: int, checkpoint: Checkpoint, cuda: Runtime, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(loading, "CHUNK", chunk)
    backend = gpu_backend(checkpoint, dtype="fp8")
    assert backend.facts.dtype == "fp8"
    assert backend.facts.details["total_bytes"] == cuda.device_bytes
    assert_weights(backend, iter_weights(checkpoint.config, checkpoint.tensors))
    backend.close()


def test_random_weights_are_those_of_numpy(checkpoint: Checkpoint, cuda: Runtime):
    config = replace(checkpoint.config, dtype="bfloat16")
    tensors = RandomTensors(config, 5)
    engine = EngineConfig(slots=2, max_batch_tokens=32, dtype="fp8", max_model_len=64, gpu_memory=64 << 20)
    backend = open_gpu_backend(config, tensors, engine, tokenizer_size=config.vocab_size, cache=None)
    assert_weights(backend, iter_weights(config, tensors))
    backend.close()


def assert_weights(backend: Any, items: Any) -> None:
    """Matrices of layers are codes with scales, all others elements."""
    backend._device.stream.synchronize()
    parameters, kinds = backend._parameters, set()
    for item in items:
        held = getattr(parameters if item.layer is None else parameters.layers[item.layer], item.kind)
        wanted = item.array.astype(np.float32)
        if item.layer is not None and item.kind in MATRICES:
            kinds.add(item.kind)
            codes, scales = quantize_rows(wanted)
            np.testing.assert_array_equal(to_host(backend, held.data), codes)
            np.testing.assert_array_equal(to_host(backend, held.scale), scales)
        else:
            array = held.data if isinstance(held, Weight) else held
            np.testing.assert_array_equal(to_host(backend, array), rounded(wanted, "bfloat16"))
    assert kinds == set(MATRICES)


def test_a_matrix_has_a_byte_for_each_weight(checkpoint: Checkpoint, cuda: Runtime):
    plans = {}
    for dtype in ("bfloat16", "fp8"):
        backend = gpu_backend(checkpoint, dtype=dtype)
        plans[dtype] = backend.facts.details["weights_bytes"]
        backend.close()
    c = checkpoint.config
    shapes = [
        ((c.num_heads + 2 * c.num_kv_heads) * c.head_dim, c.hidden_size),
        (c.hidden_size, c.num_heads * c.head_dim),
        (2 * c.intermediate_size, c.hidden_size),
        (c.hidden_size, c.intermediate_size),
    ]
    saved = c.num_layers * sum(n * k - 4 * n for n, k in shapes)
    assert abs(plans["bfloat16"] - plans["fp8"] - saved) <= 256 * 8 * c.num_layers  # each array at a multiple of 256


def test_every_op_is_within_its_tolerance(checkpoint: Checkpoint, cuda: Runtime):
    backend = gpu_backend(checkpoint, dtype="fp8", max_batch_tokens=640)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 60, length).tolist() for length in (21, 70)]
    for comparison in compare_prompts(backend, prompts, 2, ops):
        assert comparison.ok, f"{comparison.op}: {comparison}"
    backend.close()


# ---------------------------------------------------------------- what cannot be


def test_a_card_that_cannot_multiply_fp8_is_refused(
    checkpoint: Checkpoint, cuda: Runtime, monkeypatch: pytest.MonkeyPatch
):
    found = cuda.getDeviceProperties(0)
    monkeypatch.setattr(cuda, "getDeviceProperties", lambda index: found | {"major": 8, "minor": 6})
    with pytest.raises(DeviceError, match=r"Emulated has compute capability 8\.6: --dtype fp8 needs .* bfloat16"):
        gpu_backend(checkpoint, dtype="fp8")
    gpu_backend(checkpoint).close()


def test_a_length_that_fp8_does_not_take_is_named(checkpoint: Checkpoint, cuda: Runtime):
    odd = replace(checkpoint, config=replace(checkpoint.config, intermediate_size=72))
    with pytest.raises(ModelError, match=r"intermediate_size is 72, --dtype fp8 needs a multiple of 16"):
        gpu_backend(odd, dtype="fp8")


# ---------------------------------------------------------------- bits of rows


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    one = {"num_hidden_layers": 1, "num_key_value_heads": 1, "head_dim": 64}
    checkpoint = open_checkpoint(make_tiny_model(tmp_path_factory.mktemp("model"), dtype="bfloat16", **one))
    with emulated_gpu() as cuda:
        model = Model(checkpoint, length=548, crowd=range(9, 23), held="fp8")
        yield model
        model.backend.close()
        assert not cuda.held


@pytest.fixture
def model(shared: Model) -> Model:
    assert shared.alone and shared.crowd
    shared.fill(NAN)
    return shared


def test_rows_have_the_same_bits_in_any_step(model: Model):
    assert_none(bit_laws.chunks(model, 100, 7) + bit_laws.decoded(model, 65) + bit_laws.among_others(model, 5, (0, 9)))
    assert_none(bit_laws.other_blocks(model, SHUFFLED, (15,)) + bit_laws.preempted(model, decoded=3))
