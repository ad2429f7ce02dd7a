"""The NVIDIA driver through ctypes: what is visible, cheap enough to ask before anything else, and machine code.

CuPy's own calls of it import all of CuPy, which takes longer than to read a model.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

Signatures: TypeAlias = Mapping[str, Sequence[Any]]
_Pointer, _Int = ctypes.c_void_p, ctypes.POINTER(ctypes.c_int)
# Argument types of the driver's functions that are called (cuda.h); all return a CUresult.
SIGNATURES: Signatures = {
    "cuInit": (ctypes.c_uint,),
    "cuDriverGetVersion": (_Int,),
    "cuDeviceGetCount": (_Int,),
    "cuGetErrorName": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
}
CODE_SIGNATURES: Signatures = {
    "cuModuleLoadData": (ctypes.POINTER(_Pointer), ctypes.c_char_p),
    "cuModuleGetFunction": (ctypes.POINTER(_Pointer), _Pointer, ctypes.c_char_p),
    "cuModuleUnload": (_Pointer,),
    "cuFuncGetAttribute": (_Int, ctypes.c_int, _Pointer),
    "cuFuncSetAttribute": (_Pointer, ctypes.c_int, ctypes.c_int),
}
NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
# Of a function: bytes of shared memory that it declares, and that a launch may add.
SHARED_SIZE_BYTES, MAX_DYNAMIC_SHARED_SIZE_BYTES = 1, 8


@dataclass(frozen=True, slots=True)
class Driver:
    """The NVIDIA driver of this machine."""

    cuda_version: tuple[int, int]  # the newest CUDA that it runs; (0, 0) where it could not be asked
    num_devices: int
    problem: str | None = None  # why it cannot be used although there are devices, and what to do


def find_driver() -> Driver | None:
    """The driver, or None where no NVIDIA device is visible. CUDA_VISIBLE_DEVICES is obeyed, as CUDA does."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return None
    nodes = _count_device_nodes()
    try:
        library = _open_driver()
    except OSError as error:
        mend = "install the NVIDIA driver (in a container: start it with the NVIDIA container toolkit)"
        return Driver((0, 0), nodes, f"{error}: {mend}") if nodes else None
    version, count = ctypes.c_int(), ctypes.c_int()
    library.cuDriverGetVersion(ctypes.byref(version))
    cuda_version = (version.value // 1000, version.value % 1000 // 10)
    status = library.cuInit(0) or library.cuDeviceGetCount(ctypes.byref(count))
    if status == 0:
        return Driver(cuda_version, count.value) if count.value else None
    if nodes == 0 or (status == NO_DEVICE and visible is not None):
        return None
    mend = "`nvidia-smi` says more; after an update of the driver, restart the machine"
    return Driver(cuda_version, nodes, f"{error_name(status, library)}: {mend}")


def _count_device_nodes() -> int:
    """Cards that the kernel knows, whatever the driver's library says of them: /dev/nvidia0 and so on, or WSL's dxg."""
    return sum(bool(re.fullmatch(r"nvidia\d+|dxg", path.name)) for path in Path("/dev").iterdir())


def _open_driver(signatures: Signatures = SIGNATURES) -> ctypes.CDLL:
    """The driver's own library; OSError where it is missing, or too old to have one of the functions."""
    library = ctypes.CDLL("libcuda.so.1")
    for name, arguments in signatures.items():
        try:
            getattr(library, name).argtypes = list(arguments)
        except AttributeError:
            raise OSError(f"libcuda.so.1 has no function {name}") from None
    return library


class Code:
    """Machine code in the current context. RuntimeError, in the driver's words, where a call fails."""

    def __init__(self) -> None:
        self._library = _open_driver({**SIGNATURES, **CODE_SIGNATURES})

    def load(self, binary: bytes) -> int:
        """A module of a cubin, or of PTX that ends with a zero byte."""
        return self._made("cuModuleLoadData", binary)

    def function(self, module: int, name: str) -> int:
        return self._made("cuModuleGetFunction", module, name.encode())

    def unload(self, module: int) -> None:
        self._call("cuModuleUnload", module)

    def attribute(self, function: int, attribute: int) -> int:
        value = ctypes.c_int()
        self._call("cuFuncGetAttribute", ctypes.byref(value), attribute, function)
        return value.value

    def set_attribute(self, function: int, attribute: int, value: int) -> None:
        self._call("cuFuncSetAttribute", function, attribute, value)

    def _made(self, name: str, *arguments: object) -> int:
        made = _Pointer()
        self._call(name, ctypes.byref(made), *arguments)
        return made.value or 0

    def _call(self, name: str, *arguments: object) -> None:
        if status := getattr(self._library, name)(*arguments):
            raise RuntimeError(error_name(status, self._library))


def error_name(status: int, library: ctypes.CDLL | None = None) -> str:
    """A CUresult in the driver's words."""
    name = ctypes.c_char_p()
    (library or _open_driver()).cuGetErrorName(status, ctypes.byref(name))
    return f"CUDA error {status} ({name.value.decode()})" if name.value else f"CUDA error {status}"
