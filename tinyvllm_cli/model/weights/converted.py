"""A float32 safetensors copy of a quantized checkpoint in the user's cache, made once for a file as it is now."""

from __future__ import annotations

import fcntl
import hashlib
import math
import os
import shutil
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote_to_bytes, urlsplit

from tinyvllm_cli.config import ModelConfig
from tinyvllm_cli.errors import ModelError
from tinyvllm_cli.model.checkpoint import Checkpoint
from tinyvllm_cli.model.weights.layout import tensor_shapes
from tinyvllm_cli.model.weights.safetensors import SafeTensors, open_safetensors, read_metadata
from tinyvllm_cli.model.weights.safetensors_writer import write_safetensors
from tinyvllm_cli.model.weights.source import map_file

MAX_COPY = 1_000_000_000  # bytes; a larger model is de-quantized at each load
ROOM = 1_000_000_000  # bytes of the disk that a copy leaves free
FORMAT = "2"  # a change in what a copy holds changes this, and so every key
SAMPLES, SAMPLE = 64, 1 << 16  # pieces of the source that its key is made of, bytes of each

Shapes = dict[str, tuple[int, ...]]


def copies_folder(cache_dir: Path) -> Path:
    return cache_dir / "converted"


def converted(checkpoint: Checkpoint, cache_dir: Path) -> Checkpoint:
    """The same checkpoint with its tensors from a copy in the cache, which is made where it is not there.

    The checkpoint itself where it is not quantized, the copy would be 1 GB or more, another process is making one, or
    the cache has no room or cannot be written: a copy saves time and is never needed. A few tensors are in memory at
    a time.
    """
    shapes = tensor_shapes(checkpoint.config)
    if checkpoint.quantization is None or _nbytes(shapes) >= MAX_COPY:
        return checkpoint
    path = copies_folder(cache_dir) / f"{source_key(checkpoint.path, checkpoint.config)}.safetensors"
    tensors = _open_copy(path, shapes)
    if tensors is None:
        try:
            _make_copy(checkpoint, shapes, path)
        except OSError:  # no room, no right to write, or no lock: see above
            return checkpoint
        tensors = _open_copy(path, shapes)
    return checkpoint if tensors is None else replace(checkpoint, tensors=tensors)


def source_key(path: Path, config: ModelConfig) -> str:
    """32 hex digits of a weight file as it is now: its config, what the file system says of it, pieces of its bytes.

    The pieces alone would miss a file that was changed between them.
    """
    path = path.resolve()
    data, stat = map_file(path), path.stat()
    identity = (FORMAT, config, os.fspath(path), stat.st_size, stat.st_mtime_ns, stat.st_ino)
    digest = hashlib.sha256(repr(identity).encode())
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


def _make_copy(checkpoint: Checkpoint, shapes: Shapes, path: Path) -> None:
    """Write the copy under another name and rename it when it is whole and on the disk; throw away those of no use.

    OSError where it cannot be made; BlockingIOError among them while another process makes one: not waited for, since
    de-quantizing takes no longer. The lock has a file of its own, which is never renamed or removed, and falls with
    its process: a part that a killed one left behind is overwritten.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    source, part = checkpoint.path.resolve(), path.with_name("part")
    with path.with_name("lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _remove_stale(path.parent, source)
        if shutil.disk_usage(path.parent).free < _nbytes(shapes) + ROOM:
            raise OSError("no room for a copy")
        try:
            metadata = {"source": source.as_uri()}  # a path need not be UTF-8, a URI is
            write_safetensors(part, shapes, checkpoint.tensors, "float32", metadata=metadata)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)


def _remove_stale(folder: Path, source: Path) -> None:
    """Remove the copies that cannot be found again: of `source` as it was before, and of files that are gone."""
    for copy in folder.glob("*.safetensors"):
        try:
            uri = read_metadata(copy).get("source", "")
        except ModelError:  # damaged
            uri = ""
        recorded = Path(os.fsdecode(unquote_to_bytes(urlsplit(uri).path)))
        if recorded == source or not recorded.is_file():
            copy.unlink()


def _nbytes(shapes: Shapes) -> int:
    return sum(4 * math.prod(shape) for shape in shapes.values())
