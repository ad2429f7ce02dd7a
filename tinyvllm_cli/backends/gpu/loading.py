"""Weights onto the GPU: read in threads, rounded into pinned memory, copied from there to their places in the arena."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from itertools import repeat
from queue import SimpleQueue
from threading import Lock
from typing import Any

import numpy as np

from tinyvllm_cli.backends.gpu.device import Device, elem_dtype
from tinyvllm_cli.backends.gpu.memory import Arena, Room, weight_rooms
from tinyvllm_cli.backends.gpu.pinned import PinnedRing
from tinyvllm_cli.backends.gpu.quantize import quantize_pieces
from tinyvllm_cli.backends.gpu.streams import Stream
from tinyvllm_cli.backends.machine import available_cpus
from tinyvllm_cli.config import EngineConfig, ModelConfig
from tinyvllm_cli.model.parameters import Array, Parameters, Weight, collect_parameters
from tinyvllm_cli.model.weights.layout import (
    EMBED,
    HEAD,
    INTERLEAVE,
    NORM,
    Part,
    check_tensors,
    layer_parts,
)
from tinyvllm_cli.model.weights.source import Array as HostArray
from tinyvllm_cli.model.weights.source import TensorSource

MAX_THREADS = 8
CHUNK = 4 << 20  # bytes of a copy: long enough for the full rate; two for each thread are pinned, at 0.3 ms a MB
ALIGNED = 8  # elements of 16 bytes
LAUNCHING = Lock()  # a kernel's arguments are packed in one place, whatever thread launches it


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor of the checkpoint goes: [n, width] of a parameter, each of the n pieces in one piece of memory."""

    tensor: str
    target: Array
    scales: Array | None = None  # f32[n, rows of a piece] where the target has codes: of each row of the tensor

    def row_bytes(self, elem: np.dtype[Any]) -> int:
        """Of each piece, as it is uploaded."""
        return row_bytes(self.target) if self.scales is None else int(self.target.shape[1]) * elem.itemsize


@dataclass(frozen=True, slots=True)
class _Held:
    """An item of collect_parameters, already as the backend holds it."""

    kind: str
    layer: int | None
    array: Any  # a Weight, or a vector


def allocate_parameters(config: ModelConfig, arena: Arena, engine: EngineConfig) -> Parameters:
    """Parameters that hold anything yet, in the layout of model/weights/layout.py: matrices, elem or codes with their
    scales, and float32 vectors."""

    def take(kind: str, layer: int | None, rooms: tuple[Room, ...]) -> _Held:
        array, *scale = (arena.take(*room) for room in rooms)
        if scale:
            return _Held(kind, layer, Weight(array, scale[0], engine.dtype))
        return _Held(kind, layer, Weight(array, format=engine.elem) if array.ndim == 2 else array)

    return collect_parameters((take(*held) for held in weight_rooms(config, engine)), lambda item: item.array)


def places(parameters: Parameters, config: ModelConfig) -> Iterator[Place]:
    """Every tensor that the model needs, with its place: q, k and v one after another, gate and up in turns."""
    yield Place(EMBED, parameters.embed.data)
    for index, layer in enumerate(parameters.layers):
        for part in layer_parts(config):
            held = getattr(layer, part.kind)
            weight = held if isinstance(held, Weight) else Weight(held)
            scales = repeat(None) if weight.scale is None else (rows for _, rows in _split(part, weight.scale[:, None]))
            for (name, target), rows in zip(_split(part, weight.data), scales, strict=False):
                yield Place(f"model.layers.{index}.{name}", target, rows)
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
    """Fill the parameters, rounded to the device's dtype, or to codes, while the block runs, which launches nothing;
    all is in place where it ends. What reading a tensor raises comes out then."""
    check_tensors(config, tensors)
    elem = elem_dtype(device.dtype)
    jobs = sorted(places(parameters, config), key=lambda job: -job.target.nbytes)  # no long one is left for the end
    chunk = max(max(job.row_bytes(elem), min(CHUNK, len(job.target) * job.row_bytes(elem))) for job in jobs)
    stages = _stages(device, jobs, min(MAX_THREADS, available_cpus(), len(jobs)))
    uploaders: SimpleQueue[Uploader] = SimpleQueue()

    def load(job: Place) -> None:
        uploader = uploaders.get()
        try:
            if job.scales is None:
                upload(job.target, tensors.read(job.tensor), elem, uploader)
            else:
                upload_codes(job.target, job.scales, tensors.read(job.tensor), elem, uploader, device)
        finally:
            uploaders.put(uploader)

    with ExitStack() as stack:
        for stage in stages:
            uploaders.put(stack.enter_context(closing(Uploader(chunk, stage))))
        pool = stack.enter_context(ThreadPoolExecutor(len(stages), "load"))
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


