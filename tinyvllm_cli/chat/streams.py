"""The standard streams of a chat: what is written to one, and what waits in the other."""

from __future__ import annotations

import fcntl
import os
import select
import stat
import sys
import termios
import time

from tinyvllm_cli.errors import OutputClosedError, TinyvllmError

STDOUT = 1
SETTLE_S = 0.1


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
        raise OutputError(f"cannot write to standard output: {error.strerror}") from error


def settle() -> None:
    """Let the reader of a pipe show what was written before standard error says more: both may be on one terminal."""
    if stat.S_ISFIFO(os.fstat(STDOUT).st_mode):
        deadline = time.monotonic() + SETTLE_S
        while waiting_bytes(STDOUT) and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.002)  # from its read to its write


def waiting_bytes(fd: int) -> int:
    """Bytes that could be read at once from a pipe, whichever end, or from a regular file; 0 of all else."""
    try:
        mode = os.fstat(fd).st_mode
        if not (stat.S_ISFIFO(mode) or stat.S_ISREG(mode)):
            return 0
        return int.from_bytes(fcntl.ioctl(fd, termios.FIONREAD, bytes(4)), sys.byteorder)
    except OSError:
        return 0
