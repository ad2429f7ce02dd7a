"""Laws of rows in FP8 on a GPU, real or emulated: codes and scales are NumPy's, or as near as a rounding."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from gpu_tools import POISON, Array, OpDevice, Output, assert_close, assert_same_bits, rounded
from kernel_laws import EPS, EXP_SLACK, EXP_TERMS, NORM_TERMS, elements, interleaved, normed, random, swiglu

from tinyvllm_cli.backends import fp8_rows
from tinyvllm_cli.backends.gpu.quantize import quantize_pieces, row_threads

SCALES = np.array([1, 0, 2.0**-120, 1e-20, 3e4, 1e-3], np.float32)  # of a row's numbers; the third are as good as none


def rows_of_all_sizes(device: OpDevice, rng: np.random.Generator, num_rows: int, columns: int) -> Array:
    """Numbers that elements hold; the last row has a NaN, the one before an infinity."""
    rows = random(rng, num_rows, columns) * SCALES[np.arange(num_rows) % len(SCALES)][:, None]
    rows = rounded(rows, device.dtype)
    rows[-1, columns // 2] = np.nan
    if num_rows > 1:
        rows[-2, 0] = -np.inf
    return rows


def finished(output: Output, num_rows: int) -> Array:
    """The rows of a step; those past it must be as they were."""
    host = output.read()
    past = np.ascontiguousarray(host[num_rows:]).view(np.uint8)
    assert (past == POISON).all(), f"{(past != POISON).sum()} bytes past the step's {num_rows} rows were written"
    return host[:num_rows]


def quantized(device: OpDevice, num_rows: int, columns: int) -> None:
    """Bit for bit, a row after another."""
    rng = np.random.default_rng([num_rows, columns])
    rows = rows_of_all_sizes(device, rng, num_rows, columns)
    codes, scales = device.poisoned((num_rows + 3, columns), np.uint8), device.poisoned((num_rows + 3,), np.float32)
    args = (codes, scales, device.upload(rows, device.dtype), num_rows, columns, 1, 1)
    device.launch("quantize_rows", (num_rows,), row_threads(columns), args)
    assert_same_codes(finished(codes, num_rows), finished(scales, num_rows), rows)


def in_turns(device: OpDevice, pieces: int, turn: int, columns: int) -> None:
    """Every other piece of `turn` rows: gate and up have one each."""
    rng = np.random.default_rng([pieces, turn, columns])
    codes, scales = (
        device.poisoned((pieces, 2, turn * columns), np.uint8),
        device.poisoned((pieces, 2, turn), np.float32),
    )
    halves = [elements(device, rng, pieces * turn, columns) for _ in range(2)]
    for which, rows in enumerate(halves):
        given = device.upload(rows.reshape(pieces, -1), device.dtype)
        places = codes.array[:, which], scales.array[:, which]
        quantize_pieces(device, *places, given, device.stream)
    for which, rows in enumerate(halves):
        found = codes.read()[:, which].reshape(-1, columns), scales.read()[:, which].reshape(-1)
        assert_same_codes(*found, rows)


def assert_same_codes(codes: Array, scales: Array, rows: Array) -> None:
    wanted_codes, wanted_scales = fp8_rows.quantize_rows(rows)
    finite = np.isfinite(rows).all(axis=1)
    assert_same_bits("scales", scales[finite], wanted_scales[finite])
    assert_same_bits("codes", codes[finite], wanted_codes[finite])
    assert not np.isfinite(scales[~finite]).any()


def norm_codes(device: OpDevice, num_rows: int, hidden: int) -> None:
    rng = np.random.default_rng([num_rows, hidden])
    x, weight = random(rng, num_rows, hidden), random(rng, hidden)
    x *= np.array([1, 0, 1e-4, 3e3, 1], np.float32)[np.arange(num_rows) % 5][:, None]
    x[-1, hidden - 1] = np.nan
    codes, scales = outputs(device, num_rows, hidden)
    args = (codes, scales, device.upload(x), device.upload(weight), num_rows, hidden, EPS)
    device.launch("rms_norm_codes", (num_rows,), row_threads(hidden), args)
    assert_rounded("rms_norm_codes", codes, scales, normed(x, weight), NORM_TERMS)


def silu_codes(device: OpDevice, num_rows: int, inner: int, *, bias: bool) -> None:
    rng = np.random.default_rng([num_rows, inner])
    gate, up = elements(device, rng, num_rows, inner, scale=3), elements(device, rng, num_rows, inner)
    gate[0, :8] = [-30000, -100, -88, -80, 80, 100, 300, 0]
    gate[-1, :3] = [np.nan, np.inf, -np.inf]
    gate_bias, up_bias = random(rng, inner), random(rng, inner)
    codes, scales = outputs(device, num_rows, inner)
    given = device.upload(interleaved(gate, up), device.dtype)
    added = device.upload(interleaved(gate_bias, up_bias)) if bias else None
    device.launch("silu_mul_codes", (num_rows,), row_threads(inner), (codes, scales, given, added, num_rows, inner))
    g, u = (a.astype(np.float64) + (b if bias else 0) for a, b in ((gate, gate_bias), (up, up_bias)))
    assert_rounded("silu_mul_codes", codes, scales, swiglu(g, u), EXP_TERMS, EXP_SLACK * (1 + np.abs(u)))


def outputs(device: OpDevice, num_rows: int, columns: int) -> tuple[Output, Output]:
    return device.poisoned((num_rows + 3, columns), np.uint8), device.poisoned((num_rows + 3,), np.float32)


def assert_rounded(op: str, codes: Output, scales: Output, expected: Array, terms: int, slack: Any = 0) -> None:
    """Values are the nearest that a code stands for: off by a sixteenth, or by half of the least code; a scale is the
    448th part of the greatest number."""
    num_rows = len(expected)
    found, of_rows = finished(codes, num_rows), finished(scales, num_rows)
    finite = np.isfinite(expected).all(axis=1)
    assert not np.isfinite(of_rows[~finite]).any()
    greatest = np.abs(expected[finite]).max(axis=1)
    wanted = np.where(greatest < float(fp8_rows.LEAST), 1, greatest / 448)
    assert_close(f"{op} scale", of_rows[finite], wanted, dtype="float32", terms=terms)
    values = found[finite].view(ml_dtypes.float8_e4m3fn).astype(np.float64) * of_rows[finite][:, None]
    step = np.abs(expected[finite]) * 2.0**-4 + of_rows[finite][:, None] * 2.0**-10
    extra = step + (slack if np.isscalar(slack) else slack[finite])
    assert_close(op, values, expected[finite], dtype="float32", terms=2 * terms, slack=extra)
