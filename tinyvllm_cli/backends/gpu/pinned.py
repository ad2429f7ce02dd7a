"""Host memory that a GPU copies by itself, and when it may be written again."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

U8: TypeAlias = npt.NDArray[np.uint8]


class Pinned:
    """Page-locked bytes, and an event that says when the copies asked for are done: those up to the last record()."""

    def __init__(self, cuda: Any, nbytes: int) -> None:
        """cuda: the module cupy_backends.cuda.api.runtime."""
        self._cuda = cuda
        self.address: int = cuda.hostAlloc(nbytes, cuda.hostAllocDefault)
        self.bytes: U8 = np.frombuffer(memoryview((ctypes.c_uint8 * nbytes).from_address(self.address)), np.uint8)
        self._event: int = cuda.eventCreateWithFlags(cuda.eventDisableTiming)

    def record(self, stream: int) -> None:
        self._cuda.eventRecord(self._event, stream)

    def wait(self) -> None:
        """Returns at once where nothing was recorded."""
        self._cuda.eventSynchronize(self._event)

    def hold_back(self, stream: int) -> None:
        """What is enqueued there from now on waits for the copies recorded so far."""
        self._cuda.streamWaitEvent(stream, self._event)

    def close(self) -> None:
        """Nobody may touch `bytes` any more. Quiet on a card that has failed, which the process's end frees."""
        with suppress(RuntimeError):
            self._cuda.eventDestroy(self._event)
            self._cuda.freeHost(self.address)


class PinnedRing:
    """Pinned memory for one copy after another, of which several may be under way."""

    def __init__(self, cuda: Any, count: int, nbytes: int) -> None:
        self._memories = [Pinned(cuda, nbytes) for _ in range(count)]
        self._turn = 0

    def next(self) -> Pinned:
        """The memory that was used longest ago, once the copies recorded for it are done."""
        memory = self._memories[self._turn]
        self._turn = (self._turn + 1) % len(self._memories)
        memory.wait()
        return memory

    def close(self) -> None:
        for memory in self._memories:
            memory.close()
