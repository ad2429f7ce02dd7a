"""The run record: a JSON file beside the output that says what was run, how, and how far it is."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from tinyvllm_cli.errors import UsageError

EVERY_S = 10.0
MAX_TRACEBACKS = 20  # of internal errors; one bug may fail every line
MARKS = {"tinyvllm", "command", "state", "progress"}  # a JSON object with these keys is a run record
MAX_BYTES = 1 << 24  # a larger file is no record

State = Literal["running", "finished", "stopped", "failed"]


class RunRecord:
    """Written whole each time, to a temporary name that then takes the record's place.

    What goes wrong with it never ends a run. Without a path it does nothing.
    """

    def __init__(
        self, path: Path | None, facts: Mapping[str, Any], *, warn: Callable[[str], None], every_s: float = EVERY_S
    ) -> None:
        self._path = path
        self._facts = facts
        self._warn = warn
        self._every_s = every_s
        self._written = -every_s
        self._warned = False
        self._tracebacks: list[str] = []

    def due(self) -> bool:
        """It is time for the next write."""
        return self._path is not None and time.monotonic() - self._written >= self._every_s

    def add_traceback(self, text: str) -> None:
        if len(self._tracebacks) < MAX_TRACEBACKS:
            self._tracebacks.append(text)

    def write(self, state: State, progress: Mapping[str, Any], summary: Mapping[str, Any] | None = None) -> None:
        """Every state but "running" is the last: a record that cannot take it is removed, as it would say otherwise."""
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
        # Bytes of the command line that are no UTF-8 become question marks: half surrogates are no strict JSON.
        text = (json.dumps(record, indent=2, ensure_ascii=False) + "\n").encode(errors="replace")
        try:
            _replace(self._path, text)
        except OSError as error:
            problem = f"warning: cannot write the run record {self._path}: {error.strerror}"
            if state == "running":
                self._warn_once(f"{problem}; the run goes on")
            elif not self._path.is_file():
                self._warn(f"{problem}; this run has none")
            elif not _write_over(self._path, text):
                self._warn(f"{problem}; the one that is there would say that the run goes on, and is removed")

    def _warn_once(self, line: str) -> None:
        if not self._warned:
            self._warned = True
            self._warn(line)


def check_record_path(path: Path, used: Mapping[str, os.stat_result]) -> Path:
    """The file that a record at `path` would replace. `used`: what it must not be, by what that is called.

    UsageError where it cannot be a record, or would replace what is none.
    """
    if str(path) == "-":
        raise UsageError("the run record is a file, wanted a name; standard output is for the answers")
    try:
        return _checked(Path(os.path.realpath(path)), used)  # a link stays a link
    except OSError as error:
        raise UsageError(f"cannot write the run record {path}: {error.strerror}") from None


def _checked(path: Path, used: Mapping[str, os.stat_result]) -> Path:
    if not path.parent.is_dir():
        raise UsageError(f"the run record's directory {path.parent} does not exist: make it first")
    if path.is_dir():
        raise UsageError(f"the run record {path} is a directory, wanted a file")
    if path.exists() and not path.is_file() and not path.is_char_device():  # a pipe would keep each write waiting
        raise UsageError(f"the run record {path} is a pipe, wanted a file: it is written anew every {EVERY_S:.0f} s")
    for name, other in used.items():
        if path.is_file() and os.path.samestat(path.stat(), other):
            raise UsageError(f"the run record {path} is the {name} itself: give another name")
    if path.is_file() and not _is_record(path):
        raise UsageError(f"the run record {path} exists and is something else: give --record another name")
    _sweep(path)
    if path.is_file() or not path.exists():
        _temporary(path).touch()  # the folder takes new files
        _temporary(path).unlink()
    return path


def read_record(path: Path | None) -> dict[str, Any] | None:
    """The record of an earlier run; None where there is none, or what is there is none."""
    try:
        if path is None or not path.is_file() or path.stat().st_size > MAX_BYTES:  # a device may have no end
            return None
        record = json.loads(path.read_bytes())
        return record if record.keys() >= MARKS else None
    except (OSError, ValueError, AttributeError, RecursionError):
        return None


def _is_record(path: Path) -> bool:
    """A record of an earlier run, or empty: nothing is lost with it."""
    return path.stat().st_size == 0 or read_record(path) is not None


def _temporary(path: Path) -> Path:
    return path.with_name(f"{path.name}.{os.getpid()}.tmp")


def _sweep(path: Path) -> None:
    """Take away what runs left that were killed while they wrote this record: their processes are gone."""
    for other in path.parent.iterdir():
        found = re.fullmatch(rf"{re.escape(path.name)}\.([1-9][0-9]{{0,8}})\.tmp", other.name)
        if found and not _alive(int(found[1])):
            with suppress(OSError):
                other.unlink()


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # somebody else's
        return True
    return True


def _write_over(path: Path, text: bytes) -> bool:
    """On a full disk there is still the room that the record itself takes. False: not even that, and it is gone."""
    try:
        path.write_bytes(text)
        return True
    except OSError:
        with suppress(OSError):
            path.unlink()
        return False


def _replace(path: Path, text: bytes) -> None:
    if path.exists() and not path.is_file():  # a device such as /dev/null must stay what it is
        path.write_bytes(text)
        return
    temporary = _temporary(path)
    try:
        temporary.write_bytes(text)
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
