"""Weights in FP8 on the CPU: rows as the definition rounds them, products of these, and nothing else rounded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from seam import NUM_IDS
from steps import prompt_step
from tiny import make_tiny_model

from tinyvllm_cli.backends import fp8_rows
from tinyvllm_cli.backends.choose import engine_config
from tinyvllm_cli.backends.cpu import ops
from tinyvllm_cli.backends.cpu.backend import CpuBackend
from tinyvllm_cli.backends.cpu.gemm import Device
from tinyvllm_cli.config import AskedDtype, EngineOptions
from tinyvllm_cli.model.checkpoint import Checkpoint, open_checkpoint
from tinyvllm_cli.model.parameters import Weight
from tinyvllm_cli.model.weights.layout import iter_weights
from tinyvllm_cli.types import SlotOptions

EVERY_CODE = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
NUMBERS = np.sort(EVERY_CODE[np.isfinite(EVERY_CODE)])


def nearest(x: np.ndarray) -> np.ndarray:
    """The numbers of e4m3 next to x, by looking at all; of two that are as near, the one whose code is even."""
    distance = np.abs(x[..., None] - NUMBERS)
    best = distance == distance.min(axis=-1, keepdims=True)
    codes = NUMBERS.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return NUMBERS[np.argmax(best * (1 + (codes % 2 == 0)), axis=-1)]


def exactly(rows: np.ndarray) -> np.ndarray:
    """What rows become: what is looked for is a product in float32, all else is in float64."""
    greatest = np.abs(rows.astype(np.float32)).max(axis=-1, keepdims=True)
    return nearest((rows * (np.float32(448) / greatest)).astype(np.float64)) * (greatest.astype(np.float64) / 448)


def rows_of_all_sizes(num_rows: int, columns: int) -> np.ndarray:
    rng = np.random.default_rng([num_rows, columns])
    return (rng.standard_normal((num_rows, columns)) * 2.0 ** rng.integers(-90, 90, (num_rows, 1))).astype(np.float32)


@pytest.fixture
def device() -> Iterator[Device]:
    device = Device(2)
    with device.running(2):
        yield device
    device.close()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(make_tiny_model(tmp_path_factory.mktemp("tiny"), max_position_embeddings=64))


def backend(checkpoint: Checkpoint, dtype: AskedDtype) -> CpuBackend:
    engine = engine_config("cpu", EngineOptions(slots=2, max_batch_tokens=64, dtype=dtype), checkpoint)
    return CpuBackend(checkpoint.config, checkpoint.tensors, engine, tokenizer_size=NUM_IDS, num_blocks=6)


# ---------------------------------------------------------------- rows


@pytest.mark.parametrize("columns", [1, 8, 300])
def test_rows_are_the_nearest_numbers_under_a_scale_of_their_own(columns: int):
    rows = rows_of_all_sizes(40, columns)
    np.testing.assert_allclose(fp8_rows.rounded_rows(rows), exactly(rows), rtol=2.0**-22)
    assert np.abs(fp8_rows.rounded_rows(rows)).max(axis=1) == pytest.approx(np.abs(rows).max(axis=1), rel=1e-6)


def test_numbers_of_e4m3_stay_what_they_are():
    row = NUMBERS.astype(np.float32)[None]
    codes, scales = fp8_rows.quantize_rows(row)
    assert scales.tolist() == [1] and np.array_equal(fp8_rows.dequantize_rows(codes, scales), row)


@pytest.mark.parametrize("number", [0.0, -0.0, 2.0**-101, 1e-40])
def test_a_row_of_as_good_as_nothing_is_zeros_under_the_scale_1(number: float):
    codes, scales = fp8_rows.quantize_rows(np.full((1, 8), number, np.float32))
    assert scales.tolist() == [1] and not (codes & 0x7F).any()


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_broken_gives_no_number_and_breaks_no_other(broken: float, device: Device):
    rows = rows_of_all_sizes(3, 16)
    rows[1, 5] = broken
    weight = Weight(fp8_rows.rounded_rows(rows_of_all_sizes(8, 16)), format="fp8")
    found = device.product(ops.operand(rows, weight), weight.data)
    assert not np.isfinite(found[1]).any() and np.isfinite(found[[0, 2]]).all()


@pytest.mark.filterwarnings("error")  # a run would print them between its own lines
@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_broken_is_rounded_without_a_warning(broken: float):
    rows = rows_of_all_sizes(3, 16)
    rows[1, 5] = broken
    found = fp8_rows.rounded_rows(rows)
    assert not np.isfinite(found[1]).any() and np.isfinite(found[[0, 2]]).all()


# ---------------------------------------------------------------- products and ops


@pytest.mark.parametrize("num_rows", [1, 3, 40])
def test_products_are_those_of_rounded_rows(num_rows: int, device: Device):
    """Both ops that end in a product, with norm and without, against float64."""
    rng = np.random.default_rng(num_rows)
    hidden, inner, eps = 48, 64, 0.1
    x, norm = (rng.standard_normal(shape, np.float32) for shape in ((num_rows, hidden), hidden))
    stored = {
        name: rng.standard_normal(shape, np.float32)
        for name, shape in (("gate_up", (2 * inner, hidden)), ("down", (hidden, inner)))
    }
    weights = {name: Weight(fp8_rows.rounded_rows(values), format="fp8") for name, values in stored.items()}
    h = ops.gate_up_silu(device, x, norm=norm, eps=eps, weight=weights["gate_up"], bias=None)
    normed = x / np.sqrt((x.astype(np.float64) ** 2).mean(axis=1, keepdims=True) + eps) * norm
    y = exactly(normed.astype(np.float32)) @ exactly(stored["gate_up"]).T
    gate, up = y.reshape(num_rows, -1, 2, 8)[:, :, 0], y.reshape(num_rows, -1, 2, 8)[:, :, 1]
    np.testing.assert_allclose(h, (gate / (1 + np.exp(-gate)) * up).reshape(num_rows, -1), rtol=1e-3, atol=2e-2)
    out = x.copy()
    ops.down_proj_add(device, out, h, weight=weights["down"], bias=None)
    wanted = x + exactly(h) @ exactly(stored["down"]).T
    np.testing.assert_allclose(out, wanted, rtol=1e-4, atol=1e-3)


# ---------------------------------------------------------------- a backend


def test_the_matrices_of_layers_are_rounded_and_all_else_is_bfloat16(checkpoint: Checkpoint):
    with closing(backend(checkpoint, "fp8")) as held:
        parameters: Any = held._parameters
        assert held.facts.dtype == "fp8"
        for item in iter_weights(checkpoint.config, checkpoint.tensors):
            place = getattr(parameters if item.layer is None else parameters.layers[item.layer], item.kind)
            wanted = item.array.astype(ml_dtypes.bfloat16).astype(np.float32)
            if item.layer is not None and wanted.ndim == 2:
                assert place.format == "fp8"
                np.testing.assert_allclose(place.data, exactly(wanted), rtol=2.0**-22)
            else:
                array = place.data if isinstance(place, Weight) else place
                np.testing.assert_array_equal(array, wanted)


def test_logits_are_near_those_of_bfloat16_and_not_the_same(checkpoint: Checkpoint):
    found = {}
    for dtype in ("bfloat16", "fp8"):
        with closing(backend(checkpoint, dtype)) as held:
            held.bind(0, range(9, 20), SlotOptions())
            found[dtype] = held.logits(prompt_step(range(9, 20)))
    error = (found["fp8"] - found["bfloat16"]).std() / found["bfloat16"].std()
    assert 2.0**-8 < error < 0.5
