"""Write a safetensors file, one tensor after another: no more of it is in memory than is read ahead."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from tinyvllm_cli.config import DtypeName
from tinyvllm_cli.model.weights.safetensors import DTYPES, METADATA, PREFIX
from tinyvllm_cli.model.weights.source import TensorSource, read_ahead

ALIGNMENT = 64  # bytes; where the data begins
NAMES = {dtype: name for name, (dtype, _) in DTYPES.items()}  # of the format

Shapes = Mapping[str, tuple[int, ...]]


def write_safetensors(
    path: Path,
    shapes: Shapes,
    tensors: TensorSource,
    dtype: DtypeName,
    *,
    metadata: Mapping[str, str],
    written: Callable[[int], object] | None = None,
) -> None:
    """The tensors of these names and shapes, as dtype, in this order; all is on the disk on return.

    written: called with the bytes of each tensor. OSError where the file cannot be written.
    """
    name_of_dtype, numpy_dtype = NAMES[dtype], DTYPES[NAMES[dtype]][1]
    entries: dict[str, object] = {METADATA: metadata}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + numpy_dtype.itemsize * math.prod(shape)
        entries[name] = {"dtype": name_of_dtype, "shape": shape, "data_offsets": (start, end)}
    header = msgspec.json.encode(entries)
    header += b" " * (-(PREFIX + len(header)) % ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(PREFIX, "little") + header)
        for array in read_ahead(partial(tensors.read, name) for name in shapes):
            file.write(np.ascontiguousarray(array, numpy_dtype).view(np.uint8).data)  # a buffer has no bfloat16
            if written is not None:
                written(numpy_dtype.itemsize * array.size)
        file.flush()
        os.fsync(file.fileno())
