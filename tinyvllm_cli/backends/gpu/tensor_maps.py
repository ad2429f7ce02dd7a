"""Tensor maps: how Hopper's copy engine finds the tiles of a matrix in memory, encoded by the driver (ctypes)."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from tinyvllm_cli.backends.gpu.driver import error_name
from tinyvllm_cli.backends.gpu.launch import TENSOR_MAP_BYTES
from tinyvllm_cli.errors import DeviceError

SLAB_BYTES = 128  # of a row of a tile: as many as are swizzled together
ALIGNMENT = 64  # of a map in memory
# cuda.h: CU_TENSOR_MAP_DATA_TYPE_UINT8, _UINT16 by the bytes of a number
TYPES = {1: 0, 2: 1}
# cuda.h: INTERLEAVE_NONE, SWIZZLE_128B, L2_PROMOTION_L2_256B, FLOAT_OOB_FILL_NONE
NOT_INTERLEAVED, SWIZZLE_128B, L2_256B, ZEROS = 0, 3, 3, 0


@cache
def tensor_map(address: int, rows: int, columns: int, tile_rows: int, itemsize: int = 2) -> bytes:
    """Of a row-major matrix of numbers of so many bytes, for tiles of tile_rows rows and SLAB_BYTES; what lies outside
    of it is zero.

    A pure function of its arguments, so it holds for whatever lies at the address. DeviceError where the driver
    refuses.
    """
    memory = ctypes.create_string_buffer(TENSOR_MAP_BYTES + ALIGNMENT)
    start = -(-ctypes.addressof(memory) // ALIGNMENT) * ALIGNMENT
    sizes, strides = (ctypes.c_uint64 * 2)(columns, rows), (ctypes.c_uint64 * 1)(itemsize * columns)
    box, steps = (ctypes.c_uint32 * 2)(SLAB_BYTES // itemsize, tile_rows), (ctypes.c_uint32 * 2)(1, 1)
    status = _open_encode()(
        ctypes.c_void_p(start), TYPES[itemsize], 2, ctypes.c_void_p(address), sizes, strides, box, steps,
        NOT_INTERLEAVED, SWIZZLE_128B, L2_256B, ZEROS,
    )  # fmt: skip
    if status:
        raise DeviceError(f"no tensor map of a {rows} x {columns} matrix: {error_name(status)}")
    return ctypes.string_at(start, TENSOR_MAP_BYTES)


@cache
def _open_encode() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled
    except (OSError, AttributeError) as error:
        raise DeviceError(f"the NVIDIA driver has no tensor maps ({error}): update it") from None
