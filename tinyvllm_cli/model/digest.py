"""What tells one model from another: a digest of its small files and of samples of its weights."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from tinyvllm_cli.errors import ModelError
from tinyvllm_cli.model.checkpoint import Checkpoint
from tinyvllm_cli.model.hub_repo import TEXT_FILES
from tinyvllm_cli.model.weights.gguf import GGUFFile
from tinyvllm_cli.model.weights.safetensors import data_start, weight_files

SAMPLE = 1 << 16  # bytes


def model_digest(checkpoint: Checkpoint) -> str:
    """SHA-256 (hex) over the configuration, tokenizer and template files as they are, and of each weight file over its
    name, size, header, and 64 KiB at the start of its data, in its middle and at its end.

    Weights of many gigabytes are not read whole: a file that is changed elsewhere, with nothing else, is not noticed.
    ModelError where a file cannot be read.
    """
    total = hashlib.sha256()
    for name, content in _parts(checkpoint):
        # Digests have one length, so that no two lists of parts run together to the same bytes.
        total.update(hashlib.sha256(name.encode(errors="surrogateescape")).digest())
        total.update(hashlib.sha256(content).digest())
    return total.hexdigest()


def _parts(checkpoint: Checkpoint) -> Iterator[tuple[str, bytes]]:
    source = checkpoint.source
    try:
        if isinstance(source, GGUFFile):
            start = min((tensor.offset for tensor in source.tensors.values()), default=len(source.raw))
            yield from _samples(source.path, start)
            return
        for name in ("config.json", *TEXT_FILES):
            if (source / name).is_file():
                yield name, (source / name).read_bytes()
        for path in weight_files(source):
            yield from _samples(path, data_start(path))
    except OSError as error:
        raise ModelError(f"{error.filename or checkpoint.path}: cannot be read: {error.strerror}") from None


def _samples(path: Path, start: int) -> Iterator[tuple[str, bytes]]:
    """start: of the data behind the header."""
    size = path.stat().st_size
    yield path.name, str(size).encode()
    with path.open("rb") as file:
        yield "header", file.read(start)
        for at in start, size // 2, max(0, size - SAMPLE):
            file.seek(at)
            yield str(at), file.read(SAMPLE)
