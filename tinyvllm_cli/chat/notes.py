"""What a chat says beside its answers: lines on standard error, dim on a terminal."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

from tinyvllm_cli.said import on_terminal, printable, warn

DIM, PLAIN = "\x1b[2m", "\x1b[0m"


def note(line: str) -> None:
    """A line for people, less bright than the answers where the terminal can do that."""
    if not on_terminal() or os.environ.get("NO_COLOR"):
        warn(line)
        return
    with suppress(OSError, ValueError):
        print(f"{DIM}{printable(line)}{PLAIN}", file=sys.stderr, flush=True)
