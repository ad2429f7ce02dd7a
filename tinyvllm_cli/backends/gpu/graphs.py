"""CUDA graphs of decode steps: what a step of a shape enqueues is captured once, and then launched with one call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from tinyvllm_cli.backends.gpu.streams import Graph, Stream

Shape: TypeAlias = tuple[int, ...]  # all that decides which kernels a step launches, with which grids and arguments

MAX_GRAPHS = 128  # each takes some hundred KB of the card; shapes that come later are enqueued kernel by kernel
OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation


@dataclass(slots=True)
class _Captured:
    graph: Graph
    launches: Counter[str]  # what one replay launches, by name
    replays: int = 0


class Graphs:
    """Captured steps of one stream, by shape. Steps of one shape must read and write the same addresses."""

    def __init__(self, stream: Stream, launched: Counter[str]) -> None:
        """launched: counts what is enqueued, by name."""
        self._cuda = stream.cuda
        self._stream = stream
        self._launched = launched
        self._seen: set[Shape] = set()
        self._graphs: dict[Shape, _Captured] = {}
        self._limit = MAX_GRAPHS

    def counts(self) -> Counter[str]:
        """What was launched so far by name, in graphs and outside; "graphs": replays."""
        total = Counter(self._launched)
        for captured in self._graphs.values():
            total["graphs"] += captured.replays
            for name, count in captured.launches.items():
                total[name] += count * captured.replays
        return +total  # without zeros

    def run(self, shape: Shape, enqueue: Callable[[], object]) -> None:
        """Enqueue a step of a shape: through enqueue() the first time, when libraries load what they need for it and
        nothing may be captured; captured the second time; replayed from then on.
        """
        captured = self._graphs.get(shape)
        if captured is not None:
            self._replay(captured)
        elif shape not in self._seen or len(self._graphs) >= self._limit or not self._captured(shape, enqueue):
            enqueue()
            self._seen.add(shape)

    def _captured(self, shape: Shape, enqueue: Callable[[], object]) -> bool:
        """Whether the step was captured and launched. Where the card has no room for a graph, no other is tried."""
        try:
            captured = self._capture(enqueue)
            self._replay(captured)
        except self._cuda.CUDARuntimeError as error:
            if error.status != OUT_OF_MEMORY:
                raise
            self._limit = len(self._graphs)
            return False
        self._graphs[shape] = captured
        return True

    def _capture(self, enqueue: Callable[[], object]) -> _Captured:
        before = self._launched.copy()
        self._stream.begin_capture()
        try:
            enqueue()
        finally:
            launches = self._launched - before
            self._launched.subtract(launches)  # captured, not launched
            graph = self._stream.end_capture()
        return _Captured(graph, launches)

    def _replay(self, captured: _Captured) -> None:
        captured.graph.launch(self._stream)
        captured.replays += 1

    def close(self) -> None:
        for captured in self._graphs.values():
            captured.graph.close()
        self._graphs.clear()
