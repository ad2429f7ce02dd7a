"""A CUDA stream, and the graphs that are captured on it."""

from __future__ import annotations

from contextlib import suppress
from typing import Any


class Graph:
    """Captured work. What it reads and writes must stay where it was."""

    def __init__(self, cuda: Any, graph: int) -> None:
        """graph: captured, and owned from now on."""
        self._cuda = cuda
        self._graph = graph
        try:
            self._executable: int = cuda.graphInstantiate(graph)
        except cuda.CUDARuntimeError:
            cuda.graphDestroy(graph)
            raise

    def launch(self, stream: Stream) -> None:
        self._cuda.graphLaunch(self._executable, stream.ptr)

    def close(self) -> None:
        """Once it runs no more. Quiet on a card that has failed, which the process's end frees."""
        with suppress(RuntimeError):
            self._cuda.graphExecDestroy(self._executable)
            self._cuda.graphDestroy(self._graph)


class Stream:
    """It waits for no other stream, the default one included, and none waits for it."""

    def __init__(self, cuda: Any) -> None:
        """cuda: the module cupy_backends.cuda.api.runtime."""
        self.cuda = cuda
        self.ptr: int = cuda.streamCreateWithFlags(cuda.streamNonBlocking)

    def synchronize(self) -> None:
        self.cuda.streamSynchronize(self.ptr)

    def begin_capture(self) -> None:
        """From now on what is enqueued is captured, and does not run."""
        self.cuda.streamBeginCapture(self.ptr)

    def end_capture(self) -> Graph:
        return Graph(self.cuda, self.cuda.streamEndCapture(self.ptr))

    def close(self) -> None:
        """As Graph.close()."""
        with suppress(RuntimeError):
            self.cuda.streamDestroy(self.ptr)
