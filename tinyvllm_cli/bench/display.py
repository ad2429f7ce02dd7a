"""What a benchmark says while it measures: a line for each part, and a bar in a trial."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from tinyvllm_cli.bench.runner import Watch, unwatched
from tinyvllm_cli.io.progress import Bar
from tinyvllm_cli.io.summary import Progress
from tinyvllm_cli.said import NO_CURSOR, warn

EVERY_S = 1.0  # a bar takes 0.4 ms to draw, of the time that is measured


class Display:
    """shown: whether somebody looks; else it is silent."""

    def __init__(self, *, shown: bool) -> None:
        self._shown = shown

    def say(self, line: str) -> None:
        if self._shown:
            warn(line)

    @contextmanager
    def bar(self, name: str, total: int | None) -> Iterator[Watch]:
        """A bar over the output tokens of a trial; total: None where it is not known. First drawn at once, before the
        trial begins: that takes longest.
        """
        if not self._shown or os.environ.get("TERM", "") in NO_CURSOR:
            yield unwatched
            return
        bar, drawn = Bar(f"{name}, output tokens"), 0.0

        def watch(tokens: int, seconds: float) -> None:
            nonlocal drawn
            if seconds - drawn >= EVERY_S:
                drawn = seconds
                bar.update(_progress(tokens, seconds, total))

        try:
            bar.update(_progress(0, 0.0, total))
            yield watch
        finally:
            bar.close()


SILENT = Display(shown=False)


def _progress(tokens: int, seconds: float, total: int | None) -> Progress:
    """Of a run that counts its tokens where another counts its requests."""
    return Progress(
        done=tokens,
        failed=0,
        total=total,
        prompt_tokens=0,
        completion_tokens=tokens,
        made_tokens=tokens,
        elapsed_s=seconds,
    )
