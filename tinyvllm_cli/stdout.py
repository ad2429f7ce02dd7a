"""Standard output: what cannot be written to it is an error that names it, whoever writes."""

from __future__ import annotations

import errno
import io
import os
import select
import sys

from tinyvllm_cli.errors import OutputClosedError, TinyvllmError

STDOUT = 1


class OutputError(TinyvllmError):
    """Standard output takes no more: the disk is full, or its device fails."""


def write_stdout(data: bytes) -> None:
    """All of it, at once. OutputClosedError where the reader is gone, OutputError where it cannot be written."""
    left = memoryview(data)
    try:
        while left:
            try:
                left = left[os.write(STDOUT, left) :]
            except BlockingIOError:  # a terminal or pipe that another program has set to non-blocking
                select.select([], [STDOUT], [])
    except BrokenPipeError:
        raise OutputClosedError("the reader of standard output is gone") from None
    except OSError as error:
        reason = "it is closed" if error.errno == errno.EBADF else error.strerror
        raise OutputError(f"cannot write to standard output: {reason}") from error


class _Descriptor(io.RawIOBase):
    """What lies below a text stream on standard output. It keeps nothing that would fail once more at the end."""

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return STDOUT

    def isatty(self) -> bool:
        return os.isatty(STDOUT)

    def write(self, data: bytes) -> int:  # type: ignore[override]
        write_stdout(data)
        return len(data)


def name_stdout() -> None:
    """What is printed from here on, by libraries too, goes through write_stdout(), line by line."""
    before = sys.stdout  # None where it was closed: what is printed would vanish in silence
    encoding, errors = (None, None) if before is None else (before.encoding, before.errors)
    sys.stdout = io.TextIOWrapper(_Descriptor(), encoding, errors, line_buffering=True)
