"""Which algorithms cublasLt has for a product: those that sum K in one piece."""

from __future__ import annotations

import ctypes
import itertools
from functools import partial

from tinyvllm_cli.backends.gpu.cublas_api import (
    ALGO_CLUSTER_SHAPE,
    ALGO_ID,
    ALGO_REDUCTION_SCHEME,
    ALGO_SPLITK_NUM,
    ALGO_STAGES_ID,
    ALGO_TILE_ID,
    COMPUTE_32F,
    CUDA_TYPES,
    NOT_SUPPORTED,
    PREF_MAX_WORKSPACE_BYTES,
    PREF_MIN_ALIGNMENTS,
    PREF_REDUCTION_SCHEME_MASK,
    REDUCTION_SCHEME_NONE,
    Heuristic,
    failure,
)
from tinyvllm_cli.backends.gpu.cublas_library import Library

ALIGNMENT = 16  # bytes that every pointer and every row of the operands is a multiple of, at least
CANDIDATES = 32  # algorithms asked for, the fastest by the library's estimate first
# Tiles of the output, features x rows, and clusters of 1 and of 4 blocks, by cublasLt's numbers: those of which one is
# within 3 % of the best of all for 16 to 256 rows of the products of the 8B.
CODE_TILES = {
    "32x64": 12, "48x64": 92, "64x64": 15, "88x64": 143, "104x64": 157, "112x64": 164, "128x64": 18, "144x64": 183,
    "168x64": 196, "224x64": 220, "64x128": 17, "96x128": 28, "112x128": 165, "48x192": 94, "64x192": 116,
    "80x192": 136,
}  # fmt: skip
CODE_CLUSTERS = (2, 4)


class Search:
    """Among the algorithms for one descriptor and its layouts."""

    def __init__(self, library: Library, handle: int, workspace_bytes: int, product: tuple[int, int, int, int]) -> None:
        """product: descriptor, layouts of weight, a and out."""
        self._library, self._handle, self._workspace_bytes = library, handle, workspace_bytes
        self._operands = (*product, product[-1])  # C is D

    def algorithms(self) -> list[Heuristic]:
        """The algorithms without split K, the fastest by the library's estimate first."""
        preference = self._library.create("cublasLtMatmulPreference")
        set_preference = partial(self._library.set, "cublasLtMatmulPreferenceSetAttribute", preference)
        set_preference(PREF_MAX_WORKSPACE_BYTES, ctypes.c_uint64(self._workspace_bytes))
        set_preference(PREF_REDUCTION_SCHEME_MASK, ctypes.c_uint32(REDUCTION_SCHEME_NONE))
        for attribute in PREF_MIN_ALIGNMENTS:
            set_preference(attribute, ctypes.c_uint32(ALIGNMENT))
        results, count = (Heuristic * CANDIDATES)(), ctypes.c_int()
        status = self._library.lt.cublasLtMatmulAlgoGetHeuristic(
            self._handle, *self._operands, preference, CANDIDATES, results, ctypes.byref(count)
        )
        if status not in (0, NOT_SUPPORTED):
            raise failure("cublasLtMatmulAlgoGetHeuristic", status)
        usable = (found for found in results[: count.value] if found.state == 0 and not self._splits_k(found))
        return [Heuristic.from_buffer_copy(found) for found in usable]

    def other_tiles(self, chosen: Heuristic, out_type: int) -> list[Heuristic]:
        """The library's choice for codes with other tiles: with scales for each row it offers one alone, far from its
        best. out_type: of cudaDataType_t."""
        number, stages = self._setting(chosen, ALGO_ID), self._setting(chosen, ALGO_STAGES_ID)
        types = (CUDA_TYPES["uint8"], CUDA_TYPES["uint8"], out_type, out_type)
        found = []
        for tile, cluster in itertools.product(CODE_TILES.values(), CODE_CLUSTERS):
            algorithm, checked = Heuristic(), Heuristic()
            address = ctypes.addressof(algorithm)
            start = (COMPUTE_32F, CUDA_TYPES["float32"], *types, number)
            self._library.call("cublasLtMatmulAlgoInit", self._handle, *start, address)
            for attribute, value in (
                (ALGO_TILE_ID, ctypes.c_uint32(tile)),
                (ALGO_STAGES_ID, ctypes.c_uint32(stages)),
                (ALGO_CLUSTER_SHAPE, ctypes.c_uint16(cluster)),
            ):
                self._library.set("cublasLtMatmulAlgoConfigSetAttribute", address, attribute, value)
            status = self._library.lt.cublasLtMatmulAlgoCheck(
                self._handle, *self._operands, address, ctypes.addressof(checked)
            )
            if status == 0 and checked.workspace_size <= self._workspace_bytes:
                found.append(algorithm)
        return found

    def _splits_k(self, found: Heuristic) -> bool:
        """Whether an algorithm sums parts of K apart. The mask above should leave none; this makes sure."""
        parts, scheme = self._setting(found, ALGO_SPLITK_NUM), self._setting(found, ALGO_REDUCTION_SCHEME)
        return parts > 1 or scheme != REDUCTION_SCHEME_NONE

    def _setting(self, found: Heuristic, attribute: int) -> int:
        """Of those that have 32 bits."""
        value, written = ctypes.c_int32(), ctypes.c_size_t()
        self._library.call(
            "cublasLtMatmulAlgoConfigGetAttribute", ctypes.byref(found), attribute,
            ctypes.byref(value), ctypes.sizeof(value), ctypes.byref(written),
        )  # fmt: skip
        return value.value
