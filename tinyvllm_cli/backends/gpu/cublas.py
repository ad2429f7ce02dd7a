"""Matrix products through our own cuBLAS and cublasLt handles (ctypes), with the same bits for a row in any batch.

CuPy's wrappers refuse stream capture and give no access to cublasLt, to the workspace or to the choice of algorithm.

**The transpose identity.** Our arrays are row-major, cuBLAS reads column-major: the memory of a row-major [r, c] array
is a column-major c x r matrix, the transpose, whose leading dimension is the row length c. So instead of

    Y[M, N] = X[M, K] @ W[N, K].T          (row-major: rows of X are tokens, rows of W are output features)

cuBLAS is asked for the transposed product D = op(A) op(B), column-major m x n with m = N, n = M, k = K:

    D = Y^T   N x M   leading dimension ld = Y.shape[1] >= N (a padded row of logits is longer than N)
    A = W's memory, column-major K x N, leading dimension K, transposed by transa = T: op(A) = W,   N x K
    B = X's memory, column-major K x M, leading dimension K, as it is (transb = N):    op(B) = X^T, K x M

Both operands are then read along K, the way they lie. C is D itself: beta = 1 adds the product to what Y holds.

**Row invariance.** An algorithm that splits K sums a row in another order than one that does not, so the bits of a row
would depend on which was picked, and that depends on the number of rows. Algorithms without split K agree with each
other on the cards where it was measured (`tinyvllm doctor` measures the card at hand), so they alone are picked, and
our own kernels have their bits too (skinny.py, medium.py); which of all is the fastest, tuning.py measures.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from typing import Any, TypeAlias

import numpy as np

from tinyvllm_cli.backends.gpu import medium, skinny
from tinyvllm_cli.backends.gpu.algorithms import Search
from tinyvllm_cli.backends.gpu.cublas_api import (
    BLAS_SIGNATURES,
    COMPUTE_32F,
    CUDA_TYPES,
    DESC_A_SCALE_MODE,
    DESC_A_SCALE_POINTER,
    DESC_B_SCALE_MODE,
    DESC_B_SCALE_POINTER,
    DESC_FAST_ACCUM,
    DESC_TRANSA,
    DISALLOW_REDUCED_PRECISION_REDUCTION,
    GEMM_DEFAULT,
    LT_SIGNATURES,
    OP_N,
    OP_T,
    SCALE_OUTER_VECTOR,
)
from tinyvllm_cli.backends.gpu.cublas_library import Library
from tinyvllm_cli.backends.gpu.kernels import Kernels
from tinyvllm_cli.backends.gpu.libraries import open_library
from tinyvllm_cli.backends.gpu.plan import ONE, ZERO, Plan, Scales
from tinyvllm_cli.errors import DeviceError

_Key: TypeAlias = tuple[Any, ...]  # of a shape, as _key makes it
_Run: TypeAlias = Callable[..., None]  # (out, a, weight, rows), and scales of codes: enqueues a product of one shape

NEEDED_BY_CODES = (
    "--dtype fp8 needs a card of compute capability 9.0 (Hopper) and cuBLAS 12.9 or later: give --dtype bfloat16"
)
# What cublasLt offers for float32 results of fewer rows, without split K, is slower than more rows: 2048 x 8192 takes
# 191 us at 1 to 64 rows and 21 us at 128 (H200, cuBLAS 13.1).
ADD_ROWS = 128
CODE_ROWS = 16  # cublasLt wants each length of a product in FP8 to be a multiple of 16
# Sums of codes stay in the tensor cores from end to end (K in order, one accumulator) in the place of being added up in
# float32 after each 128 terms. That is up to a fifth faster, and off by 0.3 % of a sum of 14,336 terms in the place of
# 0.01 %; that factors are rounded to codes is 4 % (H200, cuBLAS 13.1).
FAST_ACCUMULATION = 1


@cache  # asked for at every product
def padded_rows(rows: int, *, add: bool = False, codes: bool = False) -> int:
    """The number of rows that a product of `rows` runs on: few enough shapes that each is planned, and captured, once.

    1, 2, 4, 8, then multiples of 16 to 256, of 64 to 1024, of 256 above. A product that adds runs on ADD_ROWS at least,
    but for one of FP8 codes, which all run on CODE_ROWS at least.
    """
    rows = max(rows, CODE_ROWS if codes else ADD_ROWS if add else 1)
    if rows <= 8:
        return 1 << max(rows - 1, 0).bit_length()
    step = 16 if rows <= 256 else 64 if rows <= 1024 else 256
    return -(-rows // step) * step


class Blas:
    """Products on one stream, each by the fastest that has the common bits. Nothing is allocated or waited for in a
    product, so it may be captured."""

    @classmethod
    def create(cls, stream: Any, workspace: Any, kernels: Kernels | None = None) -> Blas:
        """Handles on a CuPy stream; `workspace`: device memory (a CuPy array of bytes, 32 MiB) for them alone;
        kernels: ours, for products of up to 256 rows; without them there is cuBLAS alone.

        DeviceError where a library is missing or refuses this driver or card.
        """
        # Products are short calls: giving the GIL away for each would hand it to any busy thread for milliseconds.
        blas = open_library("cublas", BLAS_SIGNATURES, keep_gil=True)
        lt = open_library("cublasLt", LT_SIGNATURES, keep_gil=True)
        return cls(blas, lt, stream, workspace, kernels)

    def __init__(self, blas: Any, lt: Any, stream: Any, workspace: Any, kernels: Kernels | None = None) -> None:
        self._library, self._kernels = Library(blas, lt), kernels
        self._stream, self._workspace = stream, workspace  # kept alive: the library has their addresses only
        self._tail = (
            ctypes.c_void_p(workspace.data.ptr),
            ctypes.c_size_t(workspace.nbytes),
            ctypes.c_void_p(stream.ptr),
        )
        self._counts: Counter[str] = Counter() if kernels is None else kernels.counts
        self._runs: dict[_Key, _Run] = {}
        self._own: set[_Key] = set()  # those of them that are our own kernel
        self._plans: dict[_Key, Plan | None] = {}  # None: cublasLt offers no algorithm for that shape
        try:
            self._handle = self._library.create("cublas", "_v2")
            self._lt_handle = self._library.create("cublasLt")
            self._library.call("cublasSetStream_v2", self._handle, stream.ptr)
            # After the stream: setting a stream gives the handle its own workspace back.
            self._library.call("cublasSetWorkspace_v2", self._handle, workspace.data.ptr, workspace.nbytes)
            self._library.call("cublasSetMathMode", self._handle, DISALLOW_REDUCED_PRECISION_REDUCTION)
        except DeviceError:
            self.close()
            raise

    @property
    def version(self) -> str:
        """Of cuBLAS: "13.1.0"."""
        number = ctypes.c_int()
        self._library.call("cublasGetVersion_v2", self._handle, ctypes.byref(number))
        return f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"

    def product(
        self, out: Any, a: Any, weight: Any, rows: int, *, add: bool = False, scales: Scales | None = None
    ) -> None:
        """out[:rows, :N] = a[:rows] @ weight.T, or += with `add`; sums in float32, rounded once.

        a elem [capacity, K], weight elem [N, K], out elem or float32 [capacity, ld], ld >= N, K a multiple of 8. Runs
        on padded_rows(rows, add=add) rows, which both capacities must hold: the rows past `rows` become anything.
        scales: where a and weight are e4m3 codes, f32[capacity] and f32[N] that their rows are multiplied with; then N
        and K are multiples of 16. DeviceError where cublasLt has no such product.
        """
        if rows == 0:
            return
        key = _key(out, a, weight, padded_rows(rows), add)
        run = self._runs.get(key)
        if run is None:
            run = self._runs[key] = self._plan(out, a, weight, rows, add) or partial(self.gemm_ex, add=add)
        if scales is None:
            run(out, a, weight, rows)
        else:
            run(out, a, weight, rows, scales)

    def gemm_ex(self, out: Any, a: Any, weight: Any, rows: int, *, add: bool = False) -> None:
        """The same product by cublasGemmEx, whose algorithm is the library's choice: with no promise about bits."""
        if rows == 0:
            return
        padded = padded_rows(rows, add=add)
        _check(out, a, weight, padded)
        (n, k), elem = weight.shape, CUDA_TYPES[weight.dtype.name]
        self._library.call(
            "cublasGemmEx", self._handle, OP_T, OP_N, n, padded, k,
            ONE, weight.data.ptr, elem, k, a.data.ptr, elem, k,
            ONE if add else ZERO, out.data.ptr, CUDA_TYPES[out.dtype.name], out.shape[1], COMPUTE_32F, GEMM_DEFAULT,
        )  # fmt: skip
        self._counts["cublasGemmEx"] += 1

    def num_algorithms(self, out: Any, a: Any, weight: Any, rows: int, *, add: bool = False) -> int:
        """How many algorithms without split K there are for a product; the first is the library's choice, and holds."""
        plan = self._plan(out, a, weight, rows, add)
        return 0 if plan is None else len(plan.found)

    def choose(self, index: int, out: Any, a: Any, weight: Any, rows: int, *, add: bool = False) -> None:
        """From now on cublasLt runs products of this shape, on as many padded rows, by the algorithm of this number."""
        plan = self._plan(out, a, weight, rows, add)
        assert plan is not None
        plan.choose(index)

    def offers_own(self, out: Any, a: Any, weight: Any, rows: int, *, add: bool = False) -> bool:
        """Whether a product may run by our own kernel: there is one, and an algorithm whose bits it has to have."""
        kernels = self._kernels
        has_kernel = kernels is not None and own_kernels(weight, rows).fits(kernels, out, weight, rows, add=add)
        return has_kernel and self.num_algorithms(out, a, weight, rows, add=add) > 0

    def choose_own(self, chosen: bool, out: Any, a: Any, weight: Any, rows: int, *, add: bool = False) -> None:
        """From now on products of this shape, on as many padded rows, run by our own kernel, or not."""
        key = _key(out, a, weight, padded_rows(rows), add)
        self._runs.pop(key, None)
        self._own.discard(key)
        if chosen:
            assert self._kernels is not None
            self._own.add(key)
            self._runs[key] = partial(own_kernels(weight, rows).multiply, self._kernels, self._stream, add=add)

    def is_own(self, out: Any, a: Any, weight: Any, rows: int) -> bool:
        """Whether products of this shape, on as many padded rows, run by our own kernel."""
        return _key(out, a, weight, padded_rows(rows), False) in self._own

    @property
    def fallbacks(self) -> list[tuple[int, int, int]]:
        """(rows, N, K) of the products for which cublasLt offered no algorithm without split K."""
        return [(rows, *weight) for (rows, weight, *_), plan in self._plans.items() if plan is None]

    def close(self) -> None:
        """Destroy every handle, the last first. Errors are not looked at: after a fault all of these fail."""
        self._library.close()
        self._plans.clear()
        self._runs.clear()

    def _plan(self, out: Any, a: Any, weight: Any, rows: int, add: bool) -> Plan | None:
        padded = padded_rows(rows, add=add, codes=_is_code(weight))
        key = _key(out, a, weight, padded, add)
        if key not in self._plans:
            self._plans[key] = self._make_plan(out, a, weight, padded, add)
        return self._plans[key]

    def _make_plan(self, out: Any, a: Any, weight: Any, rows: int, add: bool) -> Plan | None:
        _check(out, a, weight, rows)
        (n, k), elem = weight.shape, CUDA_TYPES[weight.dtype.name]
        desc = self._library.create("cublasLtMatmulDesc", "", COMPUTE_32F, CUDA_TYPES["float32"])
        self._library.set("cublasLtMatmulDescSetAttribute", desc, DESC_TRANSA, ctypes.c_int(OP_T))
        if _is_code(weight):
            self._scale_rows(desc)
        layouts = (
            self._library.create("cublasLtMatrixLayout", "", elem, k, n, k),
            self._library.create("cublasLtMatrixLayout", "", elem, k, rows, k),
            self._library.create("cublasLtMatrixLayout", "", CUDA_TYPES[out.dtype.name], n, rows, out.shape[1]),
        )
        search = Search(self._library, self._lt_handle, self._workspace.nbytes, (desc, *layouts))
        found = search.algorithms()
        if _is_code(weight):
            if not found:
                raise DeviceError(f"cuBLAS {self.version} has no FP8 product {rows} x {n} x {k}: {NEEDED_BY_CODES}")
            found += search.other_tiles(found[0], CUDA_TYPES[out.dtype.name])
        if not found:
            return None
        operands = (self._lt_handle, desc, *layouts, ONE if add else ZERO)
        return Plan(self._library.lt, operands, found, self._tail, self._counts)

    def _scale_rows(self, desc: int) -> None:
        """Both operands have a scale for each row. DeviceError where the library does not know of such."""
        set_attribute = partial(self._library.set, "cublasLtMatmulDescSetAttribute", desc)
        somewhere = ctypes.c_void_p(self._workspace.data.ptr)  # none is no algorithm; a product says where they are
        try:
            for mode, pointer in (
                (DESC_A_SCALE_MODE, DESC_A_SCALE_POINTER), (DESC_B_SCALE_MODE, DESC_B_SCALE_POINTER)
            ):  # fmt: skip
                set_attribute(mode, ctypes.c_int(SCALE_OUTER_VECTOR))
                set_attribute(pointer, somewhere)
            set_attribute(DESC_FAST_ACCUM, ctypes.c_int8(FAST_ACCUMULATION))
        except DeviceError:
            raise DeviceError(f"cuBLAS {self.version} is too old: {NEEDED_BY_CODES}") from None


