"""Where a run takes its next request from, without waiting for a slow pipe while there is work to do."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Protocol

from tinyvllm_cli.io.prompts import Item

AHEAD = 64  # requests that are read ahead of a pipe's reader


class Feed(Protocol):
    """A source of requests, and of completions of lines that were refused."""

    @property
    def exhausted(self) -> bool:
        """There is nothing more, now or later. Known at the latest when pull() has found the end."""
        ...

    def pull(self, wait_s: float) -> Item | None:
        """The next item; None where there is none yet within wait_s seconds, or none at all."""
        ...


class FileFeed:
    """Items from a regular file, which never keeps anyone waiting."""

    def __init__(self, items: Iterator[Item]) -> None:
        self._items = items
        self.exhausted = False

    def pull(self, wait_s: float) -> Item | None:  # noqa: ARG002
        item = next(self._items, None)
        self.exhausted = item is None
        return item


class PipeFeed:
    """Items from a pipe or a terminal, read by a thread so that answers go out while the next line is awaited."""

    def __init__(self, items: Iterator[Item]) -> None:
        self.exhausted = False
        self._queue: queue.Queue[Item | BaseException | None] = queue.Queue(AHEAD)
        # A daemon: at the end of the run it may still wait for a line that never comes.
        threading.Thread(target=self._read, args=(items,), name="prompts", daemon=True).start()

    def pull(self, wait_s: float) -> Item | None:
        try:
            item = self._queue.get(block=wait_s > 0, timeout=wait_s or None)
        except queue.Empty:
            return None
        if isinstance(item, BaseException):
            raise item
        self.exhausted = item is None
        return item

    def _read(self, items: Iterator[Item]) -> None:
        try:
            for item in items:
                self._queue.put(item)
            self._queue.put(None)
        except BaseException as error:  # raised where the run can see it
            self._queue.put(error)
