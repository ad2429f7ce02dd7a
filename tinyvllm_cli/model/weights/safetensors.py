"""Read safetensors files: one file, or many with an index. Format: the README of huggingface/safetensors.

The header is read here, not by the safetensors package, whose NumPy side knows no bfloat16 and copies each tensor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import ml_dtypes
import msgspec
import numpy as np

from tinyvllm_cli.config import DtypeName
from tinyvllm_cli.errors import ModelError
from tinyvllm_cli.model.json_file import read_json
from tinyvllm_cli.model.weights.source import U8, Array, map_file

DTYPES: dict[str, tuple[DtypeName, np.dtype[Any]]] = {
    "F32": ("float32", np.dtype("<f4")),
    "F16": ("float16", np.dtype("<f2")),
    "BF16": ("bfloat16", np.dtype(ml_dtypes.bfloat16)),
}
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_HEADER = 100_000_000  # bytes; the limit of the format
PREFIX = 8  # bytes of the header's length


class Entry(msgspec.Struct, frozen=True):
    """A tensor as the header has it."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]  # first byte and the one after the last, from the end of the header


class Index(msgspec.Struct):
    weight_map: dict[str, str]  # tensor -> file


@dataclass(frozen=True, slots=True)
class Tensor:
    entry: Entry
    raw: U8  # its bytes, a view of the mapped file
    path: Path


class SafeTensors:
    """TensorSource over mapped safetensors files."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors

    @property
    def nbytes(self) -> int:
        return sum(len(tensor.raw) for tensor in self._tensors.values())

    def names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].entry.shape

    def dtype(self, name: str) -> DtypeName:
        tensor = self._tensors[name]
        if tensor.entry.dtype not in DTYPES:
            raise ModelError(
                f"{tensor.path}: tensor {name!r} has dtype {tensor.entry.dtype!r}, wanted one of {', '.join(DTYPES)}"
            )
        return DTYPES[tensor.entry.dtype][0]

    def read(self, name: str) -> Array:
        tensor = self._tensors[name]
        array = tensor.raw.view(DTYPES[tensor.entry.dtype][1]).reshape(tensor.entry.shape)
        return np.require(array, requirements="A")  # files of older writers: data at odd addresses

    def close(self) -> None:
        self._tensors = {}


def open_safetensors(path: Path) -> SafeTensors:
    """One file. ModelError where its header is broken or does not fit the file."""
    return SafeTensors(_read_file(path))


def open_folder(folder: Path) -> SafeTensors:
    """model.safetensors of a folder, or the files of its index. ModelError where they are not there or broken."""
    if (folder / SINGLE).is_file():
        return open_safetensors(folder / SINGLE)
    if not (folder / INDEX).is_file():
        raise ModelError(f"{folder}: {_missing(folder)}")
    weight_map = _read_index(folder / INDEX)
    files = {file: _read_file(folder / file) for file in sorted(set(weight_map.values()))}
    for name, file in weight_map.items():
        if name not in files[file]:
            raise ModelError(f"{folder / file}: tensor {name!r} is not in it, although {INDEX} says so")
    return SafeTensors({name: files[file][name] for name, file in weight_map.items()})


def _read_index(path: Path) -> dict[str, str]:
    weight_map = read_json(path, Index).weight_map
    for file in sorted(set(weight_map.values())):
        if PurePath(file).name != file:
            raise ModelError(f"{path}: {file!r} is not a file of this folder")
        if not (path.parent / file).is_file():
            raise ModelError(f"{path.parent}: {file!r} is missing, which {INDEX} names; fetch the model again")
    return weight_map


def _missing(folder: Path) -> str:
    """Why a folder has no weights, and what to do."""
    for pattern, advice in (
        ("*.bin", "load it with transformers and save it again with save_pretrained(..., safe_serialization=True)"),
        ("*.pth", "fetch the version of the model in Hugging Face layout"),
        ("*.gguf", "name the .gguf file itself"),
        ("*.safetensors", f"wanted the name {SINGLE}, or {INDEX} beside several files"),
    ):
        for found in sorted(folder.glob(pattern)):
            return f"no {SINGLE} in this folder, but {found.name}: {advice}"
    return f"no {SINGLE} and no {INDEX} in this folder"


def _read_file(path: Path) -> dict[str, Tensor]:
    data = np.frombuffer(map_file(path), np.uint8)
    length = int.from_bytes(data[:PREFIX].tobytes(), "little")
    if length > min(MAX_HEADER, len(data) - PREFIX):
        raise ModelError(
            f"{path}: a header of {length} bytes in a file of {len(data)}: cut short, or not a safetensors file"
        )
    try:
        header = msgspec.json.decode(data[PREFIX : PREFIX + length].tobytes(), type=dict[str, msgspec.Raw])
        entries = {n: msgspec.json.decode(e, type=Entry) for n, e in header.items() if n != "__metadata__"}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(f"{path}: a damaged safetensors header: {error}") from None
    _check_places(path, entries, len(data) - PREFIX - length)
    data = data[PREFIX + length :]
    return {n: Tensor(e, data[e.data_offsets[0] : e.data_offsets[1]], path) for n, e in entries.items()}


def _check_places(path: Path, entries: dict[str, Entry], nbytes: int) -> None:
    """The tensors lie one after another and fill the data of the file; each is as long as its shape says."""
    at = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        start, end = entry.data_offsets
        if start != at or end < start:
            raise ModelError(f"{path}: tensor {name!r} lies at {start} to {end}, wanted its start at {at}: damaged")
        if entry.dtype in DTYPES:
            wanted = math.prod(entry.shape) * DTYPES[entry.dtype][1].itemsize
            if end - start != wanted or min(entry.shape, default=0) < 0:
                kind = f"{entry.dtype} {list(entry.shape)}"
                raise ModelError(
                    f"{path}: tensor {name!r} has {end - start} bytes, wanted {wanted} for {kind}: damaged"
                )
        at = end
    if at != nbytes:
        raise ModelError(f"{path}: {nbytes} bytes of tensors, wanted {at}: cut short or damaged; fetch it again")
