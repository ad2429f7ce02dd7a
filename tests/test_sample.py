"""The sample op: known answers, exact filters, true probabilities, and tokens that know no neighbour."""

import math
from dataclasses import replace
from types import SimpleNamespace

import draw_laws
import draw_statistics
import numpy as np
import pytest
from draw_statistics import cpu_draws, one_by_one, probabilities
from draws import cpu_draw
from hypothesis import given
from hypothesis import strategies as st

from tinyvllm_cli.backends.cpu.logprobs import log_softmax
from tinyvllm_cli.backends.cpu.sample import (
    gumbel,
    gumbel_from_words,
    sample,
    sample_row,
    sample_rows,
)
from tinyvllm_cli.backends.cpu.slots import Slots
from tinyvllm_cli.philox import philox4x32_10
from tinyvllm_cli.types import SlotOptions

pytestmark = pytest.mark.filterwarnings("error")  # an overflow or a NaN on the way is a fault

# Counter, key and output of the philox4x32 lines with 10 rounds in tests/kat_vectors of Random123 (D. E. Shaw Research)
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]
FILTERS = [
    SlotOptions(temperature=1.0),
    SlotOptions(temperature=0.6, top_k=7),
    SlotOptions(temperature=1.5, top_p=0.8),
    SlotOptions(temperature=1.2, min_p=0.05),
    SlotOptions(temperature=2.0, top_k=9, top_p=0.9, min_p=0.1),
]


def words(text):
    return np.array([int(word, 16) for word in text.split()], dtype=np.uint32)


def random_rows(rows, size, seed=0):
    return np.random.default_rng(seed).normal(0, 2, (rows, size)).astype(np.float32)


@pytest.mark.parametrize(("counter", "key", "output"), KNOWN_ANSWERS)
def test_philox_gives_its_known_answers(counter, key, output):
    counters = np.stack([words(counter), words("00000001 00000002 00000003 00000004"), words(counter)])
    drawn = philox4x32_10(counters, words(key))
    assert drawn.dtype == np.uint32
    assert drawn[0].tolist() == drawn[2].tolist() == words(output).tolist()


def exact_gumbel(word):
    v = min(float(np.float32(word)) * 2.0**-32 + 2.0**-33, 1 - 2.0**-24)
    return -math.log(-math.log1p(-v))


