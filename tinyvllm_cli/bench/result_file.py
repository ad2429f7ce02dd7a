"""Files that a benchmark leaves: where they may go is known before anything is measured."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tinyvllm_cli.errors import TinyvllmError, UsageError

STREAMS = {1: "standard output", 2: "standard error"}


def check_result_file(option: str, name: str, first_key: str) -> Path:
    """The path of a file that is to be. first_key: of the JSON object that it will hold; a file that is there is
    replaced only where it holds such a one. UsageError where it cannot be written, or holds something else.
    """
    if name == "-":
        raise UsageError(f"{option} is a file, wanted a name; standard output is for the table")
    try:
        return _checked(option, name, first_key)
    except OSError as error:
        raise UsageError(f"{option} {name} cannot be written: {error.strerror}") from None


def _checked(option: str, name: str, first_key: str) -> Path:
    path = Path(name)
    if path.is_dir():
        raise UsageError(f"{option} {name} is a directory, wanted a file")
    if path.exists() and not os.access(path, os.W_OK):
        raise UsageError(f"{option} {name} may not be written: give another name")
    if path.exists() and not path.is_file():
        return path  # a device, or a pipe
    path = Path(os.path.realpath(path))  # a link stays a link
    if not path.parent.is_dir():
        raise UsageError(f"{option} {name}: the directory {path.parent} does not exist: make it first")
    for fd, stream in STREAMS.items():
        with suppress(FileNotFoundError):
            if os.path.samestat(path.stat(), os.fstat(fd)):
                raise UsageError(f"{option} {name} is where {stream} goes: give another name")
    if path.exists() and not _holds(path, first_key):
        raise UsageError(f"{option} {name} exists and is something else: give another name")
    _temporary(path).touch()  # the folder takes new files
    _temporary(path).unlink()
    return path


def write_result_file(path: Path, content: Mapping[str, Any], *, indent: int | None = None) -> None:
    """Whole, or not at all: what an earlier benchmark left stays until then. TinyvllmError where it cannot be written
    after all.
    """
    # Bytes of the command line that are no UTF-8 become question marks: half surrogates are no strict JSON.
    text = (json.dumps(content, indent=indent, ensure_ascii=False, allow_nan=False) + "\n").encode(errors="replace")
    try:
        _replace(path, text)
    except OSError as error:
        raise TinyvllmError(f"cannot write {path}: {error.strerror}") from None


def _replace(path: Path, text: bytes) -> None:
    if path.exists() and not path.is_file():
        path.write_bytes(text)
        return
    temporary = _temporary(path)
    try:
        temporary.write_bytes(text)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _temporary(path: Path) -> Path:
    return path.with_name(f"{path.name}.{os.getpid()}.tmp")


def _holds(path: Path, first_key: str) -> bool:
    with path.open("rb") as file:
        start = file.read(len(first_key) + 16)
    return not start or b"".join(start.split()).startswith(f'{{"{first_key}":'.encode())
