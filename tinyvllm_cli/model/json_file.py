"""Read a JSON file into a typed struct."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from tinyvllm_cli.errors import ModelError

T = TypeVar("T")


def read_json(path: Path, type: type[T]) -> T:
    """ModelError, one line, where the file cannot be read, is no JSON, or lacks a key or has one of another type."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=type)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(f"{path}: {error}") from None
