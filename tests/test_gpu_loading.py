"""Weights on a card: every tensor at its place, bit for bit, whatever file it came from and however it was cut."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu_subject import TINY, gpu_backend, load_kernels_once
from gpu_tools import NUMPY_DTYPE
from tiny import make_tiny_model
from tiny_gguf import write_gguf_twin

from tinyvllm_cli.backends.gpu import loading
from tinyvllm_cli.model.checkpoint import Checkpoint, open_checkpoint
from tinyvllm_cli.model.parameters import Parameters, Weight
from tinyvllm_cli.model.weights.layout import iter_weights

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> Iterator[None]:
    with load_kernels_once():
        yield


def assert_loaded(checkpoint: Checkpoint, parameters: Parameters, dtype: Any) -> None:
    """Against what layout.py fuses and interleaves on the host, rounded."""
    elem = NUMPY_DTYPE[dtype]
    for item in iter_weights(checkpoint.config, checkpoint.tensors):
        held = getattr(parameters if item.layer is None else parameters.layers[item.layer], item.kind)
        array = held.data if isinstance(held, Weight) else held
        found = array.view(np.uint8).get().view(array.dtype).astype(np.float32)
        wanted = item.array.astype(elem).astype(np.float32)
        differ = np.argwhere(found != wanted)
        assert not len(differ), (
            f"{item.kind} of layer {item.layer}, {wanted.shape}: {len(differ)} of {wanted.size} numbers differ, the "
            f"first at {differ[0].tolist()}: found {found[tuple(differ[0])]}, wanted {wanted[tuple(differ[0])]}"
        )
    assert (parameters.head is parameters.embed) == checkpoint.config.tied_head


@pytest.mark.parametrize(
    ("stored", "dtype", "chunk", "config"),
    [
        ("float32", "bfloat16", 1, {"attention_bias": True, "mlp_bias": True}),
        ("bfloat16", "bfloat16", 1 << 24, {"architecture": "Qwen3ForCausalLM", "tie_word_embeddings": True}),
        ("float16", "float16", 10_000, {"architecture": "Qwen2ForCausalLM", "intermediate_size": 24}),
        ("bfloat16", "float16", 3000, {"shards": 3, "num_key_value_heads": 1, "num_hidden_layers": 9}),
    ],
)
def test_every_tensor_lies_where_the_layout_says(
    stored: str, dtype: Any, chunk: int, config: dict, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(loading, "CHUNK", chunk)
    checkpoint = open_checkpoint(make_tiny_model(tmp_path / "model", dtype=stored, **TINY | config))
    backend = gpu_backend(checkpoint, dtype=dtype)
    assert_loaded(checkpoint, backend._parameters, dtype)
    backend.close()


def test_a_gguf_file_gives_what_its_folder_gives(tmp_path: Path):
    folder = make_tiny_model(tmp_path / "model", **TINY)
    gguf = open_checkpoint(write_gguf_twin(folder, tmp_path / "twin.gguf"))
    backend = gpu_backend(gguf)
    assert_loaded(open_checkpoint(folder), backend._parameters, "bfloat16")
    backend.close()


def test_matrices_of_several_chunks_in_several_threads(tmp_path: Path):
    """64 MB of weights, the embedding in three chunks and the layers beside it."""
    big = {"vocab_size": 40_000, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 3}
    checkpoint = open_checkpoint(make_tiny_model(tmp_path / "model", dtype="bfloat16", **TINY | big))
    backend = gpu_backend(checkpoint)
    assert_loaded(checkpoint, backend._parameters, "bfloat16")
    backend.close()
