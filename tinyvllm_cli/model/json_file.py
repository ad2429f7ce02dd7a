"""Read a JSON file of a model into a typed value."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TypeVar

import msgspec

from tinyvllm_cli.errors import ModelError
from tinyvllm_cli.model.regular import require_regular

T = TypeVar("T")


def read_json(path: Path, type: type[T]) -> T:
    """ModelError, one line, where the file cannot be read, is no JSON, or lacks a key or has one of another type.

    JSON as Python writes it: NaN and Infinity are numbers. An integral number is an integer, 64.0 too.
    """
    require_regular(path)
    try:
        value = json.loads(path.read_text(encoding="utf-8"), parse_float=_number)
        json.dumps(value, ensure_ascii=False).encode()  # an escaped half of a surrogate pair would fail much later
        return msgspec.convert(value, type)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
    except json.JSONDecodeError as error:
        mend = "is it whole? Take the file again from where the model comes from"
        raise ModelError(f"{path}: found no JSON ({error}): {mend}") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: {error}") from None


def read_little(path: Path, type: type[T]) -> T | None:
    """read_optional_json() of a file of many MB, of which little is wanted: the rest is skipped, right or wrong. The
    type has no Any."""
    require_regular(path)
    try:
        return msgspec.json.decode(path.read_bytes(), type=type)
    except Exception:  # whatever it is, the other way says it
        return read_optional_json(path, type)


def read_optional_json(path: Path, type: type[T]) -> T | None:
    """The same of a file that need not be there; None where nothing has its name: a broken link is no absent file."""
    return read_json(path, type) if os.path.lexists(path) else None


def _number(text: str) -> int | float:
    value = float(text)
    return int(value) if value.is_integer() else value
