"""Random weights made on the GPU, where they lie; and the weights of a GPU read back, tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import closing, contextmanager
from threading import Lock

import numpy as np

from tinyvllm_cli.backends.gpu.device import Device, elem_dtype
from tinyvllm_cli.backends.gpu.loading import Uploader, places, row_bytes, upload
from tinyvllm_cli.backends.gpu.quantize import quantize_pieces
from tinyvllm_cli.config import DtypeName, ModelConfig
from tinyvllm_cli.errors import DeviceError
from tinyvllm_cli.model.parameters import Array, Parameters
from tinyvllm_cli.model.random_weights import SCALE, RandomTensors
from tinyvllm_cli.model.weights.layout import tensor_shapes
from tinyvllm_cli.model.weights.source import Array as HostArray

BLOCK = 256  # threads
ELEMS_OF_THREAD = 8


@contextmanager
def fill_random(
    parameters: Parameters, device: Device, *, config: ModelConfig, tensors: RandomTensors
) -> Iterator[None]:
    """Enqueue what load_weights would leave there: matrices by a kernel, vectors, which are few, by copies."""
    jobs = list(places(parameters, config))
    elem = elem_dtype(device.dtype)
    vectors = [job for job in jobs if job.target.dtype == np.float32]
    for job in jobs:
        number = tensors.number(job.tensor)
        if job.scales is not None:
            fill_codes(device, job.target, job.scales, tensors.seed, number)
        elif job.target.dtype == elem:
            fill_matrix(device, job.target, tensors.seed, number)
    with closing(Uploader(max(job.target.nbytes for job in vectors))) as uploader:
        for job in vectors:
            upload(job.target, tensors.read(job.tensor), elem, uploader)
    yield


def fill_codes(device: Device, target: Array, scales: Array, seed: int, tensor: int) -> None:
    """Enqueue the values of a tensor for its place, codes [n, width] with scales [n, rows of a piece], by way of a
    buffer of the step's."""
    stage, width = device.buffers.gate_up.reshape(-1), target.shape[1]
    step = stage.size // width
    for start in range(0, len(target), step):
        codes = target[start : start + step]
        pieces = stage[: codes.size].reshape(codes.shape)
        fill_matrix(device, pieces, seed, tensor, first=start)
        quantize_pieces(device, codes, scales[start : start + step], pieces, device.stream)


def fill_matrix(device: Device, target: Array, seed: int, tensor: int, *, first: int = 0) -> None:
    """Enqueue the values of a tensor for its place [n, width], or for one of its pieces from the first on."""
    rows, width = target.shape
    pitch = target.strides[0] // target.itemsize if rows > 1 else width
    blocks = -(-target.size // (BLOCK * ELEMS_OF_THREAD))
    device.launch("fill_random", (blocks,), BLOCK, (target, rows, width, pitch, seed, tensor, first, SCALE))


class DeviceTensors:
    """TensorSource over the parameters of a GPU backend, rounded to its dtype; between steps only."""

    def __init__(self, parameters: Parameters, config: ModelConfig, device: Device) -> None:
        self._device = device
        self._shapes = tensor_shapes(config)
        self._targets = {place.tensor: place.target for place in places(parameters, config)}
        self._lock = Lock()  # there is one stream for all threads that read

    @property
    def nbytes(self) -> int:
        return sum(elem_dtype(self._device.dtype).itemsize * math.prod(shape) for shape in self._shapes.values())

    def names(self) -> frozenset[str]:
        return frozenset(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def dtype(self, name: str) -> DtypeName:  # noqa: ARG002
        return self._device.dtype

    def read(self, name: str) -> HostArray:
        """DeviceError where the GPU fails."""
        target, card, stream = self._targets[name], self._device.card, self._device.stream
        host = np.empty(target.shape, target.dtype)
        rows, width = len(host), row_bytes(host)
        pitch = target.strides[0] if rows > 1 else width
        source, kind = target.data.ptr, card.cuda.memcpyDeviceToHost
        try:
            with self._lock:
                card.cuda.memcpy2DAsync(host.ctypes.data, width, source, pitch, width, rows, kind, stream.ptr)
                stream.synchronize()
        except card.faults as error:
            raise DeviceError(f"{card.name} failed: {error}") from error
        elem = elem_dtype(self._device.dtype)  # a float32 vector holds what these 16 bits would
        return host.reshape(self._shapes[name]).astype(elem, copy=False)

    def close(self) -> None:
        """The memory is the backend's."""
