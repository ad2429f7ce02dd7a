"""The tensors of a GGUF file under Hugging Face names, de-quantized and in Hugging Face row order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np

from tinyvllm_cli.config import DtypeName, ModelConfig
from tinyvllm_cli.errors import ModelError
from tinyvllm_cli.model.weights.gguf import GGUFFile
from tinyvllm_cli.model.weights.names import hf_name
from tinyvllm_cli.model.weights.quant import dequantize
from tinyvllm_cli.model.weights.source import Array

PLAIN: dict[str, tuple[DtypeName, np.dtype[Any]]] = {
    "F32": ("float32", np.dtype("<f4")),
    "F16": ("float16", np.dtype("<f2")),
    "BF16": ("bfloat16", np.dtype(ml_dtypes.bfloat16)),
}


class GGUFTensors:
    """TensorSource over a GGUF file; quantized tensors are read as float32."""

    def __init__(self, file: GGUFFile, config: ModelConfig) -> None:
        self._file = file
        self._tensors = {hf_name(name): tensor for name, tensor in file.tensors.items()}
        if len(self._tensors) < len(file.tensors):
            names = [name for name in file.tensors if hf_name(name) != name and hf_name(name) in file.tensors]
            raise ModelError(f"{file.path}: tensors {names[0]!r} and {hf_name(names[0])!r} are the same one")
        # llama.cpp turns neighbouring pairs, Hugging Face's order pairs the halves of a head: only files of this one
        # architecture have the rows of q and k permuted for it.
        permuted = config.architecture == "llama"
        self._heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads} if permuted else {}

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def dtype(self, name: str) -> DtypeName:
        type = self._tensors[name].type
        return PLAIN[type][0] if type in PLAIN else "float32"

    def read(self, name: str) -> Array:
        tensor = self._tensors[name]
        data = self._file.data(tensor.name)
        if tensor.type in PLAIN:
            array: Array = data.view(PLAIN[tensor.type][1]).reshape(tensor.shape)
        else:
            array = dequantize(tensor.type, data, tensor.shape)
        heads = self._heads.get(name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2])
        return array if heads is None else unpermute(array, heads)

    def close(self) -> None:
        self._file = replace(self._file, raw=np.empty(0, np.uint8))
        self._tensors = {}


def unpermute(rows: Array, heads: int) -> Array:
    """Rows of q or k (weight [heads hd, in] or bias [heads hd]) from GGUF's order for architecture llama to ours.

    There row 2 i + j of a head is our row i + j hd / 2 (convert_hf_to_gguf.py of llama.cpp, LlamaModel.permute).
    """
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)
