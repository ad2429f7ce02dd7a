"""What is used of cuBLAS and cublasLt: functions with their arguments, values of enumerations, one structure."""

from __future__ import annotations

import ctypes

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
    "cublasLtMatmulAlgoInit": (_Handle, *[_Int] * 7, _Pointer),  # computed in, scaled in, A, B, C, D; id
    "cublasLtMatmulAlgoConfigGetAttribute": (_Pointer, _Int, _Pointer, ctypes.c_size_t, _Pointer),
    "cublasLtMatmulAlgoConfigSetAttribute": (_Pointer, _Int, _Pointer, ctypes.c_size_t),
    "cublasLtMatmulAlgoCheck": (_Handle, *[_Pointer] * 7),
    "cublasLtMatmul": (
        _Handle, _Pointer, _Pointer, _Pointer, _Pointer, _Pointer, _Pointer,  # descriptor, alpha, A, its layout, B, its
        _Pointer, _Pointer, _Pointer, _Pointer, _Pointer,  # beta, C, its layout, D, its layout
        _Pointer, _Pointer, ctypes.c_size_t, _Pointer,  # algorithm, workspace, its bytes, stream
    ),
}  # fmt: skip

# Values of the enumerations in the headers above and in library_types.h.
CUDA_TYPES = {"bfloat16": 14, "float16": 2, "float32": 0, "uint8": 28}  # uint8: codes of e4m3
COMPUTE_32F = 68
OP_N, OP_T = 0, 1
GEMM_DEFAULT = -1
DISALLOW_REDUCED_PRECISION_REDUCTION = 16
DESC_TRANSA = 3
DESC_A_SCALE_POINTER, DESC_B_SCALE_POINTER, DESC_FAST_ACCUM = 17, 18, 25
DESC_A_SCALE_MODE, DESC_B_SCALE_MODE = 31, 32  # from cuBLAS 12.9 on
SCALE_OUTER_VECTOR = 3  # float32, one for each row of the operands as we have them
PREF_MAX_WORKSPACE_BYTES, PREF_REDUCTION_SCHEME_MASK, PREF_MIN_ALIGNMENTS = 1, 3, (5, 6, 7, 8)
REDUCTION_SCHEME_NONE = 0
ALGO_ID, ALGO_TILE_ID, ALGO_SPLITK_NUM, ALGO_REDUCTION_SCHEME, ALGO_STAGES_ID, ALGO_CLUSTER_SHAPE = 0, 1, 2, 3, 6, 8
NOT_SUPPORTED = 15
STATUS_NAMES = {
    1: "not initialized", 3: "out of memory", 7: "invalid value", 8: "not for this architecture", 11: "mapping error",
    13: "execution failed", 14: "internal error", NOT_SUPPORTED: "not supported", 16: "licence error",
}  # fmt: skip


class Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t; the algorithm stands first."""

    _fields_ = (
        ("algo", ctypes.c_uint64 * 8),
        ("workspace_size", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves_count", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


def failure(function: str, status: int) -> DeviceError:
    return DeviceError(f"{function} failed with cuBLAS status {status} ({STATUS_NAMES.get(status, 'unknown')})")
