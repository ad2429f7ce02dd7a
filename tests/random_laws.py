"""Laws of random weights on a GPU, real or emulated: they are NumPy's bit for bit, wherever they lie."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gpu_tools import NUMPY_DTYPE, POISON, OpDevice, assert_same_bits
from tiny import BOS_ID, EOS_IDS, tiny_config

from tinyvllm_cli.backends.gpu.backend import GpuBackend, open_gpu_backend
from tinyvllm_cli.backends.gpu.random_weights import fill_matrix
from tinyvllm_cli.config import DtypeName, EngineConfig
from tinyvllm_cli.model.random_weights import RandomTensors, random_values, read_preset
from tinyvllm_cli.random_folder import quickest_source, write_folder

# rows, width, elements between rows, seed, tensor
MATRICES = (
    (1, 8, 0, 0, 0),
    (3, 8, 8, 0, 1),
    (7, 72, 0, 2**31 - 1, 3),
    (37, 136, 136, 1, 2),  # every other piece, as of gate and up
    (5, 4104, 24, 12_345, 290),
)


def tiny(**config: Any) -> dict[str, Any]:
    """config.json of a tiny model that the kernels take."""
    ids = {"vocab_size": 320, "bos_token_id": BOS_ID, "eos_token_id": list(EOS_IDS)}
    return tiny_config(config.pop("architecture", "LlamaForCausalLM"), **ids | {"head_dim": 64} | config)


MODELS = {
    "tied": tiny(tie_word_embeddings=True),
    "biases": tiny(attention_bias=True, mlp_bias=True, intermediate_size=24),
    "head-norms": tiny(architecture="Qwen3ForCausalLM", num_key_value_heads=1),
}


def matrix(device: OpDevice, rows: int, width: int, gap: int, seed: int, tensor: int) -> None:
    """Every element is there, and what lies between the rows stays as it was."""
    output = device.poisoned((rows, width + gap))
    fill_matrix(device, output.array[:, :width], seed, tensor)
    wanted = np.full((rows, 2 * (width + gap)), POISON, np.uint8).view(NUMPY_DTYPE[device.dtype])
    wanted[:, :width] = random_values(seed, tensor, rows * width).astype(np.float32).reshape(rows, width)
    assert_same_bits(f"fill_random, seed {seed}, tensor {tensor}", output.read(), wanted.astype(np.float32))


def open_random(config: dict[str, Any], dtype: DtypeName, seed: int) -> tuple[GpuBackend, RandomTensors]:
    model = read_preset(config)
    tensors = RandomTensors(model, seed)
    engine = EngineConfig(slots=2, max_batch_tokens=32, dtype=dtype, max_model_len=64, gpu_memory=64 << 20)
    return open_gpu_backend(model, tensors, engine, tokenizer_size=model.vocab_size, cache=None), tensors


def model(config: dict[str, Any], dtype: DtypeName, seed: int = 5) -> None:
    """Every tensor of a backend that was opened with random weights, read back from its place."""
    backend, tensors = open_random(config, dtype, seed)
    found = backend.tensors()
    assert found.names() == tensors.names()
    for name in sorted(found.names()):
        wanted = tensors.read(name).astype(NUMPY_DTYPE[dtype])
        assert found.shape(name) == wanted.shape and found.dtype(name) == dtype
        assert_same_bits(name, found.read(name), wanted)
    assert found.nbytes == tensors.nbytes
    backend.close()


def folder(config: dict[str, Any], path: Path) -> None:
    """A folder has the same bytes from a GPU that holds bfloat16, from one that does not, and without any."""
    for dtype in ("bfloat16", "float16"):
        backend, tensors = open_random(config, dtype, seed=1)
        source = quickest_source(backend, tensors)
        assert (source is tensors) == (dtype == "float16")
        write_folder(path / dtype, config, source, progress=False)
        write_folder(path / f"{dtype}-numpy", config, tensors, progress=False)
        backend.close()
    wanted = contents(path / "float16-numpy")
    assert any(np.frombuffer(wanted["model-00002-of-00002.safetensors"], ml_dtypes.bfloat16)[-64:] != 0)
    assert contents(path / "bfloat16") == contents(path / "float16") == contents(path / "bfloat16-numpy") == wanted


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}
