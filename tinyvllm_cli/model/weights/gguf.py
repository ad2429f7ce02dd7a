"""Read a GGUF file: metadata and the places of its tensors. Format: docs/gguf.md of the ggml project.

Every length, count and offset is checked against the file before anything is allocated or read with it: a broken
file gives a ModelError, whatever is broken.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tinyvllm_cli.errors import ModelError
from tinyvllm_cli.model.weights.quant import FORMATS
from tinyvllm_cli.model.weights.source import U8, map_file

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MIN_ENTRY = 13  # bytes of the shortest metadata entry: length of a key, type, one byte
MIN_TENSOR = 24  # bytes of the shortest tensor entry: length of a name, dimensions, type, offset
MAX_DIMS = 4

# Numbers of value types; 8 is a string, 9 an array.
SCALARS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
STRING, ARRAY = 8, 9

# Numbers of tensor types (enum ggml_type), those that are not read too: an error can name them.
TYPES = {
    **{0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K"},
    **{12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S"},
    **{20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64"},
    **{29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4"},
}
BLOCKS = {"F32": (1, 4), "F16": (1, 2), "BF16": (1, 2)} | {t: (f.elements, f.nbytes) for t, f in FORMATS.items()}


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    name: str
    shape: tuple[int, ...]  # in NumPy's order: rows, columns
    type: str  # a key of BLOCKS
    offset: int  # bytes from the start of the file
    nbytes: int


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """A mapped GGUF file. Scalars are Python values, arrays of strings list[str], other arrays NumPy arrays."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]
    raw: U8  # the whole file

    def data(self, name: str) -> U8:
        """The raw bytes of a tensor, a view: u8[nbytes]."""
        tensor = self.tensors[name]
        return self.raw[tensor.offset : tensor.offset + tensor.nbytes]


def is_gguf(path: Path) -> bool:
    """Whether a file is a GGUF file, by its first bytes: names end in anything. OSError where it cannot be read."""
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def read_gguf(path: Path) -> GGUFFile:
    """Header, metadata and tensor list of a GGUF file of version 2 or 3. ModelError for every file that is not one."""
    data = map_file(path)
    cursor = _Cursor(path, data)
    if cursor.take(4) != MAGIC:
        raise cursor.error(f"not a GGUF file: it starts with {data[:4]!r}, not {MAGIC!r}")
    version = cursor.integer("<I")
    if version not in VERSIONS:
        big_endian = " of a big-endian machine" if version.to_bytes(4, "big")[0] in VERSIONS else ""
        raise cursor.error(f"GGUF version {version}{big_endian}, wanted 2 or 3 (little-endian)")
    num_tensors = cursor.count("tensors", MIN_TENSOR)
    num_entries = cursor.count("metadata entries", MIN_ENTRY)
    metadata: dict[str, Any] = {}
    for _ in range(num_entries):
        key = cursor.string()
        if key in metadata:
            raise cursor.error(f"metadata key {key!r} stands twice")
        metadata[key] = cursor.value(cursor.integer("<I"))
    if _integer(metadata.get("split.count", 1)) != 1:
        raise cursor.error(
            f"one part of a model split into {metadata['split.count']} files; join them with `llama-gguf-split --merge`"
        )
    tensors = _read_tensors(cursor, num_tensors, metadata)
    return GGUFFile(path, metadata, tensors, np.frombuffer(data, np.uint8))


