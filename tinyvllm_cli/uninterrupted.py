"""^C waits for what would be spoilt by it: a step of an engine, which is to be of use afterwards."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def uninterrupted() -> Iterator[None]:
    """SIGINT that comes inside takes effect at the end of the block; the second one at once, in case there is no end.

    Only the main thread gets signals; in others, and where Python does not handle SIGINT, this does nothing.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    came: list[FrameType | None] = []

    def note(signum: int, frame: FrameType | None) -> None:
        if came:
            before(signum, frame)
        came.append(frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        before(signal.SIGINT, came[0])
