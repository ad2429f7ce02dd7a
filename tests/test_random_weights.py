"""Random weights in NumPy: published shapes, known words, stated deviation, whatever they are cut into."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_laws import MODELS

from tinyvllm_cli.backends.choose import engine_config, open_backend
from tinyvllm_cli.config import EngineOptions
from tinyvllm_cli.model.checkpoint import open_checkpoint
from tinyvllm_cli.model.presets import PRESETS
from tinyvllm_cli.model.random_weights import (
    CHUNK,
    RandomTensors,
    random_checkpoint,
    random_config,
    random_values,
    read_preset,
)
from tinyvllm_cli.model.weights.layout import check_tensors, tensor_shapes

# As the models' cards have them, to the parameter (a tied head counts once)
PARAMETERS = {
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.1-8b": 8_030_261_248,
    "smollm2-135m": 134_515_008,
}
# philox4x32 with 10 rounds of key 0 and counter 0, in tests/kat_vectors of Random123 (D. E. Shaw Research)
KNOWN_WORDS = (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
LARGEST = 0.02 * math.sqrt(3)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_published_shape(name: str):
    config = random_config(name)
    assert sum(math.prod(shape) for shape in tensor_shapes(config).values()) == PARAMETERS[name]
    assert config.dtype == "bfloat16"
    check_tensors(config, RandomTensors(config))


@pytest.mark.model
def test_the_small_preset_is_the_default_model(default_model: Path):
    published = open_checkpoint(default_model).config
    own = random_config("smollm2-135m")
    eps = float(np.float32(own.rms_norm_eps))  # as a GGUF file holds it
    found = replace(own, architecture=published.architecture, dtype=published.dtype, rms_norm_eps=eps)
    assert found == published


def test_known_words_give_known_values():
    """The quotient of a word and 2^31, rounded twice on the way to bfloat16 and once in its factor."""
    values = random_values(0, 0, 4)
    assert values.dtype == ml_dtypes.bfloat16
    for value, word in zip(values, KNOWN_WORDS, strict=True):
        signed = word - 2**32 if word >= 2**31 else word
        exact = Fraction(signed, 2**31) * Fraction(LARGEST)
        assert abs(Fraction(float(value)) - exact) <= abs(exact) * Fraction(1, 2**8)


@given(
    count=st.integers(0, 3 * CHUNK),
    cut=st.integers(0, 3 * CHUNK),
    seed=st.integers(0, 2**31 - 1),
    tensor=st.integers(0, 1000),
)
def test_an_element_does_not_depend_on_how_many_there_are(count: int, cut: int, seed: int, tensor: int):
    short, long = sorted((count, cut))
    values = random_values(seed, tensor, long)
    assert values.shape == (long,)
    assert values[:short].tobytes() == random_values(seed, tensor, short).tobytes()


def test_values_are_uniform_with_the_stated_deviation():
    count = 1 << 20
    values = random_values(3, 7, count).astype(np.float64)
    assert abs(values.mean()) < 5 * 0.02 / math.sqrt(count)
    assert abs(values.std() / 0.02 - 1) < 0.005
    assert 0.99 * LARGEST < np.abs(values).max() <= LARGEST * (1 + 2**-8)
    shares = np.histogram(values, bins=16, range=(-LARGEST, LARGEST))[0] / count
    assert np.abs(16 * shares - 1).max() < 0.03


def test_other_seeds_and_tensors_and_their_neighbours_have_nothing_in_common():
    count = 1 << 16
    drawn = [random_values(seed, tensor, count).astype(np.float64) for seed, tensor in ((0, 0), (1, 0), (0, 1), (1, 1))]
    drawn.append(np.roll(drawn[0], 1))
    correlations = np.corrcoef(drawn)[~np.eye(len(drawn), dtype=bool)]
    assert np.abs(correlations).max() < 5 / math.sqrt(count)


@pytest.mark.parametrize("name", MODELS)
def test_matrices_are_drawn_by_the_order_of_names_and_vectors_are_constant(name: str):
    config = read_preset(MODELS[name])
    tensors = RandomTensors(config, seed=9)
    for number, tensor in enumerate(sorted(tensor_shapes(config))):
        found, shape = tensors.read(tensor), tensors.shape(tensor)
        assert (found.shape, found.dtype, tensors.dtype(tensor)) == (shape, ml_dtypes.bfloat16, "bfloat16")
        if len(shape) == 2:
            assert found.tobytes() == random_values(9, number, math.prod(shape)).tobytes()
        else:
            assert (found == (0 if tensor.endswith("bias") else 1)).all()
    assert tensors.nbytes == sum(tensors.read(tensor).nbytes for tensor in tensors.names())


def test_a_preset_opens_as_a_checkpoint_does_and_in_time():
    """Logits of a depth of 30 are finite and not all the same."""
    from seam import Part, batch, prompt

    checkpoint = random_checkpoint("smollm2-135m")
    options = EngineOptions(slots=1, max_batch_tokens=16, max_model_len=32)
    started = time.perf_counter()
    backend = open_backend("cpu", checkpoint, engine_config("cpu", options, checkpoint), 49152, None)
    assert time.perf_counter() - started < 60
    logits = backend.logits(batch(Part(0, (1,), 0, prompt(5))))
    assert np.isfinite(logits).all() and logits.std() > 0.1
    assert checkpoint.generation.eos_token_ids == (0,)
    backend.close()