def _read_tensors(cursor: _Cursor, count: int, metadata: dict[str, Any]) -> dict[str, GGUFTensor]:
    alignment = _integer(metadata.get("general.alignment", 32))
    if alignment < 1 or alignment % 8:
        raise cursor.error(f"general.alignment is {metadata['general.alignment']}, wanted a multiple of 8")
    entries = [_read_entry(cursor) for _ in range(count)]
    start = -(-cursor.at // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    for name, shape, type, offset in entries:
        elements, block_bytes = BLOCKS[type]
        if not shape or shape[-1] % elements:
            raise cursor.error(f"tensor {name!r} is {type} {list(shape)}, wanted rows of whole blocks of {elements}")
        nbytes = math.prod(shape) // elements * block_bytes
        if offset % alignment or start + offset + nbytes > cursor.size:
            raise cursor.error(
                f"tensor {name!r} is {nbytes} bytes at {start + offset}, in a file of {cursor.size} bytes "
                f"aligned to {alignment}: cut short or damaged; fetch it again"
            )
        if name in tensors:
            raise cursor.error(f"tensor {name!r} stands twice")
        tensors[name] = GGUFTensor(name, shape, type, start + offset, nbytes)
    return tensors


def _read_entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], str, int]:
    """Name, shape, type and offset into the data of one tensor."""
    name = cursor.string()
    dims = cursor.integer("<I")
    if dims > MAX_DIMS:
        raise cursor.error(f"tensor {name!r} has {dims} dimensions, wanted at most {MAX_DIMS}")
    shape = tuple(cursor.integer("<Q") for _ in range(dims))[::-1]  # the file counts the fastest dimension first
    number = cursor.integer("<I")
    type = TYPES.get(number, f"number {number}")
    if type not in BLOCKS:
        raise cursor.error(f"tensor {name!r} has type {type}, wanted one of {', '.join(BLOCKS)}")
    return name, shape, type, cursor.integer("<Q")


def _integer(value: Any) -> int:
    """A metadata value that should be an integer; -1 where it is not one."""
    return value if isinstance(value, int) else -1


class _Cursor:
    """Walks over the header; each step is checked against the end of the file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.size, self.at = path, data, len(data), 0

    def error(self, message: str) -> ModelError:
        return ModelError(f"{self.path}: {message}")

    def take(self, nbytes: int) -> bytes:
        end = self.at + nbytes
        if end > self.size:
            raise self.error(f"ends inside its header, at {self.size} bytes: cut short or damaged; fetch it again")
        start, self.at = self.at, end
        return self.data[start:end]

    def integer(self, format: str) -> int:
        (value,) = struct.unpack(format, self.take(struct.calcsize(format)))
        return int(value)

    def count(self, what: str, min_bytes: int) -> int:
        """A u64 count of things of at least `min_bytes` each: what cannot be in the file is refused here."""
        count = self.integer("<Q")
        if count * min_bytes > self.size - self.at:
            raise self.error(f"says it holds {count} {what}, too many for {self.size} bytes: cut short or damaged")
        return count

    def string(self) -> str:
        return self.strings(1)[0]

    def strings(self, count: int) -> list[str]:
        """Strings one after another. A vocabulary has hundreds of thousands: the one loop that must be tight."""
        data, size, at, length = self.data, self.size, self.at, struct.Struct("<Q").unpack_from
        strings = []
        try:
            for _ in range(count):
                (nbytes,) = length(data, at)
                start, at = at + 8, at + 8 + nbytes
                if at > size:
                    raise struct.error
                strings.append(str(data[start:at], "utf-8"))
        except struct.error:
            raise self.error(f"ends inside a string, at {size} bytes: cut short or damaged; fetch it again") from None
        except UnicodeDecodeError:
            raise self.error(f"holds a string that is not UTF-8, at byte {start}: damaged; fetch it again") from None
        self.at = at
        return strings

    def value(self, type: int) -> Any:
        if type == STRING:
            return self.string()
        if type == ARRAY:
            return self.array(self.integer("<I"))
        dtype = self.scalar_type(type)
        return np.frombuffer(self.take(dtype.itemsize), dtype)[0].item()

    def array(self, type: int) -> Any:
        if type == STRING:
            return self.strings(self.count("strings", 8))
        dtype = self.scalar_type(type)  # arrays in arrays are in the format but in no model
        return np.frombuffer(self.take(dtype.itemsize * self.count("numbers", dtype.itemsize)), dtype)

    def scalar_type(self, type: int) -> np.dtype[Any]:
        if type not in SCALARS:
            raise self.error(f"holds metadata of type {type} at byte {self.at}, which is not known: damaged or too new")
        return np.dtype(SCALARS[type])
