"""A product of one shape by cublasLt, with all that is handed over beside the data made once."""

from __future__ import annotations

import ctypes
from collections import Counter
from typing import Any, TypeAlias

from tinyvllm_cli.backends.gpu.cublas_api import DESC_A_SCALE_POINTER, DESC_B_SCALE_POINTER, Heuristic, failure

# Of rows of a and of the weight, both f32 and one for each row, where both are in FP8.
Scales: TypeAlias = tuple[Any, Any]

_ONE, _ZERO = ctypes.c_float(1), ctypes.c_float(0)  # alpha and beta: read by the library at each call, so kept here
ONE, ZERO = ctypes.addressof(_ONE), ctypes.addressof(_ZERO)


class Plan:
    """Run it as often as there is data; choose() says by which algorithm."""

    def __init__(
        self,
        lt: Any,
        operands: tuple[int, ...],
        found: list[Heuristic],
        tail: tuple[Any, ...],
        counts: Counter[str],
    ) -> None:
        """lt: the library. operands: handle, descriptor, layouts of weight, a and out, address of beta. found: the
        algorithms there are, at least one. tail: workspace, its bytes, stream."""
        self.found = found  # kept alive: the library is given the address of one
        self._call, self._set, self._counts = lt.cublasLtMatmul, lt.cublasLtMatmulDescSetAttribute, counts
        handle, desc, weight_layout, a_layout, out_layout, beta = map(ctypes.c_void_p, operands)
        one, self._weight, self._a, self._out, self._algo = map(ctypes.c_void_p, (ONE, None, None, None, None))
        self._desc = desc
        self._pointers = {DESC_A_SCALE_POINTER: ctypes.c_void_p(), DESC_B_SCALE_POINTER: ctypes.c_void_p()}
        self._args = (
            handle, desc, one, self._weight, weight_layout, self._a, a_layout,
            beta, self._out, out_layout, self._out, out_layout, self._algo, *tail,
        )  # fmt: skip
        self.choose(0)

    def choose(self, index: int) -> None:
        self._algo.value = ctypes.addressof(self.found[index])

    def __call__(self, out: Any, a: Any, weight: Any, rows: int, scales: Scales | None = None) -> None:  # noqa: ARG002
        """On as many rows as it was made for. DeviceError where the library refuses."""
        self._weight.value, self._a.value, self._out.value = weight.data.ptr, a.data.ptr, out.data.ptr
        if scales is not None:
            of_a, of_weight = scales
            self._point(DESC_A_SCALE_POINTER, of_weight.data.ptr)  # the weight is the library's A, as cublas.py has it
            self._point(DESC_B_SCALE_POINTER, of_a.data.ptr)
        status = self._call(*self._args)
        if status:
            raise failure("cublasLtMatmul", status)
        self._counts["cublasLt"] += 1

    def _point(self, attribute: int, address: int) -> None:
        """To scales, from now on; what is enqueued has the address of its own."""
        pointer = self._pointers[attribute]
        if pointer.value != address:
            pointer.value = address
            status = self._set(self._desc, attribute, ctypes.byref(pointer), ctypes.sizeof(pointer))
            if status:
                raise failure("cublasLtMatmulDescSetAttribute", status)
