"""The CPU as ops see it: products with weight matrices in the form that BLAS does best, shared among threads."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import pairwise
from typing import TypeVar

import numpy as np
from threadpoolctl import ThreadpoolController

from tinyvllm_cli.types import F32

Part = TypeVar("Part")

# On these cores OpenBLAS multiplies small matrices without packing them first. A pack reads a weight once more, and at
# few rows reading weights is all the time there is: so few rows go tile by tile through these kernels.
SMALL_KERNELS = {"SkylakeX", "Cooperlake", "SapphireRapids"}
SMALL_PRODUCT = 10**6  # multiplications up to which it uses them
TILE = 16  # weight rows of such a product
MAX_TILED_ROWS = 16  # from here on a pack pays for itself
MAX_TRANSPOSED_ROWS = 128  # the weight as left operand is the faster form up to about here
PART = 1 << 18  # weights worth a thread: to wake one takes as long as to multiply about so many with FEW rows
OUTPUT = 1 << 17  # numbers a part may produce: they are read again at once, from the cache
FEW = 32  # up to so many rows the time goes with the weights, beyond with the rows as well
RETRY = 100  # steps


class Device:
    """Threads and the products that they share. `with device.running(rows)` around a step; close() ends the threads."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._blas = ThreadpoolController().select(user_api="blas")
        self._small_kernels = any(library.get("architecture") in SMALL_KERNELS for library in self._blas.info())
        self._single_row_steps = 0
        self._seconds = {True: 0.0, False: 0.0}  # of the last step of a single row, with BLAS's threads and without
        # Infinities and NaN are no faults here: exp may overflow, broken weights give NaN logits, which are reported.
        self._pool = ThreadPoolExecutor(threads, "tinyvllm-cpu", initializer=np.seterr, initargs=("ignore",))

    def close(self) -> None:
        self._pool.shutdown()

    @contextmanager
    def running(self, rows: int) -> Iterator[None]:
        """Set BLAS's own threads for a step of so many rows; outside they are the process's again.

        They wait for work by spinning. That hands a product over in no time, which a single row needs, but makes them
        wait for each other's turn wherever other work holds a core. Several rows are shared out by run() instead,
        whose threads sleep; for a single row what was quicker of late decides. BLAS may then sum a
        row in other pieces: the float32 rounding may differ, as it may with the number of threads.
        """
        spins = rows == 1 and self._spins()
        started = time.perf_counter()
        with np.errstate(all="ignore"), self._blas.limit(limits=self._threads if spins else 1):
            yield
        if rows == 1:
            self._seconds[spins] = time.perf_counter() - started

    def _spins(self) -> bool:
        """Whether BLAS's threads help the next step of a single row; now and then the slower way is tried again."""
        self._single_row_steps += 1
        quicker = self._seconds[True] <= self._seconds[False]
        return quicker if self._single_row_steps % RETRY else not quicker

    def run(self, function: Callable[[Part], object], parts: Sequence[Part]) -> None:
        """function(part) for every part, each by whichever thread is free, this one among them."""
        left = iter(parts)

        def work() -> None:
            for part in left:
                function(part)

        others = []
        with suppress(RuntimeError):  # the main thread has ended, and the pool with it: this one does all of it
            for _ in range(min(self._threads, len(parts)) - 1):
                others.append(self._pool.submit(work))
        work()
        for other in others:
            if not other.cancel():  # it did wake up
                other.result()

    def split(self, w: F32, rows: int) -> list[slice]:
        """Slices of a weight's rows, to be multiplied with so many rows: enough for the threads worth waking."""
        threads = min(self._threads, max(1, w.size // PART * max(rows, FEW) // FEW)) if rows > 1 else 1
        parts = max(threads, len(w) * rows // OUTPUT)
        bounds = [len(w) * part // parts // TILE * TILE for part in range(parts)] + [len(w)]
        return [slice(low, high) for low, high in pairwise(bounds)]

    def multiply(self, x: F32, w: F32, out: F32 | None = None) -> F32:
        """x [R, K] times the transpose of w [N, K] in this thread: [R, N], the quickest memory order unless `out`."""
        y: F32
        if len(x) == 1:
            y = np.matmul(w, x[0], out=None if out is None else out[0])[None]
        elif not (self._small_kernels and len(x) <= MAX_TRANSPOSED_ROWS):
            y = np.matmul(x, w.T, out=out)
        else:
            tiled = len(x) <= MAX_TILED_ROWS and TILE * x.size <= SMALL_PRODUCT
            y = (_tiled(w, x) if tiled else w @ x.T).T
            if out is not None:
                out[:] = y
        return y

    def product(self, x: F32, w: F32) -> F32:
        """x [R, K] times the transpose of w [N, K]: [R, N]."""
        out = np.empty((len(x), len(w)), np.float32)
        if len(x):  # a chunk of a prompt without its last row has none for the head
            self.run(lambda part: self.multiply(x, w[part], out[:, part]), self.split(w, len(x)))
        return out


def _tiled(w: F32, x: F32) -> F32:
    """w [N, K] @ x.T, TILE rows at a time: [N, R]."""
    out = np.empty((len(w), len(x)), np.float32)
    end = len(w) // TILE * TILE
    np.matmul(w[:end].reshape(-1, TILE, w.shape[1]), x.T, out=out[:end].reshape(-1, TILE, len(x)))
    if end < len(w):
        np.matmul(w[end:], x.T, out=out[end:])
    return out