def _stages(device: Device, jobs: Iterable[Place], threads: int) -> list[Array | None]:
    """For each thread a part of a buffer of the step's, from which its elements become codes; None where none do. As
    many threads as parts that hold a piece: a piece is 8 rows of a matrix, the buffer has 128 rows at least."""
    largest = max((job.target.shape[1] for job in jobs if job.scales is not None), default=0)
    if not largest:
        return [None] * threads
    memory = device.buffers.gate_up.reshape(-1)
    count = min(threads, memory.size // largest)
    size = memory.size // count // ALIGNED * ALIGNED
    return [memory[index * size : (index + 1) * size] for index in range(count)]


class Uploader:
    """Copies for one thread: a stream, and pinned memory of which one half fills while the other is copied."""

    def __init__(self, chunk: int, stage: Array | None = None) -> None:
        """chunk: bytes of the largest copy. stage: elem[.] on the device, nobody else's, for upload_codes."""
        from cupy_backends.cuda.api import runtime

        self.chunk, self.stage = chunk, stage
        self._cuda = runtime
        self._ring = PinnedRing(runtime, 2, chunk)
        self.stream = Stream(runtime)

    def copy(self, target: Array, source: HostArray, elem: np.dtype[Any]) -> None:
        """Enqueue a copy of [n, width], rounded, to the n pieces of the target; together at most a chunk."""
        memory = self._ring.next()
        rows, width = len(target), row_bytes(target)
        round_into(memory.bytes[: rows * width].view(target.dtype).reshape(target.shape), source, elem)
        pitch = target.strides[0] if rows > 1 else width
        cuda = self._cuda
        cuda.memcpy2DAsync(
            target.data.ptr, pitch, memory.address, width, width, rows, cuda.memcpyHostToDevice, self.stream.ptr
        )
        memory.record(self.stream.ptr)

    def close(self) -> None:
        """Wait for all copies. What they raise comes out, once everything is given back."""
        try:
            self.stream.synchronize()
        finally:
            self._ring.close()
            self.stream.close()


def upload(target: Array, source: HostArray, elem: np.dtype[Any], uploader: Uploader) -> None:
    """Copy a tensor to its place [n, width], as many pieces at a time as a chunk holds."""
    pieces = source.reshape(target.shape)
    step = uploader.chunk // row_bytes(target)
    for start in range(0, len(pieces), step):
        uploader.copy(target[start : start + step], pieces[start : start + step], elem)


def upload_codes(
    target: Array, scales: Array, source: HostArray, elem: np.dtype[Any], uploader: Uploader, device: Device
) -> None:
    """Likewise to codes [n, width] and scales [n, rows of a piece], by way of the uploader's stage."""
    assert uploader.stage is not None
    pieces, width = source.reshape(target.shape), target.shape[1]
    step = min(uploader.chunk // (width * elem.itemsize), uploader.stage.size // width)
    for start in range(0, len(pieces), step):
        part = slice(start, start + step)
        stage = uploader.stage[: pieces[part].size].reshape(pieces[part].shape)
        uploader.copy(stage, pieces[part], elem)
        with LAUNCHING:
            quantize_pieces(device, target[part], scales[part], stage, uploader.stream)


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
