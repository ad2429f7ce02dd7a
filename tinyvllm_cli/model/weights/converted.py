"""A float32 safetensors copy of a quantized checkpoint in the user's cache, made once and found by content."""

from __future__ import annotations

import fcntl
import hashlib
import math
import os
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from tinyvllm_cli.config import ModelConfig
from tinyvllm_cli.errors import ModelError
from tinyvllm_cli.model.checkpoint import Checkpoint
from tinyvllm_cli.model.weights.layout import tensor_shapes
from tinyvllm_cli.model.weights.safetensors import PREFIX, SafeTensors, open_safetensors
from tinyvllm_cli.model.weights.source import TensorSource, map_file, read_ahead

MAX_COPY = 1_000_000_000  # bytes; a larger model is de-quantized at each load
ROOM = 1_000_000_000  # bytes of the disk that a copy leaves free
FORMAT = "1"  # a change in what a copy holds changes this, and so every key
SAMPLES, SAMPLE = 64, 1 << 16  # pieces of the source that its key is made of, bytes of each
ALIGNMENT = 64  # bytes; where the data of a copy begins

Shapes = dict[str, tuple[int, ...]]


def converted(checkpoint: Checkpoint, cache_dir: Path) -> Checkpoint:
    """The same checkpoint with its tensors from a copy in the cache, which is made where it is not there.

    The checkpoint itself where it is not quantized, the copy would be 1 GB or more, another process is making it, or
    the cache has no room or cannot be written: a copy saves time and is never needed. A few tensors are in memory at
    a time.
    """
    shapes = tensor_shapes(checkpoint.config)
    if checkpoint.quantization is None or _nbytes(shapes) >= MAX_COPY:
        return checkpoint
    path = cache_dir / "converted" / f"{source_key(checkpoint.path, checkpoint.config)}.safetensors"
    tensors = _open_copy(path, shapes)
    if tensors is None:
        try:
            _make_copy(checkpoint.tensors, shapes, path)
        except OSError:  # no room, no right to write, or no lock: see above
            return checkpoint
        tensors = _open_copy(path, shapes)
    return checkpoint if tensors is None else replace(checkpoint, tensors=tensors)


def source_key(path: Path, config: ModelConfig) -> str:
    """32 hex digits of a weight file's identity, wherever it lies: its size, its config and pieces of its bytes."""
    data = map_file(path)
    digest = hashlib.sha256(repr((FORMAT, len(data), config)).encode())
    for i in range(SAMPLES):
        start = max(len(data) - SAMPLE, 0) * i // (SAMPLES - 1)
        digest.update(data[start : start + SAMPLE])
    return digest.hexdigest()[:32]


def _open_copy(path: Path, shapes: Shapes) -> SafeTensors | None:
    """The copy at `path`; None where it is not there, torn or not of these tensors."""
    try:
        copy = open_safetensors(path)
    except ModelError:
        return None
    same = copy.names() == shapes.keys() and all(
        copy.shape(name) == shape and copy.dtype(name) == "float32" for name, shape in shapes.items()
    )
    return copy if same else None


def _make_copy(source: TensorSource, shapes: Shapes, path: Path) -> None:
    """Write the copy under another name and rename it when it is whole and on the disk.

    OSError where it cannot be made; BlockingIOError among them while another process makes it: not waited for, since
    de-quantizing takes no longer. The lock has a file of its own, which is never renamed or removed, and falls with
    its process: a part that a killed one left behind is overwritten.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if shutil.disk_usage(path.parent).free < _nbytes(shapes) + ROOM:
            raise OSError("no room for a copy")
        part = path.with_suffix(".part")
        try:
            write_copy(source, shapes, part)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)


def write_copy(source: TensorSource, shapes: Shapes, path: Path) -> None:
    """A safetensors file of float32 tensors, written one after another."""
    entries: dict[str, dict[str, object]] = {}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + _nbytes({name: shape})
        entries[name] = {"dtype": "F32", "shape": shape, "data_offsets": (start, end)}
    header = msgspec.json.encode(entries)
    header += b" " * (-(PREFIX + len(header)) % ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(PREFIX, "little") + header)
        for array in read_ahead(partial(source.read, name) for name in shapes):
            file.write(np.ascontiguousarray(array, "<f4").data)
        file.flush()
        os.fsync(file.fileno())


def _nbytes(shapes: Shapes) -> int:
    return sum(4 * math.prod(shape) for shape in shapes.values())
