"""The backend against the packages of CUDA 12, without a card: what it calls is there, and means what it is taken for.

In an environment of its own, with the extra cuda12: TINYVLLM_TEST_CUDA12=1 pytest tests/test_cuda12.py
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from emulated_cuda import OUT_OF_MEMORY, Runtime

from tinyvllm_cli.backends.gpu import cublas_api as cublas
from tinyvllm_cli.backends.gpu import driver, nvrtc
from tinyvllm_cli.backends.gpu.driver import Driver
from tinyvllm_cli.backends.gpu.libraries import Signatures, open_library
from tinyvllm_cli.backends.gpu.nvrtc import load_nvrtc
from tinyvllm_cli.backends.gpu.packages import installed_cupy, require_packages

pytestmark = pytest.mark.cuda12

LIBRARIES = {
    "cublas": cublas.BLAS_SIGNATURES,
    "cublasLt": cublas.LT_SIGNATURES,
    "nvrtc": nvrtc.SIGNATURES,
}
ENUMERATIONS = {
    "CUDA_R_16BF": cublas.CUDA_TYPES["bfloat16"],
    "CUDA_R_16F": cublas.CUDA_TYPES["float16"],
    "CUDA_R_32F": cublas.CUDA_TYPES["float32"],
    "CUBLAS_COMPUTE_32F": cublas.COMPUTE_32F,
    "CUBLAS_OP_N": cublas.OP_N,
    "CUBLAS_OP_T": cublas.OP_T,
    "CUBLAS_GEMM_DEFAULT": cublas.GEMM_DEFAULT,
    "CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION": cublas.DISALLOW_REDUCED_PRECISION_REDUCTION,
    "CUBLAS_STATUS_NOT_SUPPORTED": cublas.NOT_SUPPORTED,
    "CUBLASLT_MATMUL_DESC_TRANSA": cublas.DESC_TRANSA,
    "CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES": cublas.PREF_MAX_WORKSPACE_BYTES,
    "CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK": cublas.PREF_REDUCTION_SCHEME_MASK,
    "CUBLASLT_REDUCTION_SCHEME_NONE": cublas.REDUCTION_SCHEME_NONE,
    "CUBLASLT_ALGO_CONFIG_SPLITK_NUM": cublas.ALGO_SPLITK_NUM,
    "CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME": cublas.ALGO_REDUCTION_SCHEME,
    "CUDA_ERROR_NO_DEVICE": driver.NO_DEVICE,
    "CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES": driver.SHARED_SIZE_BYTES,
    "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES": driver.MAX_DYNAMIC_SHARED_SIZE_BYTES,
} | {
    f"CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_{matrix}_BYTES": value
    for matrix, value in zip("ABCD", cublas.PREF_MIN_ALIGNMENTS, strict=True)
}


@cache
def headers() -> str:
    """All declarations of the wheels, without comments."""
    paths: list[Path] = []
    for wheel in ("nvidia-cublas-cu12", "nvidia-cuda-nvrtc-cu12", "nvidia-cuda-runtime-cu12"):
        for file in importlib.metadata.files(wheel) or ():
            if file.name in ("cublas_api.h", "cublasLt.h", "nvrtc.h", "cuda.h", "library_types.h"):
                paths.append(Path(str(file.locate())))
    assert len(paths) == 5
    return re.sub(r"/\*.*?\*/|//[^\n]*", " ", "\n".join(path.read_text() for path in paths), flags=re.DOTALL)


def declarations(signatures: Signatures) -> Iterator[tuple[str, int, int]]:
    """(function, its arguments here, its arguments in the header; -1 where there is none)."""
    for name, arguments in signatures.items():
        found = re.search(rf"\b{name}\s*\(([^()]*)\)\s*;", headers())
        yield name, len(arguments), len(found[1].split(",")) if found else -1


def test_cupy_is_imported_without_a_card():
    from cupy_backends.cuda.api import runtime

    ((_, version),) = installed_cupy().items()
    assert tuple(map(int, version.split(".")[:2])) >= (14, 2)
    assert callable(runtime.malloc) and "cupy" not in sys.modules


def test_the_packages_do_for_the_oldest_driver():
    assert list(installed_cupy()) == ["cupy-cuda12x"]
    require_packages(Driver(cuda_version=(12, 0), num_devices=1))


@pytest.mark.parametrize("name", LIBRARIES)
def test_every_symbol_is_found(name: str):
    library = open_library(name, LIBRARIES[name])  # looks up every one
    assert re.search(rf"lib{name}\.so\.12$", library._name)


@pytest.mark.parametrize(
    "signatures", [*LIBRARIES.values(), driver.SIGNATURES, driver.CODE_SIGNATURES], ids=[*LIBRARIES, "driver", "code"]
)
def test_every_function_is_declared_with_as_many_arguments(signatures: Signatures):
    wrong = [declared for declared in declarations(signatures) if declared[1] != declared[2]]
    assert not wrong


@pytest.mark.parametrize("name", ENUMERATIONS)
def test_enumerations_have_the_values_of_the_headers(name: str):
    found = re.search(rf"\b{name}\s*=\s*(-?\d+)", headers())
    assert found and int(found[1]) == ENUMERATIONS[name]


def test_the_result_of_the_heuristics_is_laid_out_as_declared():
    body = re.search(r"typedef struct \{([^{}]*)\} cublasLtMatmulHeuristicResult_t;", headers())
    algo = re.search(r"typedef struct \{\s*uint64_t data\[(\d+)\];\s*\} cublasLtMatmulAlgo_t;", headers())
    assert body and algo
    kinds = {
        "cublasLtMatmulAlgo_t algo": ctypes.c_uint64 * int(algo[1]),
        "size_t workspaceSize": ctypes.c_size_t,
        "cublasStatus_t state": ctypes.c_int,
        "float wavesCount": ctypes.c_float,
        "int reserved[4]": ctypes.c_int * 4,
    }
    members = [" ".join(member.split()) for member in body[1].split(";") if member.strip()]
    assert [kinds[member] for member in members] == [kind for _, kind in cublas.Heuristic._fields_]


def test_descriptions_of_a_product_can_be_made():
    """They live in host memory; only handles need a card."""
    library, made = open_library("cublasLt", cublas.LT_SIGNATURES), ctypes.c_void_p()
    assert library.cublasLtMatmulPreferenceCreate(ctypes.byref(made)) == 0
    preference = made.value
    workspace, mask = ctypes.c_uint64(32 << 20), ctypes.c_uint32(0)
    for attribute, value in (
        (cublas.PREF_MAX_WORKSPACE_BYTES, workspace),
        (cublas.PREF_REDUCTION_SCHEME_MASK, mask),
        *((number, mask) for number in cublas.PREF_MIN_ALIGNMENTS),
    ):
        size = ctypes.sizeof(value)
        assert library.cublasLtMatmulPreferenceSetAttribute(preference, attribute, ctypes.byref(value), size) == 0
    assert library.cublasLtMatrixLayoutCreate(ctypes.byref(made), 14, 8, 16, 8) == 0
    assert library.cublasLtMatmulDescCreate(ctypes.byref(made), cublas.COMPUTE_32F, 0) == 0


def test_nvrtc_is_of_cuda_12():
    nvrtc = load_nvrtc()
    assert (12, 9) <= nvrtc.version < (13, 0)
    assert nvrtc.compile("f.cu", 'extern "C" __global__ void f() {}', {}, ["-arch=sm_90a"])[0].startswith(b"\x7fELF")


def test_what_stands_in_for_cupy_has_its_names():
    """A name that CuPy lacks would show on a card only."""
    from cupy_backends.cuda.api import runtime

    own = {name for name in vars(Runtime) if not name.startswith("_")} - {"check", "enqueue"}
    assert not [name for name in own if not hasattr(runtime, name)]
    for name in ("memcpyHostToDevice", "memcpyDeviceToHost", "memcpyDeviceToDevice", "eventDisableTiming"):
        assert getattr(Runtime, name) == getattr(runtime, name), name
    assert runtime.CUDARuntimeError(OUT_OF_MEMORY).status == OUT_OF_MEMORY
    for name in ("memsetAsync", "eventCreate", "eventElapsedTime"):  # of tuning.py, which runs on a card only
        assert callable(getattr(runtime, name)), name
