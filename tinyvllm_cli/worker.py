"""A thread that does one job after the other for callers who wait, and may be interrupted while they do."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

LOOK_S = 1.0  # between looks at whether the thread is still there


class EndedError(Exception):
    """There is no thread any more to do a job."""


class _Job:
    """result or error, once `done` can be had. A lock of the interpreter, that nobody shares: where an exception breaks
    into a wait for it nothing is left behind, as it can be with what threading and concurrent.futures are built of."""

    def __init__(self, do: Callable[[], Any]) -> None:
        self.do = do
        self.result: Any = None
        self.error: BaseException | None = None
        self.done = threading.Lock()
        self.done.acquire()


class Worker:
    """A daemon: it is there for exit handlers and threads that outlive the main one, and ends with the process."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()  # put() is one step of the interpreter
        self._thread = threading.Thread(target=_work, args=(self._jobs,), name="tinyvllm", daemon=True)
        self._thread.start()

    @property
    def is_current(self) -> bool:
        return threading.current_thread() is self._thread

    def do(self, job: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What the job returns or raises. EndedError where the thread has ended."""
        asked = _Job(lambda: job(*args, **kwargs))
        self._jobs.put(asked)
        while not asked.done.acquire(timeout=LOOK_S):
            if not self._thread.is_alive():
                raise EndedError
        try:
            if asked.error is not None:
                raise asked.error
            result: T = asked.result
            return result
        finally:
            del asked  # which the error holds, by this frame

    def end(self) -> None:
        """After the jobs that it was given before. Waits for nothing."""
        self._jobs.put(None)


def _work(jobs: SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        try:
            job.result = job.do()
        except BaseException as error:  # it is the caller's
            job.error = error
        job.done.release()
        del job  # what it holds is not to be held while there is nothing to do
