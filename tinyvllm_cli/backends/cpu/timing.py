"""The CPU's clock, its rates in NumPy, and the memory of this process."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from threadpoolctl import threadpool_limits

from tinyvllm_cli.backends.timing import Rates

READ_BYTES = 1 << 28  # much more than the caches hold
PRODUCT_SIZE = 2048
ROUNDS = 5  # of which the best counts


class CpuTiming:
    """Timing of a backend whose steps are done when they are enqueued."""

    at_once = True

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._zero = 0.0

    def restart(self) -> None:
        self._zero = time.perf_counter()

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, mark: float) -> float:
        return mark - self._zero

    def rates(self) -> Rates:
        return Rates(read_rate(self._threads), product_rate(self._threads))

    def memory_used(self) -> int:
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most << 10  # getrusage(2): bytes there, KiB on Linux

    def close(self) -> None:
        """Nothing is held."""


def read_rate(threads: int) -> float:
    """Bytes a second that sums over an array read."""
    parts = np.array_split(np.ones(READ_BYTES // 4, np.float32), threads)
    with ThreadPoolExecutor(threads) as pool:
        return READ_BYTES / _best(lambda: list(pool.map(np.sum, parts)))


def product_rate(threads: int) -> float:
    """Floating-point operations a second of a large float32 product."""
    a, b = np.random.default_rng(0).standard_normal((2, PRODUCT_SIZE, PRODUCT_SIZE), np.float32)
    with threadpool_limits(threads, "blas"):
        return 2 * PRODUCT_SIZE**3 / _best(lambda: a @ b)


def _best(work: Callable[[], object]) -> float:
    """Seconds of the quickest round."""

    def seconds() -> float:
        started = time.perf_counter()
        work()
        return time.perf_counter() - started

    return min(seconds() for _ in range(ROUNDS))
