"""A GPU for machines without one: CuPy's names over a runtime whose streams wait, and our kernels emulated.

emulated_cuda.py is the runtime, cuda_emulator.py runs the kernels; backends/gpu/ above them is the real one. Products,
which are cuBLAS's on a card, sum each row by itself, so that a row has the same bits in any batch, and leave NaN in the
rows that they pad with.
"""

from __future__ import annotations

import ctypes
import functools
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cuda_emulator import EmulatedKernels
from emulated_cuda import POISON, CUDARuntimeError, Runtime, Work

from tinyvllm_cli.backends.gpu import backend, cublas, device, driver, memory, packages

# ---------------------------------------------------------------- CuPy


class Graph:
    """Captured work; what it reads and writes must be where it was."""

    def __init__(self, runtime: Runtime, works: list[Work]) -> None:
        self.runtime, self.works = runtime, works

    def launch(self, stream: Stream) -> None:
        for work in self.works:
            self.runtime.enqueue(stream.ptr, work.run, work.places)


class Stream:
    def __init__(self, runtime: Runtime, *, non_blocking: bool) -> None:
        assert non_blocking
        self.runtime = runtime
        self.ptr = runtime.streamCreateWithFlags(runtime.streamNonBlocking)

    def synchronize(self) -> None:
        self.runtime.streamSynchronize(self.ptr)

    def begin_capture(self) -> None:
        self.runtime.streamBeginCapture(self.ptr)

    def end_capture(self) -> Graph:
        return Graph(self.runtime, self.runtime.streamEndCapture(self.ptr))


class DeviceArray(np.ndarray):
    """What is used of cupy.ndarray. Arithmetic on it would compile a kernel of CuPy's, and is refused."""

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.ctypes.data)

    def get(self, stream: Stream | None = None) -> np.ndarray:
        """Waits for that stream; without one, for none of ours."""
        assert self.flags.c_contiguous, "a copy on the device would compile a kernel"
        if stream is not None:
            stream.synchronize()
        return np.array(self)

    def set(self, values: np.ndarray, stream: Stream | None = None) -> None:
        """From pageable memory, which CUDA has read when the call returns."""
        assert self.flags.c_contiguous and (self.shape, self.dtype) == (values.shape, values.dtype)
        run = partial(np.copyto, self.view(np.ndarray), np.array(values))
        if stream is None:
            run()
        else:
            stream.runtime.enqueue(stream.ptr, run, (self.data.ptr,))

    def __array_ufunc__(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("arithmetic on a device array")


def ndarray(shape: tuple[int, ...], dtype: Any, memptr: int) -> np.ndarray:
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if not size:
        return np.empty(shape, dtype).view(DeviceArray)
    raw = np.frombuffer((ctypes.c_uint8 * size).from_address(memptr), np.uint8)
    return raw.view(dtype).reshape(shape).view(DeviceArray)


def empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    return np.full(nbytes, POISON, np.uint8).view(dtype).reshape(shape).view(DeviceArray)


def cupy_modules(runtime: Runtime) -> dict[str, ModuleType]:
    cupy, cuda = ModuleType("cupy"), ModuleType("cupy.cuda")
    cupy.__dict__.update(cuda=cuda, ndarray=ndarray, empty=empty, __version__="14.2.0")
    cuda.__dict__.update(
        runtime=runtime,
        driver=SimpleNamespace(CUDADriverError=CUDARuntimeError),
        Stream=partial(Stream, runtime),
        UnownedMemory=lambda address, nbytes, owner, index: address,
        MemoryPointer=lambda address, offset: address + offset,
    )
    return {"cupy": cupy, "cupy.cuda": cuda}


# ---------------------------------------------------------------- kernels and products


class Kernels(EmulatedKernels):
    """A launch waits in its stream."""

    def launch(
        self, name: str, grid: tuple[int, ...], block: int, args: tuple[Any, ...], *, stream: Stream, shared: int = 0
    ) -> None:
        places = tuple(arg.data.ptr for arg in args if isinstance(arg, DeviceArray))
        stream.runtime.enqueue(stream.ptr, self.prepare(name, grid, block, args, shared), places)


def product(out: np.ndarray, a: np.ndarray, weight: np.ndarray, rows: int, *, add: bool = False) -> None:
    """What Blas.product says, in NumPy, at once. Rows one by one: the sum of none depends on how many there are."""
    padded = cublas.padded_rows(rows, add=add) if rows else 0
    cublas._check(out, a, weight, padded)
    terms, columns = weight.astype(np.float32), len(weight)
    with np.errstate(all="ignore"):
        for row in range(rows):
            sums = (terms * a[row].astype(np.float32)).sum(axis=1)
            target = out[row, :columns]
            target[:] = (target + sums if add else sums).astype(out.dtype)
    out[rows:padded, :columns] = np.nan


class Blas:
    """The Blas of backends/gpu/cublas.py. A product waits in its stream."""

    version = "13.1.0"

    def __init__(self, stream: Stream, workspace: np.ndarray, kernels: Kernels) -> None:
        self._stream, self._counts = stream, kernels.counts

    def product(self, out: np.ndarray, a: np.ndarray, weight: np.ndarray, rows: int, *, add: bool = False) -> None:
        arrays = (out, a, weight)
        run = partial(product, *(array.view(np.ndarray) for array in arrays), rows, add=add)
        self._stream.runtime.enqueue(self._stream.ptr, run, tuple(array.data.ptr for array in arrays))
        self._counts["cublasLt"] += 1

    def is_skinny(self, *arrays: np.ndarray) -> bool:
        """All run as above."""
        return False

    def close(self) -> None:
        """Nothing is held."""


# ---------------------------------------------------------------- a machine with this GPU


@contextmanager
def emulated_gpu(
    runtime: Runtime | None = None, make_kernels: Callable[..., Any] = Kernels, make_blas: Callable[..., Any] = Blas
) -> Iterator[Runtime]:
    """A card, of 1 GiB where none is given, in the place of CuPy, driver, packages, kernels and matrix library.

    make_kernels(dtype, head_dim, kv_dtype), make_blas(stream, workspace, kernels).
    """
    runtime = Runtime(1 << 30) if runtime is None else runtime
    kernels = functools.cache(make_kernels)
    with pytest.MonkeyPatch.context() as patch:
        for name, module in cupy_modules(runtime).items():
            patch.setitem(sys.modules, name, module)
        patch.setattr(backend, "tune", lambda *arguments: None)  # time is the card's
        for module in (driver, device):
            patch.setattr(module, "find_driver", lambda: driver.Driver((13, 0), 1, None))
        patch.setattr(packages, "check_packages", lambda driver: ("CuPy", ""))
        patch.setattr(device, "require_packages", lambda driver: None)
        patch.setattr(memory, "WORKSPACE", memory.ALIGNMENT)
        patch.setattr(
            backend, "load_kernels", lambda capability, *kind_and_cache, shared_limit: kernels(*kind_and_cache[:-1])
        )
        patch.setattr(backend, "load_nvrtc", lambda: SimpleNamespace(version=(13, 0)))
        patch.setattr(backend, "Blas", SimpleNamespace(create=make_blas))
        yield runtime
