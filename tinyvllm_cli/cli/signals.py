"""Signals: the first one ends a run in good order, the second one at once."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

GRACE_S = 10.0  # for what a signal has to wait for: a step of the model, a reader that does not read
STDERR = 2
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(BaseException):
    """A signal asked for the end. No Exception, so that nothing that handles errors stops it on its way."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.exit_code = 128 + signum


class Interrupts:
    """The signal handlers of a process that are to end it."""

    def __init__(self) -> None:
        self._received: int | None = None
        self._held: Callable[[], None] | None = None
        self._told: Callable[[], None] | None = None
        self._restore: Callable[[], None] | None = None

    def install(self) -> None:
        """SIGHUP stays ignored where it was (nohup)."""
        for signum in SIGNALS:
            if signal.getsignal(signum) is not signal.SIG_IGN:
                signal.signal(signum, self._handle)
        signal.signal(signal.SIGALRM, self._leave)

    @contextmanager
    def hold(self, told: Callable[[], None] = lambda: None) -> Iterator[None]:
        """A signal that comes inside takes effect at the end of the block, or after GRACE_S. `told` is called first."""
        self._held = told
        try:
            yield
        finally:
            self._held = None
        if self._received is not None:
            raise Interrupted(self._received)

    @contextmanager
    def tell(self, told: Callable[[], None]) -> Iterator[None]:
        """^C inside calls `told`, each time, and ends nothing. Of several, one inside the other, the inmost is told."""
        outer, self._told = self._told, told
        try:
            yield
        finally:
            self._told = outer

    @contextmanager
    def restoring(self, restore: Callable[[], None]) -> Iterator[None]:
        """`restore` is called before the process ends at once, which leaves no block in good order."""
        self._restore = restore
        try:
            yield
        finally:
            self._restore = None

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if signum == signal.SIGINT and self._told is not None:
            self._told()
            return
        if self._received is not None:
            self._leave(signum, frame)
        self._received = signum
        signal.setitimer(signal.ITIMER_REAL, GRACE_S)
        if self._held is None:
            raise Interrupted(signum)
        self._held()

    def _leave(self, signum: int, frame: FrameType | None) -> None:  # noqa: ARG002
        if self._restore is not None:
            self._restore()
        with suppress(OSError):
            # Out of the line of a progress bar; not where the terminal takes nothing (^S) and would hold us.
            if os.isatty(STDERR) and select.select([], [STDERR], [], 0)[1]:
                os.write(STDERR, b"\n")
        os._exit(128 + (self._received or signum))
