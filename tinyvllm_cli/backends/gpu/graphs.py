"""CUDA graphs of decode steps: what a step of a shape enqueues is captured once, and then launched with one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

Shape: TypeAlias = tuple[int, ...]  # all that decides which kernels a step launches, with which grids and arguments

MAX_GRAPHS = 128  # each takes some hundred KB of the card; shapes that come later are enqueued kernel by kernel
OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation


class Graphs:
    """Captured steps of one stream, by shape. Steps of one shape must read and write the same addresses."""

    def __init__(self, cuda: Any, stream: Any) -> None:
        """cuda: the module cupy.cuda.runtime; stream: a CuPy stream."""
        self._cuda = cuda
        self._stream = stream
        self._seen: set[Shape] = set()
        self._graphs: dict[Shape, Any] = {}
        self._limit = MAX_GRAPHS

    def run(self, shape: Shape, enqueue: Callable[[], object]) -> None:
        """Enqueue a step of a shape: through enqueue() the first time, when libraries load what they need for it and
        nothing may be captured; captured the second time; replayed from then on.
        """
        if shape in self._graphs:
            self._graphs[shape].launch(self._stream)
        elif shape not in self._seen or len(self._graphs) >= self._limit or not self._captured(shape, enqueue):
            enqueue()
            self._seen.add(shape)

    def _captured(self, shape: Shape, enqueue: Callable[[], object]) -> bool:
        """Whether the step was captured and launched. Where the card has no room for a graph, no other is tried."""
        try:
            graph = self._capture(enqueue)
            graph.launch(self._stream)
        except self._cuda.CUDARuntimeError as error:
            if error.status != OUT_OF_MEMORY:
                raise
            self._limit = len(self._graphs)
            return False
        self._graphs[shape] = graph
        return True

    def _capture(self, enqueue: Callable[[], object]) -> Any:
        self._stream.begin_capture()
        try:
            enqueue()
        finally:
            graph = self._stream.end_capture()
        return graph

    def close(self) -> None:
        self._graphs.clear()
