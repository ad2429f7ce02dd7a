"""The terminal's own handling of keys during a conversation, and the terminal left as it was."""

from __future__ import annotations

import os
import signal
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING

from tinyvllm_cli.io.source import STDIN

if TYPE_CHECKING:
    from tinyvllm_cli.cli.signals import Interrupts


class Keys:
    """Inside of quiet() keys are not shown, and wait for the next prompt: what is typed ahead neither tears an answer
    nor is lost. ^C, ^Z and ^\\ are what they were."""

    def __init__(self, interrupts: Interrupts) -> None:
        self._interrupts = interrupts
        self._usual = termios.tcgetattr(STDIN)
        self._quiet = False

    @contextmanager
    def quiet(self) -> Iterator[None]:
        before = signal.signal(signal.SIGQUIT, self._quit)
        self._set(quiet=True)
        try:
            with self._interrupts.restoring(self._restore), when_resumed(self._resumed):
                yield
        finally:
            self._set(quiet=False)
            signal.signal(signal.SIGQUIT, before)

    @contextmanager
    def usual(self) -> Iterator[None]:
        """For a program that is started inside of quiet()."""
        self._set(quiet=False)
        try:
            yield
        finally:
            self._set(quiet=True)

    def _set(self, *, quiet: bool) -> None:
        self._quiet = quiet
        settings = list(self._usual)
        if quiet:
            settings[3] &= ~(termios.ECHO | termios.ICANON)
            settings[3] |= termios.NOFLSH  # else ^C and ^Z throw away what of an answer is on its way to the screen
        with suppress(termios.error):  # it has hung up
            if not _in_background():  # there it has the settings of others, and to touch them would stop us
                termios.tcsetattr(STDIN, termios.TCSANOW, settings)

    def _restore(self) -> None:
        self._set(quiet=False)

    def _resumed(self) -> None:
        """The shell has put its own settings in force. A program inside of usual() sees to its own."""
        if self._quiet:
            self._set(quiet=True)

    def _quit(self, signum: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self._restore()
        signal.signal(signum, signal.SIG_DFL)
        signal.raise_signal(signum)


def _in_background() -> bool:
    with suppress(OSError):  # it controls no process, or has hung up
        return os.tcgetpgrp(STDIN) != os.getpgrp()
    return False


@contextmanager
def when_resumed(do: Callable[[], None]) -> Iterator[None]:
    """`do` is called when the process goes on after ^Z: in a signal handler, after what is called outside of this."""
    outer = signal.getsignal(signal.SIGCONT)

    def resumed(signum: int, frame: FrameType | None) -> None:
        if callable(outer):
            outer(signum, frame)
        do()

    signal.signal(signal.SIGCONT, resumed)
    try:
        yield
    finally:
        signal.signal(signal.SIGCONT, outer)
