"""Launches kernels by the driver's cuLaunchKernelEx (ctypes): in about 3 us, and ahead of the end of the one before.

CuPy's own launch takes 15 us and knows nothing of programmatic dependent launch, which cuda/common.cuh explains.
"""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Callable
from itertools import accumulate
from typing import Any

from tinyvllm_cli.backends.gpu.driver import error_name
from tinyvllm_cli.errors import DeviceError

# A kernel's name and parameters, with whatever stands between the name and `extern "C"`.
DEFINITION = re.compile(
    r'extern "C" __global__ void\s+(?:__launch_bounds__\((?:[^()]|\([^()]*\))*\)\s+)?(\w+)\s*\(([^)]*)\)'
)
POINTER, TENSOR_MAP = "P", "T"
# Of parameters, as the module struct has them, but for a CUtensorMap.
FORMATS = {"int": "i", "u32": "I", "i64": "q", "u64": "Q", "float": "f", "TensorMap": TENSOR_MAP}
TENSOR_MAP_BYTES = 128
# CUlaunchConfig (cuda.h): grid and block in three dimensions, bytes of shared memory, stream, attributes, how many.
CONFIG = struct.Struct("@7I P P I 4x")
PROGRAMMATIC = struct.Struct("@i 4x i 60x")  # CUlaunchAttribute: its id, 8 bytes from there its value of 64 bytes
PROGRAMMATIC_STREAM_SERIALIZATION = 6  # the id
CLUSTER = struct.Struct("@i 4x 3I 52x")  # likewise
CLUSTER_DIMENSION = 4


def parameter_formats(source: str) -> dict[str, str]:
    """Kernel -> a letter for each of its parameters, for every kernel of a .cu file. They lie at multiples of their
    sizes, as in a struct of C."""
    text = re.sub(r"//[^\n]*", "", source)
    return {name: "".join(map(_format, parameters.split(","))) for name, parameters in DEFINITION.findall(text)}


def _format(parameter: str) -> str:
    kind = " ".join(word for word in parameter.split()[:-1] if word not in ("const", "__grid_constant__"))
    return POINTER if "*" in parameter else FORMATS[kind]


def _struct_format(letters: str) -> str:
    return "@" + letters.replace(TENSOR_MAP, f"{TENSOR_MAP_BYTES}s")


def open_launch() -> Callable[..., int]:
    """The driver's call, which keeps the GIL: to give it up costs more than the call, and milliseconds where another
    thread takes it. DeviceError where the driver has no such call."""
    try:
        call: Callable[..., int] = ctypes.PyDLL("libcuda.so.1").cuLaunchKernelEx
    except (OSError, AttributeError) as error:
        raise DeviceError(f"the NVIDIA driver cannot launch kernels ({error}): update it") from None
    return call


class Launch:
    """One kernel, ready to be launched: arguments and configuration go into memory that is made once."""

    def __init__(self, call: Callable[..., int], name: str, function: int, formats: str, *, programmatic: bool) -> None:
        """call: of open_launch(). function: the CUfunction. programmatic: whether it may start before the end of the
        kernel before it, which needs a card of compute capability 9.0."""
        self._call = call
        self._name = name
        self._function = ctypes.c_void_p(function)
        self._pointers = [letter == POINTER for letter in formats]
        self._arguments = struct.Struct(_struct_format(formats))
        self._memory = ctypes.create_string_buffer(self._arguments.size)
        start = ctypes.addressof(self._memory)
        ends = (struct.calcsize(_struct_format(part)) for part in accumulate(formats))
        sizes = (struct.calcsize(_struct_format(letter)) for letter in formats)
        places = [start + end - size for end, size in zip(ends, sizes, strict=True)]
        self._places = (ctypes.c_void_p * len(places))(*places)
        # That of clusters comes first: a launch without them skips it.
        programmatic_one = PROGRAMMATIC.pack(PROGRAMMATIC_STREAM_SERIALIZATION, 1)
        self._attributes = ctypes.create_string_buffer(bytes(CLUSTER.size) + programmatic_one)
        self._programmatic = int(programmatic)
        self._config = ctypes.create_string_buffer(CONFIG.size)

    def __call__(
        self,
        grid: tuple[int, ...],
        block: int,
        args: tuple[Any, ...],
        stream: int,
        shared: int,
        cluster: tuple[int, int] = (1, 1),
    ) -> None:
        """Enqueue it; args and errors as Kernels.launch has them."""
        values = [
            (0 if arg is None else arg.data.ptr) if is_pointer else arg
            for arg, is_pointer in zip(args, self._pointers, strict=True)
        ]
        self._arguments.pack_into(self._memory, 0, *values)
        x, y, z = (*grid, 1, 1)[:3]
        attributes, count = ctypes.addressof(self._attributes) + CLUSTER.size, self._programmatic
        if cluster != (1, 1):
            CLUSTER.pack_into(self._attributes, 0, CLUSTER_DIMENSION, *cluster, 1)
            attributes, count = attributes - CLUSTER.size, count + 1
        CONFIG.pack_into(self._config, 0, x, y, z, block, 1, 1, shared, stream, attributes, count)
        status = self._call(self._config, self._function, self._places, None)
        if status:
            raise DeviceError(f"the kernel {self._name} cannot be launched: {error_name(status)}")
