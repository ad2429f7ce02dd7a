"""Open a model, a folder or a GGUF file: its shape, its tensors and what it says about generation."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from tinyvllm_cli.config import ModelConfig
from tinyvllm_cli.errors import ModelError
from tinyvllm_cli.model.generation import GenerationDefaults, folder_generation, gguf_generation
from tinyvllm_cli.model.gguf_config import gguf_config, gguf_quantization
from tinyvllm_cli.model.hf_config import model_config, read_config
from tinyvllm_cli.model.weights.gguf import GGUFFile, read_gguf
from tinyvllm_cli.model.weights.gguf_tensors import GGUFTensors
from tinyvllm_cli.model.weights.layout import EMBED, check_tensors
from tinyvllm_cli.model.weights.safetensors import open_folder
from tinyvllm_cli.model.weights.source import TensorSource


@dataclass(frozen=True, slots=True)
class Checkpoint:
    path: Path
    source: Path | GGUFFile  # what tokenizer and template are in: the folder, or the file whose header is read
    format: Literal["safetensors", "gguf", "random"]
    quantization: str | None  # the type that most bytes are of, e.g. Q4_1
    config: ModelConfig
    tensors: TensorSource
    generation: GenerationDefaults


def open_checkpoint(path: Path) -> Checkpoint:
    """Read the headers of a model in Hugging Face layout (a folder) or of a GGUF file, and check them.

    ModelError, one line, for what is broken or not supported.
    """
    checkpoint = _open_folder(path) if path.is_dir() else _open_gguf(path)
    try:
        check_tensors(checkpoint.config, checkpoint.tensors)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None
    dtype = "float32" if checkpoint.quantization else checkpoint.tensors.dtype(EMBED)
    return replace(checkpoint, config=replace(checkpoint.config, dtype=dtype))


def _open_folder(folder: Path) -> Checkpoint:
    path = folder / "config.json"
    if not os.path.lexists(path):
        raise ModelError(f"{folder}: no config.json in this folder, wanted a model in Hugging Face layout")
    hf_config = read_config(path)
    config = model_config(hf_config, path)
    return Checkpoint(
        path=folder,
        source=folder,
        format="safetensors",
        quantization=None,
        config=config,
        tensors=open_folder(folder),
        generation=folder_generation(folder, hf_config.eos_token_id, config.vocab_size),
    )


def _open_gguf(path: Path) -> Checkpoint:
    file = read_gguf(path)
    config = gguf_config(file)
    return Checkpoint(
        path=path,
        source=file,
        format="gguf",
        quantization=gguf_quantization(file),
        config=config,
        tensors=GGUFTensors(file, config),
        generation=gguf_generation(file, config.vocab_size),
    )
