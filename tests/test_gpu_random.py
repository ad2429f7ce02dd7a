"""Random weights made by the kernel, on the card: NumPy's bits, in no time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import random_laws
from gpu_tools import DTYPES, assert_same_bits, open_device

from tinyvllm_cli.backends.gpu.backend import GpuBackend
from tinyvllm_cli.backends.gpu.random_weights import fill_random
from tinyvllm_cli.config import DtypeName, EngineConfig
from tinyvllm_cli.model.random_weights import RandomTensors, random_config
from tinyvllm_cli.model.storage import cache_dir

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("matrix", [*random_laws.MATRICES, (1000, 8192, 8192, 7, 8)], ids=str)
def test_a_matrix_is_that_of_numpy(matrix: tuple[int, int, int, int, int], dtype: DtypeName):
    random_laws.matrix(open_device(dtype), *matrix)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", random_laws.MODELS)
def test_a_model_is_that_of_numpy(name: str, dtype: DtypeName):
    random_laws.model(random_laws.MODELS[name], dtype)


def test_a_folder_has_the_same_bytes_from_the_card(tmp_path: Path):
    random_laws.folder(random_laws.MODELS["tied"], tmp_path)


@pytest.mark.parametrize(("name", "limit_s"), [("llama-3.2-1b", 0.5), ("llama-3.1-8b", 1.0)])
def test_a_large_model_is_there_at_once(name: str, limit_s: float):
    config = random_config(name)
    tensors = RandomTensors(config)
    seconds = 0.0

    @contextmanager
    def fill(parameters: Any, device: Any) -> Iterator[None]:
        nonlocal seconds
        device.card.cuda.deviceSynchronize()
        started = time.perf_counter()
        with fill_random(parameters, device, config=config, tensors=tensors):
            device.card.cuda.deviceSynchronize()
            seconds = time.perf_counter() - started
            yield

    engine = EngineConfig(slots=4, max_batch_tokens=64, dtype="bfloat16", max_model_len=256)
    size = config.vocab_size
    backend = GpuBackend(config, fill, engine, tokenizer_size=size, num_blocks=64, cache=cache_dir())
    print(f"\nfill of {name}, {tensors.nbytes / 1e9:.2f} GB: {1e3 * seconds:.1f} ms")
    found, last = backend.tensors(), f"model.layers.{config.num_layers - 1}."
    parts = ("self_attn.k_proj.weight", "self_attn.v_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight")
    for tensor in ("model.embed_tokens.weight", *(last + part for part in parts), "model.norm.weight"):
        assert_same_bits(f"{name}: {tensor}", found.read(tensor), tensors.read(tensor))
    backend.close()
    assert seconds < limit_s
