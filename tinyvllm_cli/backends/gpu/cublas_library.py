"""cuBLAS and cublasLt with the objects that are made in them."""

from __future__ import annotations

import ctypes
from typing import Any

from tinyvllm_cli.backends.gpu.cublas_api import failure
from tinyvllm_cli.errors import DeviceError


class Library:
    """Every call is checked: a status other than 0 is a DeviceError."""

    def __init__(self, blas: Any, lt: Any) -> None:
        self._blas, self.lt = blas, lt
        self._made: list[tuple[str, int]] = []  # objects, each with the function that destroys it

    def create(self, kind: str, suffix: str = "", *arguments: Any) -> int:
        """A new object, destroyed by close()."""
        made = ctypes.c_void_p()
        self.call(f"{kind}Create{suffix}", ctypes.byref(made), *arguments)
        if made.value is None:
            raise DeviceError(f"{kind}Create{suffix} gave no object")
        self._made.append((f"{kind}Destroy{suffix}", made.value))
        return made.value

    def set(self, function: str, target: int, attribute: int, value: Any) -> None:
        self.call(function, target, attribute, ctypes.byref(value), ctypes.sizeof(value))

    def call(self, function: str, *arguments: Any) -> None:
        status = getattr(self._library(function), function)(*arguments)
        if status:
            raise failure(function, status)

    def close(self) -> None:
        """Destroy every object, the last first. Errors are not looked at: after a fault all of these fail."""
        while self._made:
            destroy, made = self._made.pop()
            getattr(self._library(destroy), destroy)(made)

    def _library(self, function: str) -> Any:
        return self.lt if function.startswith("cublasLt") else self._blas
