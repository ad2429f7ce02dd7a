"""Laws of the sample op on any device of gpu_tools: the tokens of backends/cpu/sample.py, wherever they are drawn."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from draw_statistics import assert_follows, probabilities
from gpu_tools import Array, OpDevice, assert_close, assert_same_bits, read
from sample_tools import FILTERS, LATE, assert_tokens, draw, random_logits, seeded
from test_sample import KNOWN_ANSWERS, words

from tinyvllm_cli.backends.cpu.sample import _gumbel_of, gumbel_from_words, sample_row
from tinyvllm_cli.backends.gpu.sample import UPLOAD_EDITS
from tinyvllm_cli.types import F32, I32, SlotOptions

# ---------------------------------------------------------------- noise

PROBE = """
#include "philox.cuh"
extern "C" __global__ void philox(uint4* drawn, const uint4* counters, const uint2* keys) {
    wait_for_kernel_before();
    drawn[threadIdx.x] = philox4x32_10(counters[threadIdx.x], keys[threadIdx.x]);
}
extern "C" __global__ void noise(float* drawn, const u32* words) {
    wait_for_kernel_before();
    drawn[threadIdx.x] = gumbel(words[threadIdx.x]);
}
"""
Launch = Callable[[str, int, tuple[Any, ...]], None]  # of the kernels of PROBE: name, threads, arguments


def philox_gives_its_known_answers(launch: Launch, place: Callable[[Array], Any]) -> None:
    counters, keys, outputs = (np.stack([words(text) for text in texts]) for texts in zip(*KNOWN_ANSWERS, strict=True))
    drawn = place(np.zeros_like(outputs))
    launch("philox", len(outputs), (drawn, place(counters), place(keys)))
    assert read(drawn).tolist() == outputs.tolist()


def noise_of_the_first_and_last_words_is_the_cpus(launch: Launch, place: Callable[[Array], Any]) -> None:
    """Finite among them; nothing that is drawn shows the rarest words."""
    drawn_words = np.array([*range(300), 2**31, *range(2**32 - 300, 2**32)], np.uint32)
    drawn = place(np.zeros(len(drawn_words), np.float32))
    launch("noise", len(drawn_words), (drawn, place(drawn_words)))
    assert_close("gumbel", read(drawn), gumbel_from_words(drawn_words), dtype="float32", slack=2.0**-20)


# ---------------------------------------------------------------- the tokens of the CPU


def tokens_are_the_cpus(
    device: OpDevice, vocab: int, num_ids: int, *, edited: bool, filters: Sequence[SlotOptions] = FILTERS
) -> None:
    """For every set of filters, with bias and masks where edited."""
    logits, positions = random_logits(len(filters), vocab, seed=vocab), np.arange(len(filters)) * 7 % 60
    options = seeded(filters, seed=1)
    if edited:
        best = logits[:, :num_ids].argmax(axis=1).tolist()
        bias = ((0, 9.5), (num_ids - 1, 10.25), (num_ids, 100.0), (vocab + 5, 100.0))
        masked = (0, 2, num_ids, vocab + 7)
        options = [
            replace(slot, logit_bias=((token, -3.0), *bias), stop_ids=(token, *masked), min_position=LATE * (r % 2))
            for r, (slot, token) in enumerate(zip(options, best, strict=True))
        ]
    drawn = draw(device, logits, options, positions, num_ids)
    assert_tokens(drawn.token_ids, logits, options, positions, num_ids)


def ties_go_to_the_lowest_ids(
    device: OpDevice, vocab: int, num_ids: int, filters: Sequence[SlotOptions] = FILTERS
) -> None:
    """Logits of few values, denormals among them; in every other row zeros of both signs are the best."""
    values = np.array([-7, -0.5, -0.0, 0.0, 1e-45, -1e-45, 1e-39, 1.5, 2.25], np.float32)
    logits = np.random.default_rng(vocab).choice(values, (2 * len(filters), vocab))
    logits[::2] = np.random.default_rng(vocab).choice(values[1:4], (len(filters), vocab))
    logits[::2, :2] = -0.5, -0.0
    options = seeded([slot for slot in filters for _ in range(2)], seed=2)
    positions = np.arange(len(options))
    drawn = draw(device, logits, options, positions, num_ids)
    assert_tokens(drawn.token_ids, logits, options, positions, num_ids)


def borders_are_exact(device: OpDevice, vocab: int, sizes: Sequence[int], draws: int) -> None:
    """The last id that a filter keeps comes where it wins, and the first that it leaves out never does.

    vocab: a power of 2, so that shares of equal logits are exact.
    """
    spread = np.random.default_rng(13).normal(0, 1, vocab).astype(np.float32)
    for logits in (spread, np.round(spread), np.zeros(vocab, np.float32)):
        order = np.argsort(-logits, kind="stable")
        mass = np.cumsum(np.exp(logits[order].astype(np.float64) - logits.max()))
        options, positions, wanted = [], [], []
        for size in sizes:
            share = mass[size - 1] - (mass[size - 1] - mass[size - 2]) * (0.5 if logits.any() else 0)
            filters = (
                {"top_k": size},
                {"top_p": share / mass[-1]},
                {"top_k": 2 * size, "top_p": share / mass[2 * size - 1]},
                {"top_k": size, "top_p": 1 - 1e-9},
            )
            at = contested(logits, order[: size + 1], draws)
            for setting in filters:
                slot = SlotOptions(temperature=1.0, **setting)
                options += [slot] * draws
                positions += at
                wanted += [sample_row(logits, slot, position, vocab) for position in at]
            last, next_id = order[size - 1 : size + 1]
            assert last in wanted[-4 * draws :] and next_id not in wanted[-4 * draws :]
        found = draw(device, logits[None], options, positions, vocab, max_seq_len=1).token_ids
        wrong = np.flatnonzero(found != wanted)
        assert not len(wrong), (
            f"{options[wrong[0]]}: token {found[wrong[0]]}, wanted {wanted[wrong[0]]}; {len(wrong)} so"
        )


def contested(logits: F32, ids: npt.NDArray[np.intp], count: int) -> list[int]:
    """The first positions at which, with seed 0 and temperature 1, one of the last two of these ids would win."""
    positions = (
        position
        for position in itertools.count()
        if (logits[ids] + _gumbel_of(ids, 0, position, len(logits))).argmax() >= len(ids) - 2
    )
    return list(itertools.islice(positions, count))


def extremes_are_the_cpus(device: OpDevice, vocab: int, filters: Sequence[SlotOptions] = FILTERS) -> None:
    """Logits up to the range of float32, masks among them, at any temperature."""
    scales = np.repeat(np.array([1e-42, 1e-3, 1e4, 1e30, 3e38], np.float32), len(filters))
    logits = np.random.default_rng(5).uniform(-1, 1, (len(scales), vocab)).astype(np.float32) * scales[:, None]
    options = [replace(slot, stop_ids=(1, 2), min_position=LATE) for slot in seeded([*filters] * 5, seed=3)]
    positions = np.arange(len(options))
    drawn = draw(device, logits, options, positions, vocab, max_seq_len=len(options))
    assert_tokens(drawn.token_ids, logits, options, positions, vocab)


# ---------------------------------------------------------------- rows without a token


def broken_rows_give_no_token(device: OpDevice, vocab: int, num_ids: int) -> None:
    """NaN or an infinity anywhere, in padding ids and under masks too; the neighbours are drawn as ever."""
    places = sorted({0, 1, 4, num_ids - 1, num_ids, vocab - 1})
    bad = [(place, value) for place in places for value in (np.nan, np.inf, -np.inf)]
    count = 2 * len(bad)
    options = seeded([replace(FILTERS[r % len(FILTERS)], logprobs=True) for r in range(count)], seed=4)
    options = [replace(slot, stop_ids=(0, 4), min_position=LATE * (r % 3)) for r, slot in enumerate(options)]
    logits, positions = random_logits(count, vocab, seed=6), np.arange(count)
    for r, (place, value) in enumerate(bad):
        logits[2 * r, place] = value
    drawn = draw(device, logits, options, positions, num_ids)
    assert drawn.token_ids[::2].tolist() == [-1] * len(bad)
    assert_tokens(drawn.token_ids[1::2], logits[1::2], options[1::2], positions[1::2], num_ids)
    assert np.isnan(drawn.logprobs[::2]).all() and np.isfinite(drawn.logprobs[1::2]).all()


def nothing_allowed_is_said(device: OpDevice, num_ids: int, filters: Sequence[SlotOptions] = FILTERS) -> None:
    masked = tuple(range(num_ids))
    options = [replace(slot, stop_ids=masked, min_position=5, logprobs=True) for slot in seeded(filters, seed=5)]
    logits = random_logits(len(options), num_ids + 3, seed=7)
    before, after = (draw(device, logits, options, [position] * len(options), num_ids) for position in (4, 5))
    assert before.token_ids.tolist() == [-2] * len(options)
    assert np.isnan(before.logprobs).all()
    assert_tokens(after.token_ids, logits, options, [5] * len(options), num_ids)


# ---------------------------------------------------------------- what does not matter, where tokens go


def a_row_knows_no_neighbour(device: OpDevice, vocab: int, filters: Sequence[SlotOptions] = FILTERS) -> None:
    """The same token and the same bits of its logprob twice, at any place, in any company."""
    count = len(filters)
    logits, positions = random_logits(count, vocab, seed=8), np.arange(count)
    options = seeded([replace(slot, logprobs=True) for slot in filters], seed=6)
    options = [replace(slot, logit_bias=((r, 4.0),) * (r % 2)) for r, slot in enumerate(options)]
    first = draw(device, logits, options, positions, vocab)
    for order in (np.roll(np.arange(count)[::-1], 2), np.array([3]), np.array([2, 2, 4])):
        again = draw(device, logits[order], [options[r] for r in order], positions[order], vocab)
        assert again.token_ids.tolist() == first.token_ids[order].tolist()
        assert_same_bits("logprobs at other places", again.logprobs, first.logprobs[order])


def tokens_lie_in_their_slots_at_their_positions(device: OpDevice) -> None:
    """The last token of a full context has no place."""
    options, slots, positions = [SlotOptions()] * 5, [4, 0, 3, 1, 2], [0, 9, 5, 10, 3]
    logits = random_logits(5, 40, seed=9)
    logits[4, 7] = np.nan
    drawn = draw(device, logits, options, positions, 37, slots=slots, max_seq_len=10)
    wanted = np.full((5, 10), -1)
    for slot, position, token in zip(slots, positions, drawn.token_ids.tolist(), strict=True):
        wanted[slot, position : position + 1] = token
    assert drawn.table.tolist() == wanted.tolist()
    assert drawn.token_ids[4] == -1


def no_rows_give_no_tokens(device: OpDevice) -> None:
    assert draw(device, random_logits(0, 8, seed=0), [], [], 8).token_ids.shape == (0,)


def edits_past_an_upload_all_count(device: OpDevice) -> None:
    """As many as ids in some rows, none in others, several launches of them."""
    vocab, num_ids = 3000, 2990
    logits = random_logits(24, vocab, seed=10)
    options = [
        replace(slot, logit_bias=tuple((token, float(token * 7 % 5)) for token in range(vocab))) if r % 3 else slot
        for r, slot in enumerate(seeded((FILTERS * 2)[:24], seed=7))
    ]
    options = [replace(slot, stop_ids=(1, 5, 9), min_position=LATE, logprobs=True) for slot in options]
    assert sum(len(slot.logit_bias) for slot in options) > 2 * UPLOAD_EDITS
    positions = np.arange(24)
    drawn = draw(device, logits, options, positions, num_ids)
    assert_tokens(drawn.token_ids, logits, options, positions, num_ids)
    assert_logprobs(drawn.logprobs, drawn.token_ids, logits)


def edits_outside_of_the_row_do_nothing(device: OpDevice, vocab: int, num_ids: int) -> None:
    """Should the host ever send such ids: neither the token nor any number in memory changes."""
    options = seeded([slot for slot in FILTERS if slot.temperature][:6], seed=14)
    outside = tuple((token, 9.0) for token in (num_ids, vocab, vocab + 1, 2**31 - 1))
    spoiled = [replace(slot, logit_bias=outside) for slot in options]
    logits, positions = random_logits(len(options), vocab, seed=15), np.arange(len(options))
    wanted = draw(device, logits, options, positions, num_ids).token_ids
    found = draw(device, logits, spoiled, positions, num_ids, planned_ids=2**31).token_ids
    assert found.tolist() == wanted.tolist()


# ---------------------------------------------------------------- probabilities


def assert_logprobs(logprobs: F32, token_ids: I32, logits: F32) -> None:
    """Against float64, within the error of the kernel's sum of exp(x - max)."""
    raw = logits.astype(np.float64)
    shifted = raw - raw.max(axis=1, keepdims=True)
    exact = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    at = np.arange(len(logits)), token_ids
    # Roundings on the way: two differences, log, and of the sum a thread's share, ten more for the block, and exp's 2.
    roundings = logits.shape[1] / 1024 + 16
    slack = 2.0**-24 * (2 * np.abs(shifted[at]) + np.abs(exact[at]) + roundings)
    assert_close("sample", logprobs, exact[at], dtype="float32", slack=slack)


