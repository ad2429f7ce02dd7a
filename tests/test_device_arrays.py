"""Arrays over memory that the host must not touch: shapes, strides and addresses are those of NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tinyvllm_cli.backends.gpu.arrays import DeviceArray, device_array

ADDRESS = 1 << 40  # of nothing: to read there ends the process

PARTS: list[Callable[[Any], Any]] = [
    lambda array: array,
    lambda array: array[3],
    lambda array: array[-1:],
    lambda array: array[2:9, 4:],
    lambda array: array[:, 1],
    lambda array: array[None],
    lambda array: array[2, 3, None],
    lambda array: [*array[5:7]][1],
    lambda array: array[:0],
    lambda array: array.reshape(-1, 2, 8)[:, 1],
    lambda array: array[4:].reshape(-1).view(np.uint8)[6:],
    lambda array: array.reshape((16, 4, 2))[1:, :, 1],
]


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_a_part_lies_where_numpy_has_it(part: Callable[[Any], Any], dtype: Any):
    host = np.zeros((16, 8), dtype)
    wanted, found = part(host), part(device_array(ADDRESS, host.shape, dtype))
    assert isinstance(found, DeviceArray)
    assert found.data.ptr - ADDRESS == wanted.ctypes.data - host.ctypes.data
    for name in ("shape", "strides", "dtype", "ndim", "size", "itemsize", "nbytes"):
        assert getattr(found, name) == getattr(wanted, name), name
    assert (len(found), found.flags.c_contiguous) == (len(wanted), wanted.flags.c_contiguous)


def test_one_element_is_not_read():
    found = device_array(ADDRESS, (16, 8), np.float32)[2, 3]
    assert (found.shape, found.data.ptr) == ((), ADDRESS + 4 * (2 * 8 + 3))


def test_what_would_take_a_copy_is_refused():
    gaps = device_array(ADDRESS, (16, 8), np.float32)[:, :4]
    with pytest.raises(AssertionError, match="gaps"):
        gaps.reshape(-1)
    with pytest.raises(AssertionError, match="gaps"):
        gaps.get()
