"""What a run says on standard error: a bar on a terminal, plain lines now and then anywhere else."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from tinyvllm_cli.io.summary import Progress
from tinyvllm_cli.said import on_terminal, printable, warn

if TYPE_CHECKING:
    from rich.progress import TaskID

LINE_EVERY_S = 10.0
BAR_EVERY_S = 0.25


class Display(Protocol):
    def say(self, line: str) -> None:
        """One line that stays."""
        ...

    def update(self, progress: Progress) -> None:
        """Called after every step; shows what is worth showing."""
        ...

    def close(self) -> None: ...


def make_display(*, quiet: bool, answers_on_terminal: bool) -> Display:
    """answers_on_terminal: the lines of a bar would be torn by the answers."""
    if quiet:
        return Silent()
    return Bar() if on_terminal() and not answers_on_terminal else PlainLines()


class Silent:
    def say(self, line: str) -> None: ...

    def update(self, progress: Progress) -> None: ...

    def close(self) -> None: ...


class PlainLines:
    def __init__(self, every_s: float = LINE_EVERY_S) -> None:
        self._every_s = every_s
        self._shown = time.monotonic()

    def say(self, line: str) -> None:
        warn(line)

    def update(self, progress: Progress) -> None:
        now = time.monotonic()
        if now - self._shown >= self._every_s:
            self._shown = now
            warn(progress_line(progress))

    def close(self) -> None: ...


def progress_line(progress: Progress) -> str:
    of = "" if progress.total is None else f" of {progress.total}"
    failed = f", {progress.failed} failed" if progress.failed else ""
    left = progress.seconds_left
    about = "" if left is None else f", about {duration(left)} left"
    return f"progress: {progress.done}{of} done{failed}, {progress.tokens_per_s:.1f} tokens/s{about}"


def duration(seconds: float) -> str:
    """In the two largest units."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


class Bar:
    """A rich progress bar, redrawn by the run itself: a thread would take the interpreter from the engine."""

    def __init__(self, title: str = "") -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as RichProgress

        class ShownCursor(Console):
            """Leaves the cursor as it is: a run that is killed could not bring it back."""

            def show_cursor(self, show: bool = True) -> bool:  # noqa: ARG002
                return False

        before = (TextColumn(title, markup=False),) if title else ()
        # One text, cut at its end where the terminal is narrow: how far it is comes first.
        columns = (*before, BarColumn(), TextColumn("{task.description}", markup=False))
        self._bar = RichProgress(*columns, console=ShownCursor(stderr=True), auto_refresh=False, transient=True)
        self._task: TaskID | None = None
        self._shown = 0.0

    def say(self, line: str) -> None:
        from rich.text import Text

        with suppress(OSError):
            self._bar.console.print(Text(printable(line)), soft_wrap=True)  # a Text holds no markup and no :emoji:

    def update(self, progress: Progress) -> None:
        now = time.monotonic()
        if now - self._shown < BAR_EVERY_S:
            return
        self._shown = now
        with suppress(OSError):
            if self._task is None:
                self._bar.start()
                self._task = self._bar.add_task("", total=progress.total)
            text = progress_line(progress).removeprefix("progress: ")
            self._bar.update(self._task, completed=progress.done, total=progress.total, description=text, refresh=True)

    def close(self) -> None:
        with suppress(OSError):
            self._bar.stop()
