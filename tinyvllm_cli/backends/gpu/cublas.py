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
other on the cards where it was measured (`tinyvllm doctor` measures the card at hand), so they alone are picked; which
of them is the fastest, tuning.py measures.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import partial
from typing import Any

from tinyvllm_cli.backends.gpu.libraries import open_library
from tinyvllm_cli.errors import DeviceError

_Handle = ctypes.c_void_p
_Out = ctypes.POINTER(ctypes.c_void_p)
_Pointer = ctypes.c_void_p
_Int = ctypes.c_int
BLAS_SIGNATURES = {  # cublas_api.h
    "cublasCreate_v2": (_Out,),
    "cublasDestroy_v2": (_Handle,),
    "cublasSetStream_v2": (_Handle, _Pointer),
    "cublasSetWorkspace_v2": (_Handle, _Pointer, ctypes.c_size_t),
    "cublasSetMathMode": (_Handle, _Int),
    "cublasGetVersion_v2": (_Handle, ctypes.POINTER(_Int)),
    "cublasGemmEx": (
        _Handle, _Int, _Int, _Int, _Int, _Int,  # transa, transb, m, n, k
        _Pointer, _Pointer, _Int, _Int, _Pointer, _Int, _Int,  # alpha, A, type, lda, B, type, ldb
        _Pointer, _Pointer, _Int, _Int, _Int, _Int,  # beta, C, type, ldc, compute type, algorithm
    ),
}  # fmt: skip
LT_SIGNATURES = {  # cublasLt.h
    "cublasLtCreate": (_Out,),
    "cublasLtDestroy": (_Handle,),
    "cublasLtMatmulDescCreate": (_Out, _Int, _Int),
    "cublasLtMatmulDescDestroy": (_Pointer,),
    "cublasLtMatmulDescSetAttribute": (_Pointer, _Int, _Pointer, ctypes.c_size_t),
    "cublasLtMatrixLayoutCreate": (_Out, _Int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64),
    "cublasLtMatrixLayoutDestroy": (_Pointer,),
    "cublasLtMatmulPreferenceCreate": (_Out,),
    "cublasLtMatmulPreferenceDestroy": (_Pointer,),
    "cublasLtMatmulPreferenceSetAttribute": (_Pointer, _Int, _Pointer, ctypes.c_size_t),
    "cublasLtMatmulAlgoGetHeuristic": (_Handle, *[_Pointer] * 6, _Int, _Pointer, ctypes.POINTER(_Int)),
    "cublasLtMatmulAlgoConfigGetAttribute": (_Pointer, _Int, _Pointer, ctypes.c_size_t, _Pointer),
    "cublasLtMatmul": (
        _Handle, _Pointer, _Pointer, _Pointer, _Pointer, _Pointer, _Pointer,  # descriptor, alpha, A, its layout, B, its
        _Pointer, _Pointer, _Pointer, _Pointer, _Pointer,  # beta, C, its layout, D, its layout
        _Pointer, _Pointer, ctypes.c_size_t, _Pointer,  # algorithm, workspace, its bytes, stream
    ),
}  # fmt: skip

# Values of the enumerations in the headers above and in library_types.h.
CUDA_TYPES = {"bfloat16": 14, "float16": 2, "float32": 0}
COMPUTE_32F = 68
OP_N, OP_T = 0, 1
GEMM_DEFAULT = -1
DISALLOW_REDUCED_PRECISION_REDUCTION = 16
DESC_TRANSA = 3
PREF_MAX_WORKSPACE_BYTES, PREF_REDUCTION_SCHEME_MASK, PREF_MIN_ALIGNMENTS = 1, 3, (5, 6, 7, 8)
REDUCTION_SCHEME_NONE = 0
ALGO_SPLITK_NUM, ALGO_REDUCTION_SCHEME = 2, 3
NOT_SUPPORTED = 15
STATUS_NAMES = {
    1: "not initialized", 3: "out of memory", 7: "invalid value", 8: "not for this architecture", 11: "mapping error",
    13: "execution failed", 14: "internal error", NOT_SUPPORTED: "not supported", 16: "licence error",
}  # fmt: skip

ALIGNMENT = 16  # bytes that every pointer and every row of the operands is a multiple of, at least
# What cublasLt offers for float32 results of fewer rows, without split K, is slower than more rows: 2048 x 8192 takes
# 191 us at 1 to 64 rows and 21 us at 128 (H200, cuBLAS 13.1).
ADD_ROWS = 128
CANDIDATES = 32  # algorithms asked for, the fastest by the library's estimate first
_ONE, _ZERO = ctypes.c_float(1), ctypes.c_float(0)  # alpha and beta: read by the library at each call, so kept here
ONE, ZERO = ctypes.addressof(_ONE), ctypes.addressof(_ZERO)


