"""Arrays in the GPU's memory as the host sees them: where one lies, its shape and dtype, and copies of it.

CuPy's own come with all of CuPy, whose import takes longer than to read a model. Nothing is computed here.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tinyvllm_cli.backends.gpu.streams import Stream


class Pointer(NamedTuple):
    ptr: int


class DeviceArray:
    """An array over memory of the device that somebody else owns. Parts and views of it lie in the same memory.

    Its names are those of NumPy and CuPy: data.ptr is the address, strides are in bytes.
    """

    __slots__ = ("_layout", "data", "dtype", "shape", "strides")

    def __init__(self, layout: npt.NDArray[Any]) -> None:
        """layout: NumPy's idea of it, for shapes, strides and addresses; the host must not touch what is there."""
        self._layout = layout
        self.data = Pointer(layout.__array_interface__["data"][0])
        self.dtype, self.shape, self.strides = layout.dtype, layout.shape, layout.strides

    @property
    def ndim(self) -> int:
        return self._layout.ndim

    @property
    def size(self) -> int:
        return self._layout.size

    @property
    def itemsize(self) -> int:
        return self._layout.itemsize

    @property
    def nbytes(self) -> int:
        return self._layout.nbytes

    @property
    def flags(self) -> Any:
        return self._layout.flags

    def __len__(self) -> int:
        return len(self._layout)

    def __getitem__(self, places: Any) -> DeviceArray:
        """What slices, None and numbers give; with the ellipsis NumPy reads nothing, even where one element is left."""
        places = places if isinstance(places, tuple) else (places,)
        return DeviceArray(self._layout[(*places, ...)])

    def reshape(self, *shape: Any) -> DeviceArray:
        self._require_dense()
        return DeviceArray(self._layout.reshape(*shape))

    def view(self, dtype: npt.DTypeLike) -> DeviceArray:
        return DeviceArray(self._layout.view(dtype))

    def get(self, stream: Stream | None = None) -> npt.NDArray[Any]:
        """On the host, once the work of that stream is done; without one, that of none of ours."""
        self._require_dense()
        from cupy_backends.cuda.api import runtime

        if stream is not None:
            stream.synchronize()
        host = np.empty(self.shape, self.dtype)
        runtime.memcpy(host.ctypes.data, self.data.ptr, self.nbytes, runtime.memcpyDeviceToHost)
        return host

    def set(self, values: npt.NDArray[Any], stream: Stream) -> None:
        """Enqueue a copy from pageable memory, which CUDA has read when the call returns."""
        self._require_dense()
        from cupy_backends.cuda.api import runtime

        values = np.ascontiguousarray(values)
        assert (values.shape, values.dtype) == (self.shape, self.dtype), f"{values.dtype}{values.shape}"
        kind = runtime.memcpyHostToDevice
        runtime.memcpyAsync(self.data.ptr, values.ctypes.data, self.nbytes, kind, stream.ptr)

    def _require_dense(self) -> None:
        """For NumPy would make a copy, and touch what is there."""
        assert self.flags.c_contiguous, f"an array with gaps, strides {self.strides} of {self.shape}"


def device_array(address: int, shape: tuple[int, ...], dtype: npt.DTypeLike) -> DeviceArray:
    """The array that lies at an address of the device."""
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    memory = memoryview((ctypes.c_uint8 * nbytes).from_address(address))
    return DeviceArray(np.ndarray(shape, dtype, memory))
