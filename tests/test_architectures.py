"""Every architecture gives the logits of transformers, and each way to store one model gives one result."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from architectures import ARCHITECTURES, LLAMA3_ROPE, prompts
from steps import prompt_step
from tiny import TOKENIZER_SIZE, make_tiny_model
from tiny_gguf import write_gguf_twin

from tinyvllm_cli.backends.cpu.backend import CpuBackend
from tinyvllm_cli.config import EngineConfig
from tinyvllm_cli.model.checkpoint import open_checkpoint

F32 = npt.NDArray[np.float32]

# Made by tests/reference/make_architectures.py
STORED = np.load(Path(__file__).parent / "data" / "architectures.npz")
OLD_KEYS_LLAMA3 = {
    "head_dim": 128,
    "rope_theta": LLAMA3_ROPE["rope_theta"],
    "rope_scaling": {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"},
}
NEW_KEYS_LINEAR = {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}}


def logits(path: Path) -> F32:
    """Raw logits f32[prompts, V] of the last row of each prompt, through the CPU backend."""
    checkpoint = open_checkpoint(path)
    engine = EngineConfig(slots=1, max_model_len=128, max_batch_tokens=128, dtype="float32")
    with closing(CpuBackend(checkpoint.config, checkpoint.tensors, engine, tokenizer_size=TOKENIZER_SIZE)) as backend:
        return np.concatenate([backend.logits(prompt_step(ids)) for ids in prompts()])


def distance(found: F32, wanted: F32) -> float:
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_are_those_of_transformers(name, tmp_path):
    found = logits(make_tiny_model(tmp_path, **ARCHITECTURES[name]))
    assert found.shape == STORED[name].shape
    assert distance(found, STORED[name]) < 1e-4


def test_the_reference_tells_the_architectures_apart():
    names = list(ARCHITECTURES)
    assert set(STORED.files) == {*names, "versions"}
    # Mistral is Llama with another RoPE base: the nearest two of all.
    assert min(distance(STORED[a], STORED[b]) for a in names for b in names if a != b) > 0.1


@pytest.mark.parametrize(
    ("name", "stored_otherwise"),
    [
        ("llama_llama3_rope", OLD_KEYS_LLAMA3),
        ("llama_linear_rope", NEW_KEYS_LINEAR),
        ("llama_tied", {"tie_word_embeddings": True, "head_in_file": True}),
        ("qwen3", {**ARCHITECTURES["qwen3"], "shards": 2}),
    ],
    ids=["old RoPE keys", "new RoPE keys", "tied head in the file", "two files"],
)
def test_another_way_to_store_a_model_changes_nothing(name, stored_otherwise, tmp_path):
    one = logits(make_tiny_model(tmp_path / "one", **ARCHITECTURES[name]))
    other = logits(make_tiny_model(tmp_path / "other", **stored_otherwise))
    assert one.tolist() == other.tolist()


@pytest.mark.parametrize("name", ["llama", "llama_tied", "llama_llama3_rope", "llama_9_heads_over_3", "qwen2", "qwen3"])
def test_a_gguf_twin_gives_the_same_tokens(name, tmp_path):
    folder = make_tiny_model(tmp_path / "folder", **ARCHITECTURES[name])
    twin = logits(write_gguf_twin(folder, tmp_path / "twin.gguf"))
    assert distance(twin, STORED[name]) < 1e-4
    assert twin.argmax(axis=1).tolist() == logits(folder).argmax(axis=1).tolist()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_files_hold_the_same_model_up_to_rounding(dtype, tmp_path):
    found = logits(make_tiny_model(tmp_path, dtype=dtype))
    assert 0 < distance(found, STORED["llama"]) < 0.1
