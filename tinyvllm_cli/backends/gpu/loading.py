"""Weights onto the GPU: read in threads, rounded into pinned memory, copied from there to their places in the arena."""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import numpy as np

from tinyvllm_cli.backends.gpu.device import Device, elem_dtype
from tinyvllm_cli.backends.gpu.memory import Arena, weight_rooms
from tinyvllm_cli.backends.gpu.pinned import PinnedRing
from tinyvllm_cli.backends.machine import available_cpus
from tinyvllm_cli.config import DtypeName, ModelConfig
from tinyvllm_cli.model.parameters import Array, Parameters, Weight, collect_parameters
from tinyvllm_cli.model.weights.layout import (
    EMBED,
    HEAD,
    INTERLEAVE,
    NORM,
    Part,
    WeightItem,
    check_tensors,
    layer_parts,
)
from tinyvllm_cli.model.weights.source import Array as HostArray
from tinyvllm_cli.model.weights.source import TensorSource

MAX_THREADS = 8
CHUNK = 4 << 20  # bytes of a copy: long enough for the full rate; two for each thread are pinned, at 0.3 ms a MB


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor of the checkpoint goes: [n, width] of a parameter, each of the n pieces in one piece of memory."""

    tensor: str
    target: Array


def allocate_parameters(config: ModelConfig, arena: Arena, dtype: DtypeName) -> Parameters:
    """Parameters that hold anything yet, in the layout of model/weights/layout.py: elem matrices, float32 vectors."""
    rooms = weight_rooms(config, dtype)
    items = (WeightItem(kind, layer, arena.take(*room)) for kind, layer, room in rooms)
    return collect_parameters(items, lambda item: _held(item.array, dtype))


def _held(array: Array, dtype: DtypeName) -> Weight | Array:
    return Weight(array, format=dtype) if array.ndim == 2 else array


def places(parameters: Parameters, config: ModelConfig) -> Iterator[Place]:
    """Every tensor that the model needs, with its place: q, k and v one after another, gate and up in turns."""
    yield Place(EMBED, parameters.embed.data)
    for index, layer in enumerate(parameters.layers):
        for part in layer_parts(config):
            held = getattr(layer, part.kind)
            array = held.data if isinstance(held, Weight) else held
            for name, target in _split(part, array):
                yield Place(f"model.layers.{index}.{name}", target)
    yield Place(NORM, parameters.final_norm[None])
    if not config.tied_head:
        yield Place(HEAD, parameters.head.data)


def _split(part: Part, array: Array) -> Iterator[tuple[str, Array]]:
    """The tensors of a part, and views of where they lie in it."""
    if part.kind.startswith("gate_up"):
        turns = array.reshape(-1, 2, INTERLEAVE * math.prod(array.shape[1:]))
        for turn, (name, _) in enumerate(part.tensors):
            yield name, turns[:, turn]
        return
    start = 0
    for name, (rows, *_) in part.tensors:
        piece = array[start : start + rows]
        yield name, piece if piece.ndim == 2 else piece[None]
        start += rows


@contextmanager
def load_weights(
    parameters: Parameters, device: Device, *, config: ModelConfig, tensors: TensorSource
) -> Iterator[None]:
    """Fill the parameters, rounded to the device's dtype, while the block runs; all is in place where it ends. What
    reading a tensor raises comes out then."""
    check_tensors(config, tensors)
    jobs = sorted(places(parameters, config), key=lambda job: -job.target.nbytes)  # no long one is left for the end
    chunk = max(max(row_bytes(job.target), min(CHUNK, job.target.size * job.target.itemsize)) for job in jobs)
    threads = min(MAX_THREADS, available_cpus(), len(jobs))
    uploaders: SimpleQueue[Uploader] = SimpleQueue()

    def load(job: Place) -> None:
        uploader = uploaders.get()
        try:
            upload(job.target, tensors.read(job.tensor), elem_dtype(device.dtype), uploader)
        finally:
            uploaders.put(uploader)

    with ExitStack() as stack:
        for _ in range(threads):
            uploaders.put(stack.enter_context(closing(Uploader(chunk))))
        pool = stack.enter_context(ThreadPoolExecutor(threads, "load"))
        futures = [pool.submit(load, job) for job in jobs]
        try:
            yield
            wait_for_weights(futures)
        finally:  # an error, or ^C: the threads end with the tensors they are at
            pool.shutdown(cancel_futures=True)


def wait_for_weights(futures: list[Future[None]]) -> None:
    """The first error of any comes out."""
    for future in as_completed(futures):
        future.result()


class Uploader:
    """Copies for one thread: a stream, and pinned memory of which one half fills while the other is copied."""

    def __init__(self, chunk: int) -> None:
        """chunk: bytes of the largest copy."""
        from cupy_backends.cuda.api import runtime

        self.chunk = chunk
        self._cuda = runtime
        self._ring = PinnedRing(runtime, 2, chunk)
        self._stream: int = runtime.streamCreateWithFlags(runtime.streamNonBlocking)

    def copy(self, target: Array, source: HostArray, elem: np.dtype[Any]) -> None:
        """Enqueue a copy of [n, width], rounded, to the n pieces of the target; together at most a chunk."""
        memory = self._ring.next()
        rows, width = len(target), row_bytes(target)
        round_into(memory.bytes[: rows * width].view(target.dtype).reshape(target.shape), source, elem)
        pitch = target.strides[0] if rows > 1 else width
        cuda = self._cuda
        cuda.memcpy2DAsync(
            target.data.ptr, pitch, memory.address, width, width, rows, cuda.memcpyHostToDevice, self._stream
        )
        memory.record(self._stream)

    def close(self) -> None:
        """Wait for all copies. What they raise comes out, once everything is given back."""
        try:
            self._cuda.streamSynchronize(self._stream)
        finally:
            self._ring.close()
            with suppress(RuntimeError):
                self._cuda.streamDestroy(self._stream)


def upload(target: Array, source: HostArray, elem: np.dtype[Any], uploader: Uploader) -> None:
    """Copy a tensor to its place [n, width], as many pieces at a time as a chunk holds."""
    pieces = source.reshape(target.shape)
    step = uploader.chunk // row_bytes(target)
    for start in range(0, len(pieces), step):
        uploader.copy(target[start : start + step], pieces[start : start + step], elem)


def round_into(out: HostArray, source: HostArray, elem: np.dtype[Any]) -> None:
    """out = source, rounded to elem whatever out's own dtype: so a float32 norm is what 16 bits would hold."""
    if source.dtype == out.dtype == elem:  # as words, for which NumPy lets go of the GIL
        out.view(np.uint16)[...] = source.view(np.uint16)
        return
    with np.errstate(over="ignore"):  # an infinity shows in the logits
        out[...] = source if out.dtype == elem else source.astype(elem)


def row_bytes(target: Array) -> int:
    """Bytes of each piece of a place."""
    return int(target.shape[1] * target.itemsize)
