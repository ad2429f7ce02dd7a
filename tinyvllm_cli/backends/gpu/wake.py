"""Starts CUDA on a thread while Python still imports: that takes a quarter of a second, and not the interpreter."""

from __future__ import annotations

import ctypes
import threading
from contextlib import suppress
from functools import cache


@cache
def wake_gpu(backend: str) -> None:
    """Begin to make the context of the first card, unless the CPU is asked for by name. Who needs it waits in CUDA's
    own calls, and is told there what goes wrong."""
    if backend != "cpu":
        # Not a daemon: a process may not end while the driver starts.
        threading.Thread(target=_make_context, name="cuda").start()


def _make_context() -> None:
    """The one that CUDA's runtime uses too; it is kept until the process ends."""
    with suppress(OSError, AttributeError):  # there is no driver, or none that can be used
        cuda = ctypes.CDLL("libcuda.so.1")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        if not (cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), 0)):
            cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
