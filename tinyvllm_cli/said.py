"""What is said to people: printable lines on standard error, whatever the names in them hold, and sizes in units."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

NO_CURSOR = {"", "dumb", "unknown"}  # what TERM is where a line cannot be drawn over; not set at all is the same


def printable(text: str) -> str:
    """Escapes what would move the cursor, end the line or be no text: names of files and models may hold it."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def warn(line: str) -> None:
    """A line on standard error, whatever has become of it: a run outlives the terminal it was started from."""
    with suppress(OSError, ValueError):
        if sys.stderr is not None:
            print(printable(line), file=sys.stderr, flush=True)


def on_terminal() -> bool:
    """Standard error is a terminal, on which a bar can be drawn."""
    return sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM", "") not in NO_CURSOR


def format_bytes(count: int) -> str:
    """Bytes for people, in decimal units: 92871040 -> '92.9 MB'."""
    value = float(count)
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if value >= 100 or unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} GB"
