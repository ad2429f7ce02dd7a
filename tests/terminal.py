"""A terminal of the tests' own, and the process that it belongs to."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import termios
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self


class Terminal:
    """Runs a command on a terminal: its standard streams, but for those that are given. A context."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        columns: int = 80,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        **streams: Any,
    ) -> None:
        self.shown = b""  # so far
        self._leader, follower = pty.openpty()
        self.resize(columns)
        self.process = subprocess.Popen(
            command,
            # COLUMNS and LINES would count for more than the size of the terminal.
            env={
                **{n: v for n, v in os.environ.items() if n not in {"COLUMNS", "LINES"}},
                "TERM": "xterm-256color",
                **(env or {}),
            },
            cwd=cwd,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(follower, termios.TIOCSCTTY, 0),  # noqa: PLW1509  so that ^C reaches it
            **{"stdin": follower, "stdout": follower, "stderr": follower, **streams},
        )
        os.close(follower)

    def resize(self, columns: int) -> None:
        fcntl.ioctl(self._leader, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def type(self, keys: str) -> None:
        os.write(self._leader, keys.encode())

    def wait_for(self, text: str, *, within_s: float = 30.0) -> str:
        """What it shows next, up to and with `text`."""
        start, deadline = len(self.shown), time.monotonic() + within_s
        while text.encode() not in self.shown[start:]:
            assert time.monotonic() < deadline and self._read(), f"no {text!r} in {self.shown[start:]!r}"
        return self.shown[start:].decode()

    def end(self) -> tuple[int, str]:
        """The exit code, and all that was shown."""
        while self._read():
            pass
        return self.process.wait(30), self.shown.decode()

    def _read(self) -> bool:
        """False where the process has ended."""
        if not select.select([self._leader], [], [], 30)[0]:
            raise TimeoutError(f"nothing more after {self.shown[-500:]!r}")
        try:
            data = os.read(self._leader, 1 << 16)
        except OSError:  # what Linux says of a terminal without a process
            data = b""
        self.shown += data
        return bool(data)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait(30)
        os.close(self._leader)
