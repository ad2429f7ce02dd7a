"""The standard streams of a chat: what waits in one for its reader."""

from __future__ import annotations

import fcntl
import os
import stat
import sys
import termios
import time

from tinyvllm_cli.stdout import STDOUT

SETTLE_S = 0.1


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
