"""A folder and its GGUF twin have the same weights, laid out as the ops want them; what is broken is named."""

import threading
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny import make_tiny_model
from weight_files import QUANTIZED, quantize_gguf, twin

from tinyvllm_cli.config import EngineOptions
from tinyvllm_cli.errors import ModelError
from tinyvllm_cli.load import open_engine
from tinyvllm_cli.model.checkpoint import Checkpoint, open_checkpoint
from tinyvllm_cli.model.weights.gguf import GGUFFile, read_gguf
from tinyvllm_cli.model.weights.layout import WeightItem, iter_weights
from tinyvllm_cli.model.weights.source import READERS, read_ahead

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, biases": {"attention_bias": True, "mlp_bias": True},
    "llama, tied, MQA": {"tie_word_embeddings": True, "num_key_value_heads": 1},
    "llama, 9 heads over 3": {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8},
    "llama, wide heads, llama3": {"head_dim": 32, "rope_parameters": LLAMA3},
    "qwen2": {"architecture": "Qwen2ForCausalLM"},
    "qwen3": {"architecture": "Qwen3ForCausalLM"},
}


def weights(checkpoint: Checkpoint) -> dict[tuple[str, int | None], np.ndarray]:
    return {(item.kind, item.layer): item.array for item in iter_weights(checkpoint.config, checkpoint.tensors)}


def assert_same_weights(a: Checkpoint, b: Checkpoint) -> None:
    first, second = weights(a), weights(b)
    assert list(first) == list(second)
    for place, array in first.items():
        assert np.array_equal(array, second[place]), place


@pytest.mark.parametrize("name", MODELS)
def test_a_folder_and_its_gguf_twin_are_one_model(name: str, tmp_path: Path):
    folder = make_tiny_model(tmp_path / "model", **MODELS[name])
    a, b = open_checkpoint(folder), open_checkpoint(twin(folder))
    assert_same_weights(a, b)
    for field in ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "vocab_size", "max_position"):
        assert getattr(a.config, field) == getattr(b.config, field)
    for field in ("qkv_bias", "o_bias", "mlp_bias", "qk_norm", "tied_head", "dtype"):
        assert getattr(a.config, field) == getattr(b.config, field)
    assert a.config.rope.theta == b.config.rope.theta
    assert a.generation.eos_token_ids == b.generation.eos_token_ids
    assert (b.config.rope.freq_factors is not None) == (a.config.rope.type == "llama3")


@pytest.mark.parametrize("name", MODELS)
def test_fused_tensors_hold_the_rows_of_their_parts(name: str, tmp_path: Path):
    folder = make_tiny_model(tmp_path / "model", **MODELS[name])
    checkpoint, file = open_checkpoint(folder), load_file(folder / "model.safetensors")
    fused = weights(checkpoint)
    seen = set()
    for (kind, layer), array in fused.items():
        end = "bias" if kind.endswith("bias") else "weight"
        prefix = "" if layer is None else f"model.layers.{layer}."
        names = [f"{prefix}{part}.{end}" for part in PARTS[kind.removesuffix("_bias")]]
        seen |= set(names)
        if kind.startswith("gate_up"):
            gate, up = (file[n] for n in names)
            for i in range(len(gate)):
                row = i // 8 * 16 + i % 8
                assert np.array_equal(array[row], gate[i])
                assert np.array_equal(array[row + 8], up[i])
        else:
            assert np.array_equal(array, np.concatenate([file[n] for n in names]))
    assert seen == file.keys()
    assert ("head", None) not in fused or not checkpoint.config.tied_head


PARTS = {
    "embed": ["model.embed_tokens"],
    "head": ["lm_head"],
    "final_norm": ["model.norm"],
    "attn_norm": ["input_layernorm"],
    "qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "q_norm": ["self_attn.q_norm"],
    "k_norm": ["self_attn.k_norm"],
    "o": ["self_attn.o_proj"],
    "mlp_norm": ["post_attention_layernorm"],
    "gate_up": ["mlp.gate_proj", "mlp.up_proj"],
    "down": ["mlp.down_proj"],
}


