"""Read safetensors files: one file, or many with an index. Format: the README of huggingface/safetensors.

The header is read here, not by the safetensors package, whose NumPy side knows no bfloat16 and copies each tensor.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, TypeVar

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
METADATA = "__metadata__"  # the one key of a header that is no tensor's name
T = TypeVar("T")


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
            raise ModelError(f"tensor {name!r} has dtype {tensor.entry.dtype!r}, wanted one of {', '.join(DTYPES)}")
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


def read_metadata(path: Path) -> dict[str, str]:
    """The free text in a file's header; empty where it has none. ModelError where the header is broken."""
    raw = _read_header(path)[0].get(METADATA)
    return {} if raw is None else _decode(raw, dict[str, str], path)


def weight_files(folder: Path) -> list[Path]:
    """The files that open_folder() reads. ModelError where they are not there, or the index is broken."""
    if os.path.lexists(folder / SINGLE):
        return [folder / SINGLE]
    return [folder / file for file in sorted(set(_read_index(folder / INDEX).values()))]


def data_start(path: Path) -> int:
    """Bytes in front of a file's tensors."""
    with path.open("rb") as file:
        return PREFIX + int.from_bytes(file.read(PREFIX), "little")


def open_folder(folder: Path) -> SafeTensors:
    """model.safetensors of a folder, or the files of its index. ModelError where they are not there or broken."""
    if os.path.lexists(folder / SINGLE):
        return open_safetensors(folder / SINGLE)
    if not os.path.lexists(folder / INDEX):
        raise ModelError(f"{folder}: {_missing(folder)}")
    weight_map = _read_index(folder / INDEX)
    files = {file: _read_file(folder / file) for file in sorted(set(weight_map.values()))}
    for name, file in weight_map.items():
        if name not in files[file]:
            raise ModelError(f"{folder / file}: tensor {name!r} is not in it, although {INDEX} says so")
    # A tensor that the index leaves out is there all the same, and whether it may be is for others to say.
    unlisted = {name: tensor for tensors in files.values() for name, tensor in tensors.items()}
    return SafeTensors(unlisted | {name: files[file][name] for name, file in weight_map.items()})


def _read_index(path: Path) -> dict[str, str]:
    weight_map = read_json(path, Index).weight_map
    for file in sorted(set(weight_map.values())):
        if PurePath(file).name != file:
            raise ModelError(f"{path}: {file!r} is not a file of this folder")
        if not (path.parent / file).exists():
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
    header, data = _read_header(path)
    entries = {name: _decode(raw, Entry, path) for name, raw in header.items() if name != METADATA}
    _check_places(path, entries, len(data))
    return {n: Tensor(e, data[e.data_offsets[0] : e.data_offsets[1]]) for n, e in entries.items()}


def _read_header(path: Path) -> tuple[dict[str, msgspec.Raw], U8]:
    """The header by tensor, and the data behind it."""
    data = np.frombuffer(map_file(path), np.uint8)
    length = int.from_bytes(data[:PREFIX].tobytes(), "little")
    if length > min(MAX_HEADER, len(data) - PREFIX):
        raise ModelError(
            f"{path}: a header of {length} bytes in a file of {len(data)}: cut short, or not a safetensors file"
        )
    header = _decode(data[PREFIX : PREFIX + length].tobytes(), dict[str, msgspec.Raw], path)
    return header, data[PREFIX + length :]


def _decode(raw: bytes | msgspec.Raw, type: type[T], path: Path) -> T:
    try:
        return msgspec.json.decode(raw, type=type)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(f"{path}: a damaged safetensors header: {error}") from None


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
