"""The CUDA runtime without a card, under the names of CuPy's bindings: memory of the processor, streams that wait.

What is enqueued runs when somebody waits for it, and no earlier: memory that is read, reused or freed too soon shows.
Memory holds NaN until it is written. An error of the card sticks.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from tinyvllm_cli.backends.gpu.memory import ALIGNMENT

POISON = 0xFF  # of every byte: NaN as bf16, fp16 and float32
OUT_OF_MEMORY, ILLEGAL_ADDRESS = 2, 700
ERRORS = {
    OUT_OF_MEMORY: "cudaErrorMemoryAllocation: out of memory",
    ILLEGAL_ADDRESS: "cudaErrorIllegalAddress: an illegal memory access was encountered",
}


class CUDARuntimeError(RuntimeError):
    def __init__(self, status: int) -> None:
        super().__init__(ERRORS[status])
        self.status = status


class Work(NamedTuple):
    run: Callable[[], object]
    places: tuple[int, ...]  # addresses of the memory that it uses


class Queue:
    """The work of a stream, in order."""

    def __init__(self) -> None:
        self.waiting: deque[Work] = deque()
        self.done = 0

    @property
    def end(self) -> int:
        return self.done + len(self.waiting)


class Runtime:
    """What is used of cupy_backends.cuda.api.runtime. total: bytes of the card."""

    hostAllocDefault, eventDisableTiming, streamNonBlocking = 0, 2, 1
    memcpyHostToDevice, memcpyDeviceToHost, memcpyDeviceToDevice = 1, 2, 3
    CUDARuntimeError = CUDARuntimeError

    def __init__(self, total: int) -> None:
        self.total = total
        self.device_bytes = 0
        self.held: dict[int, Any] = {}  # memory by address
        self.broken = 0  # the error of every call from now on
        self.work_done = 0
        self.breaks_at = -1  # the count of work done at which the card breaks
        self._captures: dict[int, list[Work]] = {}  # of streams that are being captured
        self._graphs: dict[int, list[Work]] = {}
        self._queues: dict[int, Queue] = {}  # by stream
        self._events: dict[int, tuple[Queue, int] | None] = {}  # how much of which work to wait for

    def check(self) -> None:
        if self.broken:
            raise CUDARuntimeError(self.broken)

    # ---------------------------------------------------------------- memory

    def malloc(self, nbytes: int) -> int:
        self.check()
        if self.device_bytes + nbytes > self.total:
            raise CUDARuntimeError(OUT_OF_MEMORY)
        self.device_bytes += nbytes
        return self._take(nbytes)

    def free(self, address: int) -> None:
        self.check()
        self.device_bytes -= self._give(address)

    def hostAlloc(self, nbytes: int, flags: int) -> int:
        self.check()
        return self._take(nbytes)

    def freeHost(self, address: int) -> None:
        self.check()
        self._give(address)

    def memGetInfo(self) -> tuple[int, int]:
        self.check()
        return self.total - self.device_bytes, self.total

    def _take(self, nbytes: int) -> int:
        held = np.full(nbytes + ALIGNMENT, POISON, np.uint8)
        address = -(-held.ctypes.data // ALIGNMENT) * ALIGNMENT
        self.held[address] = held
        return address

    def _give(self, address: int) -> int:
        nbytes = len(self.held[address]) - ALIGNMENT
        used = [place for queue in self._queues.values() for work in queue.waiting for place in work.places]
        assert not any(address <= place < address + nbytes for place in used), "freed while in use"
        del self.held[address]
        return nbytes

    # ---------------------------------------------------------------- streams and events

    def streamCreateWithFlags(self, flags: int) -> int:
        stream = len(self._queues) + 1
        self._queues[stream] = Queue()
        return stream

    def streamDestroy(self, stream: int) -> None:
        self.check()

    def streamSynchronize(self, stream: int) -> None:
        self._run(self._queues[stream], self._queues[stream].end)

    def deviceSynchronize(self) -> None:
        for stream in self._queues:
            self.streamSynchronize(stream)

    def eventCreateWithFlags(self, flags: int) -> int:
        self.check()
        event = len(self._events) + 1
        self._events[event] = None
        return event

    def eventCreate(self) -> int:
        return self.eventCreateWithFlags(0)

    def eventElapsedTime(self, start: int, end: int) -> float:
        """Milliseconds: one for each thing that was done between the two."""
        (queue, before), (same, after) = self._events[start], self._events[end]
        assert queue is same and queue.done >= after, "cudaErrorNotReady"
        return float(after - before)

    def eventDestroy(self, event: int) -> None:
        self.check()

    def eventRecord(self, event: int, stream: int) -> None:
        self.check()
        self._events[event] = self._queues[stream], self._queues[stream].end

    def eventSynchronize(self, event: int) -> None:
        self.check()
        recorded = self._events[event]
        if recorded is not None:
            self._run(*recorded)

    def streamWaitEvent(self, stream: int, event: int) -> None:
        self.check()
        recorded = self._events[event]
        if recorded is not None:
            self.enqueue(stream, partial(self._run, *recorded), ())

    def streamBeginCapture(self, stream: int) -> None:
        assert stream not in self._captures
        self._captures[stream] = []

    def streamEndCapture(self, stream: int) -> int:
        self.check()
        graph = len(self._graphs) + 1
        self._graphs[graph] = self._captures.pop(stream)
        return graph

    def graphInstantiate(self, graph: int) -> int:
        self.check()
        return graph

    def graphLaunch(self, graph: int, stream: int) -> None:
        for work in self._graphs[graph]:
            self.enqueue(stream, work.run, work.places)

    def graphExecDestroy(self, graph: int) -> None:
        self.check()

    def graphDestroy(self, graph: int) -> None:
        self.check()
        self._graphs[graph] = []  # nothing of it may run any more

    def enqueue(self, stream: int, run: Callable[[], object], places: tuple[int, ...]) -> None:
        """Not CUDA's: what all that is asynchronous comes down to."""
        self.check()
        works = self._captures.get(stream, self._queues[stream].waiting)
        works.append(Work(run, places))

    def _run(self, queue: Queue, end: int) -> None:
        self.check()
        while queue.done < end:
            if self.work_done == self.breaks_at:
                self.broken = ILLEGAL_ADDRESS
            self.check()
            queue.waiting.popleft().run()
            queue.done += 1
            self.work_done += 1

    # ---------------------------------------------------------------- copies

    def memcpy(self, target: int, source: int, nbytes: int, kind: int) -> None:
        self.check()
        ctypes.memmove(target, source, nbytes)

    def memcpyAsync(self, target: int, source: int, nbytes: int, kind: int, stream: int) -> None:
        self.enqueue(stream, partial(ctypes.memmove, target, source, nbytes), (target, source))

    def memcpy2DAsync(
        self, target: int, pitch: int, source: int, source_pitch: int, width: int, rows: int, kind: int, stream: int
    ) -> None:
        assert width <= min(pitch, source_pitch), "cudaErrorInvalidPitchValue"

        def run() -> None:
            for row in range(rows):
                ctypes.memmove(target + row * pitch, source + row * source_pitch, width)

        self.enqueue(stream, run, (target, source))

    def memsetAsync(self, target: int, value: int, nbytes: int, stream: int) -> None:
        self.enqueue(stream, partial(ctypes.memset, target, value, nbytes), (target,))

    # ---------------------------------------------------------------- the card

    def getDevice(self) -> int:
        return 0

    def getDeviceProperties(self, index: int) -> dict[str, Any]:
        return {
            "name": b"Emulated", "major": 9, "minor": 0, "totalGlobalMem": self.total, "multiProcessorCount": 8,
            "sharedMemPerBlockOptin": 227 << 10,
        }  # fmt: skip

    def driverGetVersion(self) -> int:
        return 13000

    def runtimeGetVersion(self) -> int:
        return 12090
