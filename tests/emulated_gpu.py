"""A GPU for machines without one: arrays in the processor's memory, a runtime whose streams wait, kernels emulated.

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

import ml_dtypes
import numpy as np
import pytest
from cuda_emulator import EmulatedKernels
from emulated_cuda import POISON, Runtime

from tinyvllm_cli.backends.gpu import backend, cublas, device, driver, memory, packages
from tinyvllm_cli.backends.gpu.streams import Stream

# ---------------------------------------------------------------- arrays


class EmulatedArray(np.ndarray):
    """What backends/gpu/arrays.py has. Arithmetic on it, which that has not, is refused."""

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.ctypes.data)

    def get(self, stream: Stream | None = None) -> np.ndarray:
        """Waits for that stream; without one, for none of ours."""
        assert self.flags.c_contiguous, "an array with gaps"
        if stream is not None:
            stream.synchronize()
        return np.array(self)

    def set(self, values: np.ndarray, stream: Stream | None = None) -> None:
        """From pageable memory, which CUDA has read when the call returns. Without a stream: CuPy's, of the doctor."""
        assert self.flags.c_contiguous and (self.shape, self.dtype) == (values.shape, values.dtype)
        run = partial(np.copyto, self.view(np.ndarray), np.array(values))
        if stream is None:
            run()
        else:
            stream.cuda.enqueue(stream.ptr, run, (self.data.ptr,))

    def __array_ufunc__(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("arithmetic on a device array")


def emulated_array(address: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """device_array() of backends/gpu/arrays.py, over memory that may be touched."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if not size:
        return np.empty(shape, dtype).view(EmulatedArray)
    raw = np.frombuffer((ctypes.c_uint8 * size).from_address(address), np.uint8)
    return raw.view(dtype).reshape(shape).view(EmulatedArray)


def empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    return np.full(nbytes, POISON, np.uint8).view(dtype).reshape(shape).view(EmulatedArray)


def cupy_modules(runtime: Runtime) -> dict[str, ModuleType]:
    """CuPy's bindings of CUDA, and what the doctor uses of the rest."""
    contents = {
        "cupy": {"cuda": SimpleNamespace(runtime=runtime), "empty": empty},
        "cupy_backends": {},
        "cupy_backends.cuda": {},
        "cupy_backends.cuda.api": {"runtime": runtime},
    }
    modules = {name: ModuleType(name) for name in contents}
    for name, module in modules.items():
        module.__dict__.update(contents[name])
    return modules


# ---------------------------------------------------------------- kernels and products


class Kernels(EmulatedKernels):
    """A launch waits in its stream."""

    def launch(
        self, name: str, grid: tuple[int, ...], block: int, args: tuple[Any, ...], *, stream: Stream, shared: int = 0
    ) -> None:
        places = tuple(arg.data.ptr for arg in args if isinstance(arg, EmulatedArray))
        stream.cuda.enqueue(stream.ptr, self.prepare(name, grid, block, args, shared), places)


def product(
    out: np.ndarray,
    a: np.ndarray,
    weight: np.ndarray,
    rows: int,
    *,
    add: bool = False,
    scales: tuple[np.ndarray, np.ndarray] | None = None,
) -> None:
    """What Blas.product says, in NumPy, at once. Rows one by one: the sum of none depends on how many there are."""
    padded = cublas.padded_rows(rows, add=add, codes=scales is not None) if rows else 0
    cublas._check(out, a, weight, padded)
    if scales is not None:
        a, weight = (codes.view(ml_dtypes.float8_e4m3fn) for codes in (a, weight))
    terms, columns = weight.astype(np.float32), len(weight)
    with np.errstate(all="ignore"):
        for row in range(rows):
            sums = (terms * a[row].astype(np.float32)).sum(axis=1)
            if scales is not None:
                sums = sums * scales[1] * scales[0][row]
            target = out[row, :columns]
            target[:] = (target + sums if add else sums).astype(out.dtype)
    out[rows:padded, :columns] = np.nan


class Blas:
    """The Blas of backends/gpu/cublas.py. A product waits in its stream."""

    version = "13.1.0"

    def __init__(self, stream: Stream, workspace: np.ndarray, kernels: Kernels) -> None:
        self._stream, self._counts = stream, kernels.counts

    def product(
        self,
        out: np.ndarray,
        a: np.ndarray,
        weight: np.ndarray,
        rows: int,
        *,
        add: bool = False,
        scales: tuple[np.ndarray, np.ndarray] | None = None,
    ) -> None:
        arrays = (out, a, weight)
        plain = None if scales is None else tuple(scale.view(np.ndarray) for scale in scales)
        run = partial(product, *(array.view(np.ndarray) for array in arrays), rows, add=add, scales=plain)
        self._stream.cuda.enqueue(self._stream.ptr, run, tuple(array.data.ptr for array in arrays))
        self._counts["cublasLt"] += 1

    def is_own(self, *arrays: np.ndarray) -> bool:
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
        patch.setattr(backend, "is_tuned", lambda *arguments: True)  # time is the card's
        patch.setattr(backend, "recall", lambda *arguments: None)
        patch.setattr(backend, "installed_cupy", lambda: {"cupy": "14.2.0"})
        for module in (driver, device):
            patch.setattr(module, "find_driver", lambda: driver.Driver((13, 0), 1, None))
        patch.setattr(packages, "check_packages", lambda driver: ("CuPy", ""))
        patch.setattr(device, "require_packages", lambda driver: None)
        patch.setattr(memory, "WORKSPACE", memory.ALIGNMENT)
        patch.setattr(memory, "device_array", emulated_array)
        patch.setattr(
            backend, "load_kernels", lambda capability, *kind_and_cache, shared_limit: kernels(*kind_and_cache[:-1])
        )
        patch.setattr(backend, "load_nvrtc", lambda: SimpleNamespace(version=(13, 0)))
        patch.setattr(backend, "Blas", SimpleNamespace(create=make_blas))
        yield runtime
