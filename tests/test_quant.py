"""De-quantizing gives, bit for bit, what the gguf package gives."""

import gguf
import numpy as np
import pytest

from tinyvllm_cli.model.weights import quant
from tinyvllm_cli.model.weights.quant import FORMATS, dequantize


def random_blocks(type: str, rows: int, blocks: int) -> np.ndarray:
    """Bytes of all values: scales that are inf, NaN or subnormal among them."""
    return np.random.default_rng(1).integers(0, 256, (rows, blocks * FORMATS[type].nbytes), dtype=np.uint8)


@pytest.mark.parametrize("type", FORMATS)
def test_every_block_is_what_the_reference_makes_of_it(type: str):
    data = random_blocks(type, 700, 3)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[type])
    got = dequantize(type, data.reshape(-1), expected.shape)
    assert got.dtype == np.float32
    assert np.array_equal(np.isnan(got), np.isnan(expected))
    numbers = ~np.isnan(expected)
    assert np.array_equal(got[numbers].view(np.uint32), expected[numbers].view(np.uint32))


@pytest.mark.parametrize("type", FORMATS)
def test_the_size_of_a_chunk_changes_nothing(type: str, monkeypatch: pytest.MonkeyPatch):
    form = FORMATS[type]
    data = random_blocks(type, 7, 11).reshape(-1)
    whole = dequantize(type, data, (7, 11 * form.elements))
    monkeypatch.setattr(quant, "CHUNK", 3 * form.elements)
    assert dequantize(type, data, whole.shape).tobytes() == whole.tobytes()


def test_block_sizes_are_those_of_ggml():
    sizes = {type: gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type]] for type in FORMATS}
    assert {type: (form.elements, form.nbytes) for type, form in FORMATS.items()} == sizes


@pytest.mark.filterwarnings("error")
def test_scales_that_are_no_numbers_warn_nobody():
    infinite_times_zero = np.array([0x00, 0x7C] + [0x88] * 16, np.uint8)
    assert np.isnan(dequantize("Q4_0", infinite_times_zero, (32,))).all()