def own_kernels(weight: Any, rows: int) -> Any:
    """The module of our own kernels for so many rows of such a weight."""
    return skinny if rows <= skinny.MAX_ROWS and not _is_code(weight) else medium


def _check(out: Any, a: Any, weight: Any, rows: int) -> None:
    """ValueError, a bug of the caller's, unless the arrays are what product() says."""
    (n, k), elem = weight.shape, weight.dtype
    fits = a.shape[1] == k and out.shape[1] >= n and min(a.shape[0], out.shape[0]) >= rows
    if _is_code(weight):
        types, lengths = out.dtype.name in ("bfloat16", "float16", "float32"), n % 16 == k % 16 == rows % 16 == 0
    else:
        types, lengths = elem.name in ("bfloat16", "float16") and out.dtype.name in (elem.name, "float32"), k % 8 == 0
    dense = all(array.flags.c_contiguous for array in (out, a, weight))
    if not (fits and types and a.dtype == elem and dense and lengths):
        shapes = ", ".join(f"{array.dtype.name} {list(array.shape)}" for array in (out, a, weight))
        raise ValueError(f"no product of {rows} rows for out, a, weight = {shapes}")


def _is_code(array: Any) -> bool:
    return bool(array.dtype == np.uint8)


def _key(out: Any, a: Any, weight: Any, padded: int, add: bool) -> _Key:
    """All that a product depends on beside the data. Not the addresses: other arrays may lie there later."""
    return (padded, weight.shape, a.shape, out.shape, weight.dtype, a.dtype, out.dtype, add)