def test_noise_of_the_first_and_last_words_is_finite_and_true():
    # The last 128 words round to 2^32: without the minimum their noise would be infinite.
    words = [*range(300), 2**31, *range(2**32 - 300, 2**32)]
    noise = gumbel_from_words(np.array(words, dtype=np.uint32))
    assert noise.dtype == np.float32
    assert noise == pytest.approx([exact_gumbel(word) for word in words], rel=1e-6)


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**64 - 1])
def test_noise_is_a_function_of_seed_position_and_id(seed):
    position, num_ids = 70_000, 1001
    noise = gumbel(seed, position, num_ids)
    assert noise.dtype == np.float32 and noise.shape == (num_ids,)
    key = np.array([seed & 0xFFFFFFFF, seed >> 32], dtype=np.uint32)
    for token_id in (0, 1, 2, 3, 4, 517, 1000):
        counter = np.array([[token_id // 4, position, 0, 0]], dtype=np.uint32)
        word = int(philox4x32_10(counter, key)[0, token_id % 4])
        assert noise[token_id] == pytest.approx(exact_gumbel(word), rel=1e-5, abs=1e-6)


def test_noise_has_the_gumbel_distribution():
    noise = gumbel(3, 5, 1_000_000).astype(np.float64)
    assert noise.mean() == pytest.approx(0.5772157, abs=0.006)  # Euler's constant
    assert noise.var() == pytest.approx(math.pi**2 / 6, abs=0.02)
    assert np.mean(noise > 8) == pytest.approx(-math.expm1(-math.exp(-8)), rel=0.2)


@pytest.mark.parametrize("number", range(len(draw_statistics.SETTINGS)))
def test_draws_follow_the_probabilities(number):
    draw_statistics.assert_probable(draw_statistics.draw_many(cpu_draws, number, seeds=100), number)


@pytest.mark.parametrize("setting", draw_statistics.SETTINGS, ids=str)
def test_many_draws_at_once_are_those_of_the_rows(setting):
    logits = random_rows(1, 26, seed=4)[0]
    positions = len(setting.history) + np.arange(20, dtype=np.int32)
    found = cpu_draws(logits, setting, [0, 3, 2**64 - 1], positions, 23)
    assert found.tolist() == one_by_one(cpu_draw)(logits, setting, [0, 3, 2**64 - 1], positions, 23).tolist()


@given(
    # On a grid, so that what differs differs in float32 too; few values, so that ties are common.
    logits=st.lists(st.sampled_from([-30, -2, 0, 0.25, 1]) | st.integers(-512, 512).map(lambda i: i / 64), min_size=1),
    temperature=st.sampled_from([0.1, 1.0, 1.7, 50.0]),
    top_k=st.integers(0, 12),
    top_p=st.just(1.0) | st.floats(0, 1, exclude_min=True),
    min_p=st.sampled_from([0.0, 1.0]) | st.floats(0, 1),
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(0, 2**31 - 1),
)
def test_filters_leave_exactly_what_the_definition_leaves(logits, temperature, top_k, top_p, min_p, seed, position):
    row = np.array(logits, dtype=np.float32)
    options = SlotOptions(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    keys = row / np.float32(temperature) + gumbel(seed, position, len(row))
    keys[probabilities(row, options) == 0] = -np.inf
    assert sample_row(row, options, position, len(row)) == keys.argmax()


@pytest.mark.parametrize("options", [SlotOptions(), *FILTERS], ids=str)
def test_a_row_knows_no_neighbour(options):
    rows = random_rows(6, 700)
    others = [SlotOptions(), *FILTERS]
    alone = [sample_row(row, replace(options, seed=9), 40 + r, 690) for r, row in enumerate(rows)]
    for r, row in enumerate(rows):
        batch, slots = rows.copy(), list(others)
        batch[-1 - r], slots[-1 - r] = row, replace(options, seed=9)
        positions = np.arange(6, dtype=np.int32)
        positions[-1 - r] = 40 + r
        drawn = sample_rows(batch, slots, positions, 690)
        assert drawn.dtype == np.int32
        assert drawn[-1 - r] == alone[r]


def test_no_rows_give_no_tokens():
    assert sample_rows(random_rows(0, 8), [], np.zeros(0, np.int32), 8).shape == (0,)


@pytest.mark.parametrize("options", [SlotOptions(), *FILTERS], ids=str)
def test_ids_past_the_tokenizer_never_come_out(options):
    row = np.zeros(64, dtype=np.float32)
    row[50:] = 100
    assert {sample_row(row, options, position, 50) for position in range(200)} <= set(range(50))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 17, 63])
@pytest.mark.parametrize("options", [SlotOptions(), *FILTERS, SlotOptions(logit_bias=((17, -100.0),))], ids=str)
def test_a_row_that_is_not_finite_gives_no_token_and_harms_no_other(bad, place, options):
    rows = random_rows(3, 64)
    clean = sample_rows(rows, [options] * 3, np.arange(3, dtype=np.int32), 60)
    rows[1, place] = bad
    assert sample_rows(rows, [options] * 3, np.arange(3, dtype=np.int32), 60).tolist() == [clean[0], -1, clean[2]]


@pytest.mark.parametrize("options", [SlotOptions(), *FILTERS], ids=str)
def test_stop_ids_wait_for_their_position(options):
    row = np.zeros(40, dtype=np.float32)
    row[[2, 7]] = 50
    options = replace(options, stop_ids=(2, 7, 41, 1000), min_position=10)  # ids past the tokenizer do no harm
    assert not {2, 7} & {sample_row(row, options, position, 40) for position in range(10)}
    assert {sample_row(row, options, position, 40) for position in range(10, 40)} <= {2, 7}


@pytest.mark.parametrize("options", [SlotOptions(), *FILTERS], ids=str)
def test_nothing_allowed_is_said(options):
    options = replace(options, stop_ids=tuple(range(8)), min_position=5)
    row = np.arange(9, dtype=np.float32)
    assert sample_row(row, options, 4, 8) == -2
    assert sample_row(row, options, 5, 8) in range(8)


def test_bias_is_added_to_raw_logits_and_leaves_the_row_as_it_was():
    row = random_rows(1, 40)[0]
    before = row.copy()
    assert sample_row(row, SlotOptions(logit_bias=((30, 100.0), (31, 50.0), (4000, 100.0))), 3, 40) == 30
    banned = SlotOptions(temperature=0.5, logit_bias=((int(row.argmax()), -100.0),))
    assert row.argmax() not in {sample_row(row, banned, position, 40) for position in range(100)}
    # Before temperature: 1 on top of equal logits is e^2 times as probable at temperature 0.5.
    flat = np.zeros(2, dtype=np.float32)
    nudged = SlotOptions(temperature=0.5, logit_bias=((1, 1.0),))
    share = np.mean([sample_row(flat, nudged, position, 2) for position in range(4000)])
    assert share == pytest.approx(math.exp(2) / (1 + math.exp(2)), abs=0.02)
    assert row.tolist() == before.tolist()


@pytest.mark.parametrize(
    "options",
    [
        SlotOptions(),
        SlotOptions(temperature=9e-6),
        SlotOptions(temperature=1e-5, top_k=3),  # a draw, but 100,000 times the logits
        SlotOptions(temperature=1.0, top_k=1),
        SlotOptions(temperature=1.0, top_p=1e-30),
        SlotOptions(temperature=1e30, top_k=1, top_p=5e-324, min_p=1.0),
        SlotOptions(temperature=1.0, min_p=1.0),
    ],
    ids=str,
)
def test_options_that_leave_one_id_are_greedy(options):
    for position, row in enumerate(random_rows(20, 300)):
        assert sample_row(row, options, position, 300) == row.argmax()


def test_the_lowest_id_wins_among_equals():
    row = np.zeros(300, dtype=np.float32)
    row[[70, 80, 90]] = 5
    assert sample_row(row, SlotOptions(), 0, 300) == 70
    assert sample_row(row, SlotOptions(temperature=1.0, top_p=1e-6), 0, 300) == 70
    two = {sample_row(row, SlotOptions(temperature=1.0, top_k=2), position, 300) for position in range(50)}
    assert two == {70, 80}
    flat = np.zeros(4, dtype=np.float32)
    half = {sample_row(flat, SlotOptions(temperature=1.0, top_p=0.5), position, 4) for position in range(50)}
    assert half == {0, 1}


@pytest.mark.parametrize("temperature", [1e-5, 1e30, 1e300])
@pytest.mark.parametrize("scale", [1.0, 1e30, 3e38])
@pytest.mark.parametrize("filters", [{}, {"top_k": 10**9}, {"top_p": 0.999}, {"min_p": 1e-9}], ids=str)
def test_extremes_give_a_token(temperature, scale, filters):
    row = np.linspace(-1, 1, 100, dtype=np.float32) * np.float32(scale)
    options = SlotOptions(temperature=temperature, stop_ids=(99,), min_position=1000, **filters)
    tokens = {sample_row(row, options, position, 100) for position in range(50)}
    assert tokens <= set(range(99))
    if scale == 1:
        assert tokens == {98} if temperature == 1e-5 else len(tokens) > 20


def test_a_limit_above_the_vocabulary_is_no_limit():
    row = random_rows(1, 50)[0]
    for position in range(100):
        free = sample_row(row, SlotOptions(temperature=3.0), position, 50)
        assert sample_row(row, SlotOptions(temperature=3.0, top_k=10**9), position, 50) == free


# ---------------------------------------------------------------- logprobs


@given(st.lists(st.floats(-1e3, 1e3, width=32) | st.sampled_from([-3e38, 3e38]), min_size=1), st.data())
def test_a_logprob_is_the_log_softmax(logits, data):
    row, token_id = np.array(logits, np.float32), data.draw(st.integers(0, len(logits) - 1))
    shifted = row.astype(np.float64) - row.max()
    exact = shifted[token_id] - math.log(np.exp(shifted).sum())
    found = log_softmax(row)[token_id]
    assert found <= 0
    assert found == pytest.approx(exact, rel=1e-6, abs=1e-6) or (
        exact < np.finfo(np.float32).min and found == -math.inf
    )


def test_logprobs_are_of_the_raw_logits_and_for_those_who_ask():
    """Whatever bias, masks, filters and temperature made of them, and over padding ids too."""
    options = [
        SlotOptions(),
        *FILTERS,
        *(replace(option, logit_bias=((3, 50.0),), logprobs=True) for option in FILTERS),
    ]
    logits = random_rows(len(options), 60, seed=7)
    logits[:, 55:] += 4  # padding ids with most of the mass
    logits[-1, 9] = np.nan
    slots = Slots(len(options), 40)
    slots.options = [replace(option, stop_ids=(1,), min_position=30) for option in options]
    order = np.arange(len(options), dtype=np.int32)
    rows = SimpleNamespace(
        positions=order + 1, logits_indices=order, sample_slots=order, targets=None, mask_rows=None, top_logprobs=0
    )
    output = sample(None, logits, rows, slots, num_ids=50)
    token_ids, logprobs = output.token_ids[0], output.logprobs[0]
    assert token_ids.tolist() == sample_rows(logits, slots.options, rows.positions + 1, 50).tolist()
    assert logprobs.dtype == np.float32 and logprobs.shape == token_ids.shape
    asked = np.array([option.logprobs for option in options]) & (token_ids >= 0)
    assert asked.tolist() == [False] * 6 + [True] * 4 + [False]
    assert np.isnan(logprobs[~asked]).all()
    raw = logits[asked].astype(np.float64)
    exact = raw - np.log(np.exp(raw).sum(axis=1, keepdims=True))
    assert logprobs[asked] == pytest.approx(exact[np.arange(4), token_ids[asked]], rel=1e-5)


# ---------------------------------------------------------------- penalties, masks, targets, likeliest ids


@pytest.mark.parametrize(("vocab", "num_ids"), [(40, 40), (320, 264), (9001, 9000)])
@pytest.mark.parametrize("law", draw_laws.LAWS, ids=lambda law: law.__name__)
def test_laws_of_a_draw(law, vocab, num_ids):
    law(cpu_draw, vocab, num_ids)
