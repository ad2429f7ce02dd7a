"""The run record: a JSON file beside the output that says what was run, how, and how far it is."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from tinyvllm_cli.errors import UsageError

EVERY_S = 10.0
MAX_TRACEBACKS = 20  # of internal errors; one bug may fail every line

State = Literal["running", "finished", "stopped", "failed"]


class RunRecord:
    """Written whole each time, to a temporary name that then takes the record's place.

    What goes wrong with it is said once and never ends a run. Without a path it does nothing.
    """

    def __init__(
        self, path: Path | None, facts: Mapping[str, Any], *, warn: Callable[[str], None], every_s: float = EVERY_S
    ) -> None:
        self._path = path
        self._facts = facts
        self._warn = warn
        self._every_s = every_s
        self._written = -every_s
        self._tracebacks: list[str] = []

    def due(self) -> bool:
        """It is time for the next write."""
        return self._path is not None and time.monotonic() - self._written >= self._every_s

    def add_traceback(self, text: str) -> None:
        if len(self._tracebacks) < MAX_TRACEBACKS:
            self._tracebacks.append(text)

    def write(self, state: State, progress: Mapping[str, Any], summary: Mapping[str, Any] | None = None) -> None:
        if self._path is None:
            return
        self._written = time.monotonic()
        record = {
            **self._facts,
            "state": state,
            "progress": progress,
            "summary": summary,
            "tracebacks": self._tracebacks,
        }
        try:
            _replace(self._path, json.dumps(record, indent=2) + "\n")
        except OSError as error:
            self._warn(
                f"warning: cannot write the run record {self._path}: {error.strerror}; the run goes on without it"
            )
            self._path = None


def check_record_path(path: Path, used: Mapping[str, os.stat_result]) -> Path:
    """The file that a record at `path` would replace. `used`: what input and output are, which it must not be.

    UsageError where it cannot be a record.
    """
    try:
        return _checked(Path(os.path.realpath(path)), used)  # a link stays a link
    except OSError as error:
        raise UsageError(f"cannot write the run record {path}: {error.strerror}") from None


def _checked(path: Path, used: Mapping[str, os.stat_result]) -> Path:
    if not path.parent.is_dir():
        raise UsageError(f"the run record's directory {path.parent} does not exist: make it first")
    if path.is_dir():
        raise UsageError(f"the run record {path} is a directory, wanted a file")
    for name, other in used.items():
        if path.is_file() and os.path.samestat(path.stat(), other):
            raise UsageError(f"the run record {path} is the {name} itself: give another name")
    return path


def _replace(path: Path, text: str) -> None:
    if path.exists() and not path.is_file():  # a device such as /dev/null must stay what it is
        path.write_text(text)
        return
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text)
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