class _Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t; the algorithm stands first."""

    _fields_ = (
        ("algo", ctypes.c_uint64 * 8),
        ("workspace_size", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves_count", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@dataclass(slots=True)
class _Plan:
    """What cublasLtMatmul needs for one shape beside the data. Made once and kept: the library holds the pointers."""

    desc: int
    weight: int  # layouts
    a: int
    out: int
    beta: int
    found: list[_Heuristic]  # the algorithms there are
    algo: int  # the address of the one that is used


_UNPLANNED = _Plan(0, 0, 0, 0, 0, [], 0)


def padded_rows(rows: int, *, add: bool = False) -> int:
    """The number of rows that a product of `rows` runs on: few enough shapes that each is planned, and captured, once.

    1, 2, 4, 8, then multiples of 16 to 256, of 64 to 1024, of 256 above. A product that adds runs on ADD_ROWS at least.
    """
    rows = max(rows, ADD_ROWS) if add else rows
    if rows <= 8:
        return 1 << max(rows - 1, 0).bit_length()
    step = 16 if rows <= 256 else 64 if rows <= 1024 else 256
    return -(-rows // step) * step


class Blas:
    """cuBLAS and cublasLt on one stream. Nothing is allocated or waited for in a product, so it may be captured."""

    @classmethod
    def create(cls, stream: Any, workspace: Any) -> Blas:
        """Handles on a CuPy stream; `workspace`: device memory (a CuPy array of bytes, 32 MiB) for them alone.

        DeviceError where a library is missing or refuses this driver or card.
        """
        # Products are short calls: giving the GIL away for each would hand it to any busy thread for milliseconds.
        blas = open_library("cublas", BLAS_SIGNATURES, keep_gil=True)
        lt = open_library("cublasLt", LT_SIGNATURES, keep_gil=True)
        return cls(blas, lt, stream, workspace)

    def __init__(self, blas: Any, lt: Any, stream: Any, workspace: Any) -> None:
        self._blas, self._lt = blas, lt
        self._stream, self._workspace = stream, workspace  # kept alive: the library has their addresses only
        self._tail = (workspace.data.ptr, workspace.nbytes, stream.ptr)
        self._plans: dict[tuple[Any, ...], _Plan | None] = {}  # None: cublasLt offers no algorithm for that shape
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
        plan = self._plan(out, a, weight, rows, add)
        if plan is None:
            self.gemm_ex(out, a, weight, rows, add=add)
            return
        y = out.data.ptr
        status = self._lt.cublasLtMatmul(
            self._lt_handle, plan.desc, ONE, weight.data.ptr, plan.weight, a.data.ptr, plan.a,
            plan.beta, y, plan.out, y, plan.out, plan.algo, *self._tail,
        )  # fmt: skip
        if status:
            raise _error("cublasLtMatmul", status)

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

    def num_algorithms(self, out: Any, a: Any, weight: Any, rows: int, *, add: bool = False) -> int:
        """How many algorithms without split K there are for a product; the first is the library's choice, and holds."""
        plan = self._plan(out, a, weight, rows, add)
        return 0 if plan is None else len(plan.found)

    def choose(self, index: int, out: Any, a: Any, weight: Any, rows: int, *, add: bool = False) -> None:
        """From now on products of this shape run by the algorithm of this number."""
        plan = self._plan(out, a, weight, rows, add)
        assert plan is not None
        plan.algo = ctypes.addressof(plan.found[index])

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

    def _plan(self, out: Any, a: Any, weight: Any, rows: int, add: bool) -> _Plan | None:
        padded = padded_rows(rows, add=add)
        key = (padded, weight.shape, a.shape, out.shape, weight.dtype, a.dtype, out.dtype, add)
        plan = self._plans.get(key, _UNPLANNED)
        if plan is _UNPLANNED:
            plan = self._plans[key] = self._make_plan(out, a, weight, padded, add)
        return plan

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
        return _Plan(desc, *layouts, ONE if add else ZERO, found, ctypes.addressof(found[0])) if found else None

    def _find_algorithms(self, desc: int, weight: int, a: int, out: int) -> list[_Heuristic]:
        """The algorithms without split K, the fastest by the library's estimate first."""
        preference = self._create("cublasLtMatmulPreference")
        set_preference = partial(self._set, "cublasLtMatmulPreferenceSetAttribute", preference)
        set_preference(PREF_MAX_WORKSPACE_BYTES, ctypes.c_uint64(self._workspace.nbytes))
        set_preference(PREF_REDUCTION_SCHEME_MASK, ctypes.c_uint32(REDUCTION_SCHEME_NONE))
        for attribute in PREF_MIN_ALIGNMENTS:
            set_preference(attribute, ctypes.c_uint32(ALIGNMENT))
        results, count = (_Heuristic * CANDIDATES)(), ctypes.c_int()
        status = self._lt.cublasLtMatmulAlgoGetHeuristic(
            self._lt_handle, desc, weight, a, out, out, preference, CANDIDATES, results, ctypes.byref(count)
        )
        if status not in (0, NOT_SUPPORTED):
            raise _error("cublasLtMatmulAlgoGetHeuristic", status)
        usable = (found for found in results[: count.value] if found.state == 0 and not self._splits_k(found))
        return [_Heuristic.from_buffer_copy(found) for found in usable]

    def _splits_k(self, found: _Heuristic) -> bool:
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
            raise _error(function, status)

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


def _error(function: str, status: int) -> DeviceError:
    return DeviceError(f"{function} failed with cuBLAS status {status} ({STATUS_NAMES.get(status, 'unknown')})")
