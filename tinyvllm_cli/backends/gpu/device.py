"""The GPU as ops see it: a stream, our kernels, the matrix library and the buffers of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from tinyvllm_cli.backends.gpu.cublas import Blas
from tinyvllm_cli.backends.gpu.driver import find_driver
from tinyvllm_cli.backends.gpu.kernels import Kernels
from tinyvllm_cli.backends.gpu.packages import require_capability, require_packages
from tinyvllm_cli.backends.gpu.streams import Stream
from tinyvllm_cli.config import DtypeName
from tinyvllm_cli.errors import DeviceError

if TYPE_CHECKING:
    from tinyvllm_cli.backends.gpu.memory import Buffers


def elem_dtype(dtype: DtypeName) -> np.dtype[Any]:
    """The 16 bits in which weights, K, V and activations are held; another dtype is a bug of the caller."""
    elem: dict[DtypeName, np.dtype[Any]] = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}
    return elem[dtype]


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU that can be used, with CUDA started on it."""

    index: int
    name: str  # as NVIDIA calls it
    compute_capability: tuple[int, int]
    total_bytes: int
    multiprocessors: int
    block_shared_bytes: int  # of shared memory, that a block of threads may have
    cuda: Any  # the module cupy_backends.cuda.api.runtime
    faults: tuple[type[Exception], ...]  # what is raised when CUDA fails: by CuPy, or by us

    def free_bytes(self) -> int:
        return int(self.cuda.memGetInfo()[0])


def open_card() -> Card:
    """The first visible GPU. DeviceError, with what mends it, where there is none or it cannot be used."""
    driver = find_driver()
    if driver is None:
        raise DeviceError("no NVIDIA device is visible: see whether `nvidia-smi` lists one")
    require_packages(driver)
    from cupy_backends.cuda.api import runtime

    try:
        index = runtime.getDevice()
        properties = runtime.getDeviceProperties(index)
        name = properties["name"].decode()
        require_capability(properties["major"], properties["minor"], name)
        runtime.memGetInfo()  # starts CUDA on the card
    except runtime.CUDARuntimeError as error:
        raise DeviceError(f"the GPU cannot be used: {error}; `nvidia-smi` shows its state and who uses it") from None
    return Card(
        index=index,
        name=name,
        compute_capability=(properties["major"], properties["minor"]),
        total_bytes=properties["totalGlobalMem"],
        multiprocessors=properties["multiProcessorCount"],
        block_shared_bytes=properties["sharedMemPerBlockOptin"],
        cuda=runtime,
        faults=(DeviceError, runtime.CUDARuntimeError),
    )


@dataclass(frozen=True, slots=True)
class Device:
    """What every op gets. All its work runs on one stream, in the order in which it is enqueued."""

    card: Card
    stream: Stream
    kernels: Kernels
    blas: Blas
    dtype: DtypeName  # of elements
    buffers: Buffers

    def launch(self, name: str, grid: tuple[int, ...], block: int, args: tuple[Any, ...], *, shared: int = 0) -> None:
        """Enqueue a kernel of cuda/; args and errors as Kernels.launch has them."""
        self.kernels.launch(name, grid, block, args, stream=self.stream, shared=shared)