def test_a_tied_head_in_the_file_changes_nothing(tmp_path: Path):
    without = make_tiny_model(tmp_path / "a", tie_word_embeddings=True)
    with_head = make_tiny_model(tmp_path / "b", tie_word_embeddings=True, head_in_file=True)
    assert_same_weights(open_checkpoint(without), open_checkpoint(with_head))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_shards_are_the_single_file_in_every_dtype(dtype: str, tmp_path: Path):
    one = open_checkpoint(make_tiny_model(tmp_path / "one", dtype=dtype))
    three = open_checkpoint(make_tiny_model(tmp_path / "three", dtype=dtype, shards=3))
    assert_same_weights(one, three)
    expected = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    assert {array.dtype for array in weights(one).values()} == {expected}
    assert one.config.dtype == dtype
    assert one.tensors.nbytes == three.tensors.nbytes


def test_a_tensor_that_is_used_as_it_is_is_not_copied(tmp_path: Path):
    checkpoint = open_checkpoint(make_tiny_model(tmp_path / "model"))
    fused = weights(checkpoint)
    for place in (("embed", None), ("head", None), ("o", 0), ("down", 1)):
        assert not fused[place].flags.writeable  # a view of the mapped file
    assert fused["qkv", 0].flags.writeable


@pytest.mark.parametrize("type", QUANTIZED)
def test_a_quantized_file_is_near_its_source(type: str, tmp_path: Path):
    plain = twin(make_tiny_model(tmp_path / "model"))
    a, b = open_checkpoint(plain), open_checkpoint(quantize_gguf(plain, tmp_path / "q.gguf", type))
    assert (a.quantization, b.quantization) == (None, type)
    close = {"Q4_1": 0.2, "Q8_0": 0.02}[type]
    second = weights(b)
    for place, array in weights(a).items():
        assert second[place].dtype == np.float32
        assert np.abs(second[place] - array).max() < close * np.abs(array).max(), place


def test_parts_of_different_dtypes_meet_in_float32(tmp_path: Path):
    folder = make_tiny_model(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.v_proj.weight"
    tensors[name] = tensors[name].astype(np.float16)
    save_file(tensors, folder / "model.safetensors")
    qkv = weights(open_checkpoint(folder))["qkv", 0]
    assert qkv.dtype == np.float32
    assert np.array_equal(qkv[-32:], tensors[name].astype(np.float32))


def test_no_more_than_a_few_tensors_are_read_ahead():
    started, lock = [0], threading.Lock()

    def job() -> int:
        with lock:
            started[0] += 1
        return started[0]

    for taken, _ in enumerate(read_ahead(job for _ in range(100))):
        assert started[0] - taken <= READERS + 1
    assert started[0] == 100


def test_an_error_comes_through_in_its_place():
    def fail() -> int:
        raise ModelError("broken")

    results = read_ahead([lambda: 1, lambda: 2, fail, lambda: 3])
    assert [next(results), next(results)] == [1, 2]
    with pytest.raises(ModelError, match="broken"):
        next(results)


def test_nothing_is_read_any_more_once_the_reader_is_left():
    started, finished = [], []

    def job() -> None:
        started.append(1)
        time.sleep(0.05)
        finished.append(1)

    results = read_ahead(job for _ in range(100))
    next(results)
    results.close()
    assert len(started) == len(finished) < 100


def iter_weights_of(path: Path) -> Any:
    checkpoint = open_checkpoint(path)
    return iter_weights(checkpoint.config, checkpoint.tensors)


def test_items_come_in_the_order_of_the_forward_pass(tmp_path: Path):
    items: list[WeightItem] = list(iter_weights_of(make_tiny_model(tmp_path / "model")))
    layers = [item.layer for item in items[1:-2]]
    assert [items[0].kind, items[-2].kind, items[-1].kind] == ["embed", "final_norm", "head"]
    assert layers == sorted(layers)


def test_a_gguf_header_is_read_once_for_a_whole_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TINYVLLM_CACHE", str(tmp_path / "cache"))
    file = twin(make_tiny_model(tmp_path / "model"))
    reads: list[Path] = []

    def counted(path: Path) -> GGUFFile:
        reads.append(path)
        return read_gguf(path)

    for module in ("model.weights.gguf", "model.checkpoint"):
        monkeypatch.setattr(f"tinyvllm_cli.{module}.read_gguf", counted)
    open_engine(str(file), backend="cpu", config=EngineOptions(slots=1, max_model_len=64), report=print).close()
    assert reads == [file]
