"""Asks the NVIDIA driver, without CuPy, what is visible: cheap enough to ask before anything else."""

from __future__ import annotations

import ctypes
import os
import re
from dataclasses import dataclass
from pathlib import Path

# Argument types of every driver function that is called (cuda.h); all return a CUresult.
SIGNATURES = {
    "cuInit": (ctypes.c_uint,),
    "cuDriverGetVersion": (ctypes.POINTER(ctypes.c_int),),
    "cuDeviceGetCount": (ctypes.POINTER(ctypes.c_int),),
    "cuGetErrorName": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
}
NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE


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


def _open_driver() -> ctypes.CDLL:
    """The driver's own library; OSError where it is missing, or too old to have one of the functions."""
    library = ctypes.CDLL("libcuda.so.1")
    for name, arguments in SIGNATURES.items():
        try:
            getattr(library, name).argtypes = list(arguments)
        except AttributeError:
            raise OSError(f"libcuda.so.1 has no function {name}") from None
    return library


def error_name(status: int, library: ctypes.CDLL | None = None) -> str:
    """A CUresult in the driver's words."""
    name = ctypes.c_char_p()
    (library or _open_driver()).cuGetErrorName(status, ctypes.byref(name))
    return f"CUDA error {status} ({name.value.decode()})" if name.value else f"CUDA error {status}"