def logprobs_are_of_the_raw_logits(
    device: OpDevice, vocab: int, num_ids: int, filters: Sequence[SlotOptions] = FILTERS
) -> None:
    """Whatever was done to draw the token, and over padding ids too; NaN where nobody asked."""
    bias, asked = ((1, 50.0), (3, 49.0)), np.arange(len(filters)) % 4 != 2
    options = [
        replace(slot, logprobs=bool(asked[r]), logit_bias=bias * (r % 2), stop_ids=(2,), min_position=LATE)
        for r, slot in enumerate(seeded(filters, seed=8))
    ]
    logits = random_logits(len(options), vocab, seed=11)
    drawn = draw(device, logits, options, np.arange(len(options)), num_ids)
    assert np.isnan(drawn.logprobs[~asked]).all()
    assert_logprobs(drawn.logprobs[asked], drawn.token_ids[asked], logits[asked])


def a_certain_token_always_comes(device: OpDevice, vocab: int, count: int) -> None:
    """One logit at 60 among zeros: its probability is 1 - 1e-21, so another one is a fault of the noise."""
    logits = np.zeros((1, vocab), np.float32)
    token = vocab - 2
    logits[0, token] = 60
    options = seeded([SlotOptions(temperature=1.0)] * count, seed=9)
    drawn = draw(device, logits, options, np.arange(count) * 3, vocab, max_seq_len=1)
    others = np.flatnonzero(drawn.token_ids != token)
    assert not len(others), (
        f"V {vocab}: {len(others)} of {count} draws, as row {others[:5]}: {drawn.token_ids[others[:5]]}"
    )


def draws_follow_the_probabilities(device: OpDevice, vocab: int, options: SlotOptions, count: int) -> None:
    """Over the most probable ids, and all others together."""
    logits = random_logits(1, vocab, seed=12)
    logits[0, :5] += 9
    logits[0, 0] += 2 * options.temperature
    expected = probabilities(logits[0], options)
    slots = seeded([options] * count, seed=int(1000 * options.temperature))
    drawn = draw(device, logits, slots, np.arange(count), vocab, max_seq_len=1).token_ids
    assert_follows(drawn, expected, f"V {vocab}, {options}")
