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
our own kernels for few rows have their bits too (skinny.py); which of all is the fastest, tuning.py measures.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from typing import Any, TypeAlias

from tinyvllm_cli.backends.gpu import skinny
from tinyvllm_cli.backends.gpu.cublas_api import (
    ALGO_REDUCTION_SCHEME,
    ALGO_SPLITK_NUM,
    BLAS_SIGNATURES,
    COMPUTE_32F,
    CUDA_TYPES,
    DESC_TRANSA,
    DISALLOW_REDUCED_PRECISION_REDUCTION,
    GEMM_DEFAULT,
    LT_SIGNATURES,
    NOT_SUPPORTED,
    OP_N,
    OP_T,
    PREF_MAX_WORKSPACE_BYTES,
    PREF_MIN_ALIGNMENTS,
    PREF_REDUCTION_SCHEME_MASK,
    REDUCTION_SCHEME_NONE,
    Heuristic,
    failure,
)
from tinyvllm_cli.backends.gpu.kernels import Kernels
from tinyvllm_cli.backends.gpu.libraries import open_library
from tinyvllm_cli.errors import DeviceError

_Key: TypeAlias = tuple[Any, ...]  # of a shape, as _key makes it
_Run: TypeAlias = Callable[[Any, Any, Any, int], None]  # (out, a, weight, rows): enqueues a product of one shape

ALIGNMENT = 16  # bytes that every pointer and every row of the operands is a multiple of, at least
# What cublasLt offers for float32 results of fewer rows, without split K, is slower than more rows: 2048 x 8192 takes
# 191 us at 1 to 64 rows and 21 us at 128 (H200, cuBLAS 13.1).
ADD_ROWS = 128
CANDIDATES = 32  # algorithms asked for, the fastest by the library's estimate first
_ONE, _ZERO = ctypes.c_float(1), ctypes.c_float(0)  # alpha and beta: read by the library at each call, so kept here
ONE, ZERO = ctypes.addressof(_ONE), ctypes.addressof(_ZERO)


