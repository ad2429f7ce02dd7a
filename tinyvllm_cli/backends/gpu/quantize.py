"""Rows on the GPU as FP8 codes with a scale each (cuda/row_codes.cuh): activations in a step, weights as they come."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tinyvllm_cli.model.parameters import Array

if TYPE_CHECKING:
    from tinyvllm_cli.backends.gpu.device import Device

WARP = 32
NUMBERS = 32  # of a row that a thread holds at most, 8 at a time
MAX_THREADS = 1024
MAX_COLUMNS = NUMBERS * MAX_THREADS
# Of a block, where they are enough: each then loads 8 numbers and no more, and a row takes the least time.
FEW_THREADS = 512


def row_threads(columns: int) -> int:
    """Of the block that makes codes of a row. The order of a norm's sum, and so its bits, depend on it."""
    threads = max(-(-columns // NUMBERS), min(FEW_THREADS, columns // 8))
    return -(-threads // WARP) * WARP


def quantize_rows(device: Device, codes: Array, scales: Array, rows: Array, num_rows: int) -> None:
    """codes e4m3[:num_rows, K] and scales f32[:num_rows] = those of rows elem[:num_rows, K]."""
    columns = rows.shape[1]
    args = (codes, scales, rows, num_rows, columns, 1, 1)
    device.launch("quantize_rows", (num_rows,), row_threads(columns), args)


def quantize_pieces(device: Device, codes: Array, scales: Array, pieces: Array, stream: Any) -> None:
    """codes e4m3[n, turn K], views with any distance from piece to piece, and scales f32[n, turn] of the same ones,
    from pieces elem[n, turn K]; on a stream of its own."""
    turn = scales.shape[1]
    columns = codes.shape[1] // turn
    apart = codes.strides[0] // columns if len(codes) > 1 else turn
    num_rows = len(codes) * turn
    args = (codes, scales, pieces, num_rows, columns, turn, apart)
    device.kernels.launch("quantize_rows", (num_rows,), row_threads(columns), args, stream=stream)
