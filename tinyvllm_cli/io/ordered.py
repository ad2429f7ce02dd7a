"""Answers in the order of their requests: what is finished early waits for what was read before it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from tinyvllm_cli.types import Completion

MOST = 4096  # requests between the one that is waited for and the last that was taken


class Order:
    """Requests join in the order of the input, and their completions leave in it."""

    def __init__(self) -> None:
        self._waiting: deque[int] = deque()  # ids of requests that have not left
        self._finished: dict[int, Completion] = {}

    @property
    def full(self) -> bool:
        """No more than MOST completions may ever have to be held: take no more requests now."""
        return len(self._waiting) >= MOST

    def join(self, request_id: int) -> None:
        self._waiting.append(request_id)

    def finish(self, completion: Completion) -> Iterator[Completion]:
        """What may leave now that this one is finished; each is forgotten once the next is asked for."""
        self._finished[completion.request_id] = completion
        while self._waiting and self._waiting[0] in self._finished:
            yield self._finished.pop(self._waiting.popleft())

    def rest(self) -> list[Completion]:
        """What is finished and has not left, in order: for a run that ends before what was in its way is there."""
        return [self._finished[request_id] for request_id in self._waiting if request_id in self._finished]
