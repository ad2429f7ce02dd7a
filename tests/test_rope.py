"""RoPE tables against those of transformers (tests/reference/make_rope.py), and what scaling means."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rope_cases import POSITIONS, ROPES

from tinyvllm_cli.config import RopeConfig
from tinyvllm_cli.model.rope import inverse_frequencies, rope_tables

STORED = np.load(Path(__file__).parent / "data" / "rope.npz")


@pytest.mark.parametrize("name", ROPES)
def test_inverse_frequencies_have_the_bits_of_the_reference(name: str):
    rope, head_dim = ROPES[name]
    assert inverse_frequencies(rope, head_dim).dtype == np.float32
    assert np.array_equal(inverse_frequencies(rope, head_dim), STORED[f"{name}.inv_freq"])


@pytest.mark.parametrize("name", ROPES)
def test_cos_and_sin_are_those_of_the_reference_up_to_position_131071(name: str):
    rope, head_dim = ROPES[name]
    cos, sin = rope_tables(rope, head_dim, max(POSITIONS) + 1)
    assert cos.dtype == sin.dtype == np.float32
    assert cos.shape == sin.shape == (max(POSITIONS) + 1, head_dim // 2)
    # 2 units in the last place at 1: two libraries' cos and sin of one float32 angle.
    for table, stored in ((cos, STORED[f"{name}.cos"]), (sin, STORED[f"{name}.sin"])):
        np.testing.assert_allclose(table[list(POSITIONS)], stored, rtol=0, atol=2.4e-7)


def test_a_longer_table_starts_with_the_bits_of_a_shorter_one():
    """Sequences go on when the tables grow: K that is in place was rotated with the old ones."""
    rope, head_dim = ROPES["llama3_1"]
    for short, long in zip(rope_tables(rope, head_dim, 1001), rope_tables(rope, head_dim, 4099), strict=True):
        assert np.array_equal(short, long[:1001])


def test_the_stored_positions_would_show_angles_in_float64():
    """The tolerance above tells float32 angles from exact ones."""
    rope, head_dim = ROPES["smollm2"]
    exact = np.outer(POSITIONS, rope.theta ** (-np.arange(0, head_dim, 2) / head_dim))
    assert np.abs(np.cos(exact) - STORED["smollm2.cos"]).max() > 1e-4


@pytest.mark.parametrize("name", ["llama3_1", "llama3_2", "other_bands"])
def test_frequency_factors_of_a_gguf_file_give_the_scaling_they_were_made_from(name: str):
    rope, head_dim = ROPES[name]
    plain = RopeConfig(theta=rope.theta)
    factors = inverse_frequencies(plain, head_dim) / inverse_frequencies(rope, head_dim)
    from_file = replace(plain, freq_factors=tuple(factors.tolist()))
    np.testing.assert_allclose(
        inverse_frequencies(from_file, head_dim), inverse_frequencies(rope, head_dim), rtol=2.4e-7
    )


def test_llama3_scaling_keeps_divides_and_blends():
    rope, head_dim = ROPES["llama3_1"]
    ratio = inverse_frequencies(replace(rope, type="default"), head_dim) / inverse_frequencies(rope, head_dim)
    assert (ratio == 1).any()
    assert (ratio == rope.factor).any()
    assert ((ratio > 1) & (ratio < rope.factor)).any()
    assert (np.diff(ratio) >= 0).all()
