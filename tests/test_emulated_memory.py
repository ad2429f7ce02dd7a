"""Memory of the CUDA backend over an emulated card: what is planned is used, where tensors go, what a step uploads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from emulated_cuda import Runtime
from gpu_subject import TINY, gpu_backend, to_host
from seam import Part, batch, prompt
from tiny import make_tiny_model

from tinyvllm_cli.backends.gpu import loading
from tinyvllm_cli.backends.gpu.rows import upload_limit
from tinyvllm_cli.config import EngineConfig
from tinyvllm_cli.errors import ModelError
from tinyvllm_cli.model.checkpoint import Checkpoint, open_checkpoint
from tinyvllm_cli.model.parameters import Weight
from tinyvllm_cli.model.weights.layout import iter_weights
from tinyvllm_cli.types import SlotOptions

pytestmark = pytest.mark.emulated

GIB = 2**30


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(make_tiny_model(tmp_path_factory.mktemp("tiny"), **TINY))


@pytest.mark.parametrize(
    "config",
    [{}, {"architecture": "Qwen3ForCausalLM", "tie_word_embeddings": True}, {"attention_bias": True, "mlp_bias": True}],
    ids=str,
)
def test_planned_bytes_are_used_bytes(config: dict, cuda: Runtime, tmp_path: Path):
    checkpoint = open_checkpoint(make_tiny_model(tmp_path / "model", **TINY | config))
    for options in ({"num_blocks": 9}, {"num_blocks": None, "slots": 3, "gpu_memory": 500 << 20}):
        backend = gpu_backend(checkpoint, **options)
        assert backend.facts.details["total_bytes"] == cuda.device_bytes
        backend.close()


def test_memory_that_is_gone_when_it_is_asked_for_is_told(
    checkpoint: Checkpoint, cuda: Runtime, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(cuda, "memGetInfo", lambda: (2 * GIB, 2 * GIB))  # and then another process was quicker
    with pytest.raises(ModelError, match=r"Emulated has no 1\.\d+ GiB in one piece.*--gpu-memory"):
        gpu_backend(replace(checkpoint, config=replace(checkpoint.config, num_layers=900)), num_blocks=None)


# ---------------------------------------------------------------- weights


@pytest.mark.parametrize("chunk", [1, 3000, 1 << 24])
@pytest.mark.parametrize(
    ("stored", "dtype", "config"),
    [
        ("float32", "bfloat16", {"attention_bias": True, "mlp_bias": True}),
        ("bfloat16", "bfloat16", {"architecture": "Qwen3ForCausalLM", "tie_word_embeddings": True}),
        ("float16", "float16", {"architecture": "Qwen2ForCausalLM", "intermediate_size": 24}),
        ("bfloat16", "float16", {"shards": 3, "num_key_value_heads": 1}),
    ],
)
def test_every_tensor_lies_where_the_layout_says_rounded(
    stored: str, dtype: Any, config: dict, chunk: int, cuda: Runtime, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """layout.py fuses and interleaves on the host; here tensors go to their places directly. Copies of any size."""
    monkeypatch.setattr(loading, "CHUNK", chunk)
    checkpoint = open_checkpoint(make_tiny_model(tmp_path / "model", dtype=stored, **TINY | config))
    backend = gpu_backend(checkpoint, dtype=dtype)
    parameters, elem = backend._parameters, {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}[dtype]
    kinds = set()
    for item in iter_weights(checkpoint.config, checkpoint.tensors):
        held = getattr(parameters if item.layer is None else parameters.layers[item.layer], item.kind)
        array = held.data if isinstance(held, Weight) else held
        assert array.dtype == (elem if item.array.ndim == 2 else np.float32)
        assert np.array_equal(to_host(backend, array), item.array.astype(elem).astype(np.float32)), item.kind
        kinds.add(item.kind)
    assert (parameters.head is parameters.embed) == checkpoint.config.tied_head
    assert {"embed", "qkv", "o", "gate_up", "down", "final_norm"} <= kinds


def test_an_error_of_a_thread_comes_out_before_the_rest_is_read(checkpoint: Checkpoint, cuda: Runtime):
    read = []

    class Damaged:
        def __getattr__(self, name: str) -> Any:
            return getattr(checkpoint.tensors, name)

        def read(self, name: str) -> np.ndarray:
            read.append(name)
            raise ModelError(f"{name} is damaged")

    with pytest.raises(ModelError, match="is damaged"):
        gpu_backend(replace(checkpoint, tensors=Damaged()))
    assert len(read) < len(checkpoint.tensors.names()) / 2


# ---------------------------------------------------------------- what a step uploads


def test_the_largest_step_fits_into_an_upload(checkpoint: Checkpoint, cuda: Runtime):
    """Every slot at the end of its context with as many edits as come, and all the rows that a step may have."""
    slots, rows, length = 12, 100, 2048
    config = replace(checkpoint.config, max_position=length)
    backend = gpu_backend(replace(checkpoint, config=config), slots=slots, max_batch_tokens=rows, num_blocks=129)
    assert backend.limits.max_seq_len == length
    bias = tuple((token, 1.0) for token in range(250))
    for slot in range(slots):
        backend.bind(slot, [9] * length, SlotOptions(temperature=1.0, logit_bias=bias, seed=2**64 - 1))
    ends = [rows - slots + 1, *[1] * (slots - 1)]
    parts = [Part(slot, range(1, 129), length - n, [-1] * n) for slot, n in enumerate(ends)]
    assert backend.step(batch(*parts)).result().token_ids.shape == (1, slots)
    engine = EngineConfig(slots=slots, max_batch_tokens=rows, dtype="bfloat16")
    assert backend._upload._used <= upload_limit(engine, length)


def test_a_wider_table_than_the_positions_need_is_no_more_work(checkpoint: Checkpoint, cuda: Runtime):
    backend = gpu_backend(checkpoint, num_blocks=41)
    ids = prompt(20)
    narrow = batch(Part(0, (1, 2), 0, ids))
    wide = batch(Part(0, (1, 2), 0, ids), Part(1, (3, 4, 5, *[0] * 997), 0, [9]))
    assert np.array_equal(backend.logits(wide)[:1], backend.logits(narrow))
