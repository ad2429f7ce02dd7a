"""Quantized GGUF files for the tests of the weights, written with the gguf package."""

from pathlib import Path

import gguf
import numpy as np
from tiny_gguf import write_gguf_twin

from tinyvllm_cli.model.weights.gguf import read_gguf

QUANTIZED = {"Q4_1": gguf.GGMLQuantizationType.Q4_1, "Q8_0": gguf.GGMLQuantizationType.Q8_0}


def quantize_gguf(plain: Path, path: Path, type: str) -> Path:
    """A GGUF file of F32 tensors once more, with its matrices quantized as llama.cpp does it."""
    source = read_gguf(plain)
    writer = gguf.GGUFWriter(path, source.metadata["general.architecture"])
    for key, value in source.metadata.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(key, value)
    for name, tensor in source.tensors.items():
        data = source.data(name).view("<f4").reshape(tensor.shape)
        if data.ndim == 1:
            writer.add_tensor(name, data)
        else:
            writer.add_tensor(name, gguf.quants.quantize(data, QUANTIZED[type]), raw_dtype=QUANTIZED[type])
    finish(writer)
    return path


def twin(folder: Path) -> Path:
    return write_gguf_twin(folder, folder.with_suffix(".gguf"))


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def flip(data: bytes, place: int, bit: int) -> bytes:
    """The bytes with one bit turned."""
    changed = np.frombuffer(data, np.uint8).copy()
    changed[place] ^= 1 << bit
    return changed.tobytes()
