"""The input of a run: which kinds of file there are, and opening one."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from tinyvllm_cli.errors import UsageError

STDIN = 0


@dataclass(frozen=True, slots=True)
class Source:
    """An input that can be read."""

    name: str  # as messages call it
    stream: BinaryIO
    status: os.stat_result
    text_lines: bool  # .txt: a line is a prompt
    path: Path | None  # None: standard input

    @property
    def regular(self) -> bool:
        """Reading never waits for somebody else."""
        return stat.S_ISREG(self.status.st_mode)


def open_source(name: str) -> Source:
    """INPUT of `run`: a .jsonl or .txt file, or - for JSON lines on standard input. UsageError for anything else."""
    if name == "-":
        try:
            # Not sys.stdin: a reader that still waits would hold its lock when the interpreter ends.
            return _source("standard input", STDIN, text_lines=False, path=None)
        except OSError:
            raise UsageError("standard input is closed, wanted JSON lines") from None
    path = Path(name)
    suffix = path.suffix.lower()
    if suffix not in {".jsonl", ".txt"}:
        raise UsageError(f"the input {name} is no .jsonl or .txt file; give one, or - for JSON lines on standard input")
    try:
        if path.is_dir():
            raise UsageError(f"the input {name} is a directory, wanted a .jsonl or .txt file")
        return _source(name, os.open(path, os.O_RDONLY | os.O_CLOEXEC), text_lines=suffix == ".txt", path=path)
    except OSError as error:
        raise UsageError(f"cannot read the input {name}: {error.strerror}") from None


def _source(name: str, fd: int, *, text_lines: bool, path: Path | None) -> Source:
    return Source(name, open(fd, "rb", closefd=fd != STDIN), os.fstat(fd), text_lines, path)
