"""CUDA graphs of decode steps: what a step of a shape enqueues is captured once, and then launched with one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

Shape: TypeAlias = tuple[int, ...]  # all that decides which kernels a step launches, with which grids and arguments

MAX_GRAPHS = 128  # each takes some hundred KB of the card; shapes that come later are enqueued kernel by kernel


class Graphs:
    """Captured steps of one stream, by shape. Steps of one shape must read and write the same addresses."""

    def __init__(self, stream: Any) -> None:
        """stream: a CuPy stream."""
        self._stream = stream
        self._graphs: dict[Shape, Any] = {}  # None: seen once

    def run(self, shape: Shape, enqueue: Callable[[], object]) -> None:
        """Enqueue a step of a shape: through enqueue() the first time, when libraries load what they need for it and
        nothing may be captured; captured the second time; replayed from then on.
        """
        if shape not in self._graphs:
            enqueue()
            if len(self._graphs) < MAX_GRAPHS:
                self._graphs[shape] = None
            return
        if self._graphs[shape] is None:
            self._graphs[shape] = self._capture(enqueue)
        self._graphs[shape].launch(self._stream)

    def _capture(self, enqueue: Callable[[], object]) -> Any:
        self._stream.begin_capture()
        try:
            enqueue()
        finally:
            graph = self._stream.end_capture()
        return graph

    def close(self) -> None:
        self._graphs.clear()
