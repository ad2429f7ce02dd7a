"""What a chat says beside its answers: lines on standard error, on a terminal divided between words and notes dim."""

from __future__ import annotations

import os
import sys
import textwrap
from contextlib import suppress

from tinyvllm_cli.said import on_terminal, printable

DIM, PLAIN = "\x1b[2m", "\x1b[0m"


def note(line: str) -> None:
    """A line for people, less bright than the answers where the terminal can do that."""
    dim = on_terminal() and not os.environ.get("NO_COLOR")
    _say(line, *((DIM, PLAIN) if dim else ()))


def complain(line: str) -> None:
    """What went wrong with a turn."""
    _say(f"error: {line}")


def _say(line: str, before: str = "", after: str = "") -> None:
    with suppress(OSError, ValueError):
        if sys.stderr is not None:
            print(f"{before}{_divided(printable(line))}{after}", file=sys.stderr, flush=True)


def _divided(line: str) -> str:
    """In rows of the terminal, where standard error is one."""
    try:
        columns = os.get_terminal_size(sys.stderr.fileno()).columns
    except (OSError, ValueError):
        return line
    return textwrap.fill(line, columns, break_long_words=False, break_on_hyphens=False) if columns else line
