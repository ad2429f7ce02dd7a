"""Masks on their way to the GPU: beside the forward of their step, which may still be running."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np

from tinyvllm_cli.backends.gpu.pinned import Pinned
from tinyvllm_cli.model.parameters import Array
from tinyvllm_cli.types import I32, U32


class Masks:
    """Copies on a stream of their own into device u32[R, words], which the draws of one step after another read.

    Those of 256 rows with 128k ids are 4 MB, some 80 us on their way: as long as the draws take.
    """

    def __init__(self, cuda: Any, device: Array, copies: Any, draws: Any) -> None:
        """copies: a stream that has nothing else to do; draws: the one on which the masks are read."""
        self._cuda = cuda
        self._device = device
        self._copies = copies
        self._draws = draws
        self._memory = Pinned(cuda, device.nbytes)
        self.host: U32 = self._memory.bytes.view(np.uint32).reshape(device.shape)
        self._read: int = cuda.eventCreateWithFlags(cuda.eventDisableTiming)

    def send(self, bits: U32, rows: I32) -> None:
        """Enqueue the copy of these rows of bits u32[M, words] to the first rows of the device's masks; what the
        stream of draws gets from now on waits for it. bits: where they are the begin of `host` and all of them go in
        their order, they are not copied before, and stay until the draws are done."""
        cuda, target = self._cuda, self.host[: len(rows)]
        if bits.ctypes.data != self._memory.address or not np.array_equal(rows, np.arange(len(bits))):
            self._memory.wait()  # for the copy before, done long ago
            # Where they are rows of `host` in another order, out of which they may not be taken while it is written to.
            bits = bits.copy() if np.shares_memory(bits, target) else bits
            bits.take(rows, axis=0, out=target, mode="clip")  # in another mode NumPy would copy twice
        cuda.streamWaitEvent(self._copies.ptr, self._read)
        kind = cuda.memcpyHostToDevice
        cuda.memcpyAsync(self._device.data.ptr, self._memory.address, target.nbytes, kind, self._copies.ptr)
        self._memory.record(self._copies.ptr)
        self._memory.hold_back(self._draws.ptr)

    def were_read(self) -> None:
        """The draws that read what was sent have been enqueued: it may be overwritten behind them."""
        self._cuda.eventRecord(self._read, self._draws.ptr)

    def close(self) -> None:
        """Quiet on a card that has failed, which the process's end frees."""
        with suppress(RuntimeError):
            self._cuda.eventDestroy(self._read)
        self._memory.close()
