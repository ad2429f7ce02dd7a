"""Files that a benchmark leaves: where they may go is known before anything is measured."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tinyvllm_cli.errors import TinyvllmError, UsageError


def check_result_file(option: str, name: str, first_key: str) -> Path:
    """The path of a file that is to be. first_key: of the JSON object that it will hold; a file that is there is
    replaced only where it holds such a one. UsageError where it cannot be written, or holds something else.
    """
    path = Path(name)
    try:
        if path.is_dir():
            raise UsageError(f"{option} {name} is a directory, wanted a file")
        if not path.exists():
            if not path.parent.is_dir():
                raise UsageError(f"{option} {name}: the directory {path.parent} does not exist: make it first")
            path.touch()
            path.unlink()
        elif not os.access(path, os.W_OK):
            raise UsageError(f"{option} {name} may not be written: give another name")
        elif path.is_file() and not _holds(path, first_key):
            raise UsageError(f"{option} {name} exists and is something else: give another name")
    except OSError as error:
        raise UsageError(f"{option} {name} cannot be written: {error.strerror}") from None
    return path


def write_result_file(path: Path, content: Mapping[str, Any], *, indent: int | None = None) -> None:
    """TinyvllmError where it cannot be written after all."""
    try:
        path.write_text(json.dumps(content, indent=indent, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise TinyvllmError(f"cannot write {path}: {error.strerror}") from None


def _holds(path: Path, first_key: str) -> bool:
    with path.open("rb") as file:
        start = file.read(len(first_key) + 16)
    return not start or b"".join(start.split()).startswith(f'{{"{first_key}":'.encode())
