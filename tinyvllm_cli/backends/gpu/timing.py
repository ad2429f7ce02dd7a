"""The GPU's clock in events, its rates by our own kernels and products, and the memory in use on it."""

from __future__ import annotations

from collections.abc import Callable

from tinyvllm_cli.backends.base import Backend
from tinyvllm_cli.backends.gpu.backend import GpuBackend
from tinyvllm_cli.backends.gpu.random_weights import fill_codes, fill_matrix
from tinyvllm_cli.backends.timing import Rates
from tinyvllm_cli.errors import ModelError

READ_BLOCK, READ_PART = 256, 128 << 10  # threads, and bytes, of a block of cuda/read.cu
READ_BYTES = 4 << 30  # at most: a millisecond, and far more than the L2 cache
ROUNDS = 7  # of which the best counts


class GpuTiming:
    """Timing of a GPU backend, whose stream all marks are on. DeviceError as of the backend's own calls."""

    at_once = False

    def __init__(self, backend: GpuBackend) -> None:
        self._backend = backend
        self._device = backend._device
        self._cuda = backend._card.cuda
        self._events: list[int] = []  # made once and recorded again in every run
        self._used = 0

    def restart(self) -> None:
        with self._backend._running():
            self._device.stream.synchronize()
        self._used = 0
        self.mark()

    def mark(self) -> int:
        """The number of an event on the backend's stream; 0 is that of restart()."""
        with self._backend._running():
            if self._used == len(self._events):
                self._events.append(self._cuda.eventCreate())
            self._cuda.eventRecord(self._events[self._used], self._device.stream.ptr)
        self._used += 1
        return self._used - 1

    def seconds(self, mark: int) -> float:
        with self._backend._running():
            self._cuda.eventSynchronize(self._events[mark])
            return float(self._cuda.eventElapsedTime(self._events[0], self._events[mark])) / 1e3

    def rates(self) -> Rates:
        with self._backend._running():
            layers_rate = self._product_rate()
            if self._backend.facts.dtype == "fp8":
                return Rates(self._read_rate(), self._elem_product_rate(), layers_rate)
            return Rates(self._read_rate(), layers_rate)

    def memory_used(self) -> int:
        with self._backend._running():
            return self._backend._card.total_bytes - self._backend._card.free_bytes()

    def close(self) -> None:
        if self._backend._fault is None:  # else it is the end of the process that frees them
            for event in self._events:
                self._cuda.eventDestroy(event)
        self._events.clear()

    def _read_rate(self) -> float:
        """Bytes a second that a sum over the KV pool reads, or over the embedding where that is larger; ModelError
        where both are too small for one block."""
        arrays = (self._backend._cache.blocks, self._backend._parameters.embed.data)
        words = max(arrays, key=lambda array: array.nbytes)
        blocks = min(words.nbytes, READ_BYTES) // READ_PART
        if not blocks:
            raise ModelError(
                f"the read rate cannot be measured over {words.nbytes} bytes of KV cache or embedding, wanted at least "
                f"{READ_PART}: give more --slots, a larger --max-model-len, or a larger model"
            )
        args = (words, self._device.buffers.token_ids)  # the sum goes where the next step draws its tokens
        nbytes: int = blocks * READ_PART
        return nbytes / self._best(lambda: self._device.launch("sum_words", (blocks,), READ_BLOCK, args))

    def _product_rate(self) -> float:
        """Floating-point operations a second of all layers' products with the rows of the largest step."""
        device, layers = self._device, self._backend._parameters.layers
        rows, buffers, blas = self._backend.limits.max_batch_tokens, device.buffers, device.blas
        attended = buffers.attended if buffers.attended_codes is None else buffers.attended_codes
        # Random numbers: zeros would need less power, and so be multiplied faster than what a model has.
        for number, array in enumerate((buffers.normed, attended, buffers.activated)):
            if buffers.row_scales is None:
                fill_matrix(device, array, 0, number)
            else:
                fill_codes(device, array, buffers.row_scales[: len(array), None], 0, number)
        self._cuda.memsetAsync(buffers.x.data.ptr, 0, buffers.x.nbytes, device.stream.ptr)

        def products() -> None:
            for layer in layers:
                for out, a, weight, add in (
                    (buffers.qkv, buffers.normed, layer.qkv, False),
                    (buffers.x, attended, layer.o, True),
                    (buffers.gate_up, buffers.normed, layer.gate_up, False),
                    (buffers.x, buffers.activated, layer.down, True),
                ):
                    scales = None if weight.scale is None else (buffers.row_scales, weight.scale)
                    blas.product(out, a, weight.data, rows, add=add, scales=scales)

        weights: int = sum(
            part.data.size for layer in layers for part in (layer.qkv, layer.o, layer.gate_up, layer.down)
        )
        return 2.0 * rows * weights / self._best(products)

    def _elem_product_rate(self) -> float:
        """The same of rows of the largest step with a part of the embedding, where the layers' weights are in FP8."""
        device, embed = self._device, self._backend._parameters.embed.data
        rows, buffers, hidden = self._backend.limits.max_batch_tokens, device.buffers, int(embed.shape[1])
        weight = embed[:hidden]
        a = buffers.gate_up.reshape(-1)[: len(buffers.x) * hidden].reshape(-1, hidden)
        fill_matrix(device, a, 0, 0)
        seconds = self._best(lambda: device.blas.product(buffers.x, a, weight, rows))
        return 2.0 * rows * len(weight) * hidden / seconds

    def _best(self, work: Callable[[], None]) -> float:
        """Seconds of the device from before to after, in the quickest round after a first one."""
        work()
        found = []
        for _ in range(ROUNDS):
            self.restart()
            work()
            found.append(self.seconds(self.mark()))
        return min(found)


def open_gpu_timing(backend: Backend) -> GpuTiming:
    assert isinstance(backend, GpuBackend)
    return GpuTiming(backend)