@cache  # asked for at every product
def padded_rows(rows: int, *, add: bool = False) -> int:
    """The number of rows that a product of `rows` runs on: few enough shapes that each is planned, and captured, once.

    1, 2, 4, 8, then multiples of 16 to 256, of 64 to 1024, of 256 above. A product that adds runs on ADD_ROWS at least.
    """
    rows = max(rows, ADD_ROWS) if add else rows
    if rows <= 8:
        return 1 << max(rows - 1, 0).bit_length()
    step = 16 if rows <= 256 else 64 if rows <= 1024 else 256
    return -(-rows // step) * step


class _Plan:
    """A product of one shape by cublasLt, with all that is handed over beside the data made once."""

    def __init__(
        self,
        call: Callable[..., int],
        operands: tuple[int, ...],
        found: list[Heuristic],
        tail: tuple[Any, ...],
        counts: Counter[str],
    ) -> None:
        """call: cublasLtMatmul. operands: handle, descriptor, layouts of weight, a and out, address of beta. found: the
        algorithms there are, at least one. tail: workspace, its bytes, stream."""
        self.found = found  # kept alive: the library is given the address of one
        self._call, self._counts = call, counts
        handle, desc, weight_layout, a_layout, out_layout, beta = map(ctypes.c_void_p, operands)
        one, self._weight, self._a, self._out, self._algo = map(ctypes.c_void_p, (ONE, None, None, None, None))
        self._args = (
            handle, desc, one, self._weight, weight_layout, self._a, a_layout,
            beta, self._out, out_layout, self._out, out_layout, self._algo, *tail,
        )  # fmt: skip
        self.choose(0)

    def choose(self, index: int) -> None:
        self._algo.value = ctypes.addressof(self.found[index])

    def __call__(self, out: Any, a: Any, weight: Any, rows: int) -> None:  # noqa: ARG002  as many as it was made for
        self._weight.value, self._a.value, self._out.value = weight.data.ptr, a.data.ptr, out.data.ptr
        status = self._call(*self._args)
        if status:
            raise failure("cublasLtMatmul", status)
        self._counts["cublasLt"] += 1


class Blas:
    """Products on one stream, each by the fastest that has the common bits. Nothing is allocated or waited for in a
    product, so it may be captured."""

    @classmethod
    def create(cls, stream: Any, workspace: Any, kernels: Kernels | None = None) -> Blas:
        """Handles on a CuPy stream; `workspace`: device memory (a CuPy array of bytes, 32 MiB) for them alone;
        kernels: ours, for products of few rows; without them there is cuBLAS alone.

        DeviceError where a library is missing or refuses this driver or card.
        """
        # Products are short calls: giving the GIL away for each would hand it to any busy thread for milliseconds.
        blas = open_library("cublas", BLAS_SIGNATURES, keep_gil=True)
        lt = open_library("cublasLt", LT_SIGNATURES, keep_gil=True)
        return cls(blas, lt, stream, workspace, kernels)

    def __init__(self, blas: Any, lt: Any, stream: Any, workspace: Any, kernels: Kernels | None = None) -> None:
        self._blas, self._lt, self._kernels = blas, lt, kernels
        self._stream, self._workspace = stream, workspace  # kept alive: the library has their addresses only
        self._tail = (
            ctypes.c_void_p(workspace.data.ptr),
            ctypes.c_size_t(workspace.nbytes),
            ctypes.c_void_p(stream.ptr),
        )
        self._counts: Counter[str] = Counter() if kernels is None else kernels.counts
        self._runs: dict[_Key, _Run] = {}
        self._skinny: set[_Key] = set()  # those of them that are our own kernel
        self._plans: dict[_Key, _Plan | None] = {}  # None: cublasLt offers no algorithm for that shape
        self._made: list[tuple[str, int]] = []  # objects of the library, each with the function that destroys it
        try:
            self._handle = self._create("cublas", "_v2")
            self._lt_handle = self._create("cublasLt")
            self._call("cublasSetStream_v2", self._handle, stream.ptr)
            # After the stream: setting a stream gives the handle its own workspace back.
            self._call("cublasSetWorkspace_v2", self._handle, workspace.data.ptr, workspace.nbytes)
            self._call("cublasSetMathMode", self._handle, DISALLOW_REDUCED_PRECISION_REDUCTION)
        except DeviceError:
            self.close()
            raise

    @property
    def version(self) -> str:
        """Of cuBLAS: "13.1.0"."""
        number = ctypes.c_int()
        self._call("cublasGetVersion_v2", self._handle, ctypes.byref(number))
        return f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"

    def product(self, out: Any, a: Any, weight: Any, rows: int, *, add: bool = False) -> None:
        """out[:rows, :N] = a[:rows] @ weight.T, or += with `add`; sums in float32, rounded once.

        a elem [capacity, K], weight elem [N, K], out elem or float32 [capacity, ld], ld >= N, K a multiple of 8. Runs
        on padded_rows(rows, add=add) rows, which both capacities must hold: the rows past `rows` become anything.
        """
        if rows == 0:
            return
        key = _key(out, a, weight, padded_rows(rows), add)
        run = self._runs.get(key)
        if run is None:
            run = self._runs[key] = self._plan(out, a, weight, rows, add) or partial(self.gemm_ex, add=add)
        run(out, a, weight, rows)

    def gemm_ex(self, out: Any, a: Any, weight: Any, rows: int, *, add: bool = False) -> None:
        """The same product by cublasGemmEx, whose algorithm is the library's choice: with no promise about bits."""
        if rows == 0:
            return
        padded = padded_rows(rows, add=add)
        _check(out, a, weight, padded)
        (n, k), elem = weight.shape, CUDA_TYPES[weight.dtype.name]
        self._call(
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

    def offers_skinny(self, out: Any, a: Any, weight: Any, rows: int, *, add: bool = False) -> bool:
        """Whether a product may run by our own kernel: there is one, and an algorithm whose bits it has to have."""
        has_kernel = self._kernels is not None and skinny.fits(out, rows, add=add)
        return has_kernel and self.num_algorithms(out, a, weight, rows, add=add) > 0

    def choose_skinny(self, chosen: bool, out: Any, a: Any, weight: Any, rows: int, *, add: bool = False) -> None:
        """From now on products of this shape, on as many padded rows, run by our own kernel, or not."""
        key = _key(out, a, weight, padded_rows(rows), add)
        self._runs.pop(key, None)
        self._skinny.discard(key)
        if chosen:
            assert self._kernels is not None
            self._skinny.add(key)
            self._runs[key] = partial(skinny.multiply, self._kernels, self._stream, add=add)

    def is_skinny(self, out: Any, a: Any, weight: Any, rows: int) -> bool:
        """Whether products of this shape, on as many padded rows, run by our own kernel."""
        return _key(out, a, weight, padded_rows(rows), False) in self._skinny

    @property
    def fallbacks(self) -> list[tuple[int, int, int]]:
        """(rows, N, K) of the products for which cublasLt offered no algorithm without split K."""
        return [(rows, *weight) for (rows, weight, *_), plan in self._plans.items() if plan is None]

    def close(self) -> None:
        """Destroy every handle, the last first. Errors are not looked at: after a fault all of these fail."""
        while self._made:
            destroy, made = self._made.pop()
            getattr(self._library(destroy), destroy)(made)
        self._plans.clear()
        self._runs.clear()

    def _plan(self, out: Any, a: Any, weight: Any, rows: int, add: bool) -> _Plan | None:
        padded = padded_rows(rows, add=add)
        key = _key(out, a, weight, padded, add)
        if key not in self._plans:
            self._plans[key] = self._make_plan(out, a, weight, padded, add)
        return self._plans[key]

    def _make_plan(self, out: Any, a: Any, weight: Any, rows: int, add: bool) -> _Plan | None:
        _check(out, a, weight, rows)
        (n, k), elem = weight.shape, CUDA_TYPES[weight.dtype.name]
        desc = self._create("cublasLtMatmulDesc", "", COMPUTE_32F, CUDA_TYPES["float32"])
        self._set("cublasLtMatmulDescSetAttribute", desc, DESC_TRANSA, ctypes.c_int(OP_T))
        layouts = (
            self._create("cublasLtMatrixLayout", "", elem, k, n, k),
            self._create("cublasLtMatrixLayout", "", elem, k, rows, k),
            self._create("cublasLtMatrixLayout", "", CUDA_TYPES[out.dtype.name], n, rows, out.shape[1]),
        )
        found = self._find_algorithms(desc, *layouts)
        if not found:
            return None
        operands = (self._lt_handle, desc, *layouts, ONE if add else ZERO)
        return _Plan(self._lt.cublasLtMatmul, operands, found, self._tail, self._counts)

    def _find_algorithms(self, desc: int, weight: int, a: int, out: int) -> list[Heuristic]:
        """The algorithms without split K, the fastest by the library's estimate first."""
        preference = self._create("cublasLtMatmulPreference")
        set_preference = partial(self._set, "cublasLtMatmulPreferenceSetAttribute", preference)
        set_preference(PREF_MAX_WORKSPACE_BYTES, ctypes.c_uint64(self._workspace.nbytes))
        set_preference(PREF_REDUCTION_SCHEME_MASK, ctypes.c_uint32(REDUCTION_SCHEME_NONE))
        for attribute in PREF_MIN_ALIGNMENTS:
            set_preference(attribute, ctypes.c_uint32(ALIGNMENT))
        results, count = (Heuristic * CANDIDATES)(), ctypes.c_int()
        status = self._lt.cublasLtMatmulAlgoGetHeuristic(
            self._lt_handle, desc, weight, a, out, out, preference, CANDIDATES, results, ctypes.byref(count)
        )
        if status not in (0, NOT_SUPPORTED):
            raise failure("cublasLtMatmulAlgoGetHeuristic", status)
        usable = (found for found in results[: count.value] if found.state == 0 and not self._splits_k(found))
        return [Heuristic.from_buffer_copy(found) for found in usable]

    def _splits_k(self, found: Heuristic) -> bool:
        """Whether an algorithm sums parts of K apart. The mask above should leave none; this makes sure."""
        parts, scheme, written = ctypes.c_int32(), ctypes.c_uint32(), ctypes.c_size_t()
        for attribute, value in ((ALGO_SPLITK_NUM, parts), (ALGO_REDUCTION_SCHEME, scheme)):
            self._call(
                "cublasLtMatmulAlgoConfigGetAttribute", ctypes.byref(found), attribute,
                ctypes.byref(value), ctypes.sizeof(value), ctypes.byref(written),
            )  # fmt: skip
        return parts.value > 1 or scheme.value != REDUCTION_SCHEME_NONE

    def _create(self, kind: str, suffix: str = "", *arguments: Any) -> int:
        """A new object of the library, destroyed by close()."""
        made = ctypes.c_void_p()
        self._call(f"{kind}Create{suffix}", ctypes.byref(made), *arguments)
        if made.value is None:
            raise DeviceError(f"{kind}Create{suffix} gave no object")
        self._made.append((f"{kind}Destroy{suffix}", made.value))
        return made.value

    def _set(self, function: str, target: int, attribute: int, value: Any) -> None:
        self._call(function, target, attribute, ctypes.byref(value), ctypes.sizeof(value))

    def _call(self, function: str, *arguments: Any) -> None:
        status = getattr(self._library(function), function)(*arguments)
        if status:
            raise failure(function, status)

    def _library(self, function: str) -> Any:
        return self._lt if function.startswith("cublasLt") else self._blas


def _check(out: Any, a: Any, weight: Any, rows: int) -> None:
    """ValueError, a bug of the caller's, unless the arrays are what product() says."""
    (n, k), elem = weight.shape, weight.dtype
    fits = a.shape[1] == k and out.shape[1] >= n and min(a.shape[0], out.shape[0]) >= rows
    types = elem.name in ("bfloat16", "float16") and a.dtype == elem and out.dtype.name in (elem.name, "float32")
    dense = all(array.flags.c_contiguous for array in (out, a, weight))
    if not (fits and types and dense and k % 8 == 0):
        shapes = ", ".join(f"{array.dtype.name} {list(array.shape)}" for array in (out, a, weight))
        raise ValueError(f"no product of {rows} rows for out, a, weight = {shapes}")


def _key(out: Any, a: Any, weight: Any, padded: int, add: bool) -> _Key:
    """All that a product depends on beside the data. Not the addresses: other arrays may lie there later."""
    return (padded, weight.shape, a.shape, out.shape, weight.dtype, a.dtype, out.dtype, add)
