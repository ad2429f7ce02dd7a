"""The input of a run: which kinds of file there are, and opening one."""

from __future__ import annotations

import fcntl
import io
import os
import select
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from tinyvllm_cli.errors import InputError, UsageError

STDIN = 0
MAX_TEXT = 1 << 24  # bytes of a text that is read as a whole: beyond any context, well below a machine's memory
OTHER_KINDS = {  # files that hold lines in another form: how to come to them
    ".json": "`jq -c '.[]' FILE > FILE.jsonl` makes lines of a JSON array",
    ".gz": "unpack it, or `gunzip -c FILE | tinyvllm run -` for JSON lines",
    ".zst": "unpack it, or `zstd -dc FILE | tinyvllm run -` for JSON lines",
    ".tsv": "columns are separated by commas in a .csv file",
    ".parquet": "docs/batch-files.md shows how to make lines of it",
}


@dataclass(frozen=True, slots=True)
class Source:
    """An input that can be read."""

    name: str  # as messages call it
    stream: BinaryIO
    status: os.stat_result  # as it was opened
    suffix: str  # .jsonl, .csv or .txt; standard input is .jsonl
    named: bool  # by a path; else standard input

    @property
    def text_lines(self) -> bool:
        """A line is a prompt."""
        return self.suffix == ".txt"

    @property
    def regular(self) -> bool:
        """Reading never waits for somebody else."""
        return stat.S_ISREG(self.status.st_mode)

    @property
    def twice(self) -> bool:
        """It can be read once before the model is loaded, and again for the answers: the same bytes both times."""
        return self.named and self.regular

    def changed(self) -> bool:
        """Somebody has written to it since it was opened."""
        now = os.fstat(self.stream.fileno())
        return (now.st_size, now.st_mtime_ns) != (self.status.st_size, self.status.st_mtime_ns)


class _Raw(io.FileIO):
    """A file for a BufferedReader, which takes "no data yet" of a non-blocking one for its end: this one waits.

    It ends at `size` bytes where that is given, whatever is appended later. InputError where it ends before: what is
    left of a line that was cut is no line.
    """

    def __init__(self, fd: int, called: str, *, size: int | None) -> None:
        super().__init__(fd, "rb", closefd=fd != STDIN)
        self._called = called
        self._size = size

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        room = memoryview(buffer)
        if self._size is not None:
            room = room[: max(0, self._size - self.tell())]
        while (count := super().readinto(room)) is None:
            select.select([self], [], [])
        if self._size is not None and room and not count:
            raise InputError(
                f"{self._called} ends after {self.tell()} of the {self._size} bytes that it had when it was opened: "
                "another program has cut it; restore it"
            )
        return count


def open_source(name: str) -> Source:
    """INPUT of `run`: a .jsonl, .csv or .txt file, or - for JSON lines on standard input; UsageError otherwise."""
    if name == "-":
        return open_stdin("JSON lines")
    path = Path(name)
    suffix = path.suffix.lower()
    if suffix not in {".jsonl", ".csv", ".txt"}:
        wanted = OTHER_KINDS.get(suffix, "give one, or - for JSON lines on standard input")
        raise UsageError(f"the input {name} is no .jsonl, .csv or .txt file; {wanted}")
    try:
        if path.is_dir():
            raise UsageError(f"the input {name} is a directory, wanted a .jsonl, .csv or .txt file")
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise UsageError(f"cannot read the input {name}: {error.strerror}") from None
    return _source(name, fd, suffix=suffix, named=True)


def open_stdin(wanted: str) -> Source:
    """Standard input. UsageError where it cannot be read; wanted: what is expected there."""
    try:
        readable = fcntl.fcntl(STDIN, fcntl.F_GETFL) & os.O_ACCMODE != os.O_WRONLY
    except OSError:
        readable = False
    if not readable:
        raise UsageError(f"standard input cannot be read, wanted {wanted} there")
    # Not sys.stdin: a reader that still waits would hold its lock when the interpreter ends.
    return _source("standard input", STDIN, suffix=".jsonl", named=False)


def read_whole(stream: BinaryIO, name: str) -> bytes:
    """All of a text, which is no file of lines. UsageError where it is too long: a device may have no end."""
    text = stream.read(MAX_TEXT + 1)
    if len(text) > MAX_TEXT:
        raise UsageError(f"{name} holds more than {MAX_TEXT:,} bytes, wanted a text of at most so many")
    return text


def _source(name: str, fd: int, *, suffix: str, named: bool) -> Source:
    status = os.fstat(fd)
    size = status.st_size if named and stat.S_ISREG(status.st_mode) else None
    return Source(name, io.BufferedReader(_Raw(fd, name, size=size)), status, suffix, named)
