"""NVIDIA's libraries through ctypes: found by cuda.pathfinder, each function declared with its arguments."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from tinyvllm_cli.backends.gpu.packages import install_command, required_packages
from tinyvllm_cli.errors import DeviceError

# Arguments of every function that is used, by name; all of them return a status (int). A function that is not in its
# table is not called: so a test without a card can look up every symbol in the library (tests/test_cuda12.py).
Signatures: TypeAlias = Mapping[str, Sequence[Any]]


def open_library(name: str, signatures: Signatures, *, keep_gil: bool = False) -> ctypes.CDLL:
    """The library called `name` by cuda.pathfinder ("nvrtc", "cublas", "cublasLt").

    DeviceError, with what mends it, where there is none, or one too old to have all the functions.
    pathfinder looks into the wheels of this environment, then conda, then the system, and loads what the library needs.
    `keep_gil`: calls keep Python's lock; without it other threads run meanwhile.
    """
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        path = load_nvidia_dynamic_lib(name).abs_path
    except (ImportError, RuntimeError, OSError):
        mend = install_command(required_packages())
        raise DeviceError(f"NVIDIA's library {name} is not installed: run `{mend}`") from None
    library = ctypes.PyDLL(path) if keep_gil else ctypes.CDLL(path)
    try:
        declare(library, signatures)
    except AttributeError as error:
        mend = install_command(required_packages())
        raise DeviceError(f"NVIDIA's library {name} is too old ({error}): run `{mend}`") from None
    return library


def declare(library: ctypes.CDLL, signatures: Signatures) -> None:
    """Give the functions their argument types: without them ctypes would cut a 64-bit pointer to an int."""
    for name, arguments in signatures.items():
        function = getattr(library, name)
        function.argtypes = list(arguments)
        function.restype = ctypes.c_int
