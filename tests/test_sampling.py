"""The options of a slot: seeds that know the request and not its place, stop ids and where they may stand."""

from dataclasses import replace

import numpy as np
import pytest

from tinyvllm_cli.engine.sampling import (
    canonical_json,
    canonical_request,
    request_seed,
    sample_options,
    sample_seed,
    slot_options,
)
from tinyvllm_cli.types import Message, Request, SamplingParams

PLAIN = Request(request_id=0, custom_id="line-1", line=1, has_own_id=False, prompt="Hi")


def with_id(custom_id):
    return Request(request_id=0, custom_id=custom_id, prompt="Hi")


# The first 8 bytes that coreutils' b2sum prints for the JSON in the comment
@pytest.mark.parametrize(
    ("run_seed", "custom_id", "first_bytes"),
    [
        (0, "a", "9417f14a0a661936"),  # [0,"a"]
        (0, 17, "052f8b6e72f1ca2f"),  # [0,17]
        (0, "17", "168e8274c79a562f"),  # [0,"17"]
        (2**64 - 1, "ü", "c17a19ad0988567a"),  # [18446744073709551615,"ü"]
    ],
)
def test_seed_is_the_hash_of_run_seed_and_id(run_seed, custom_id, first_bytes):
    assert request_seed(with_id(custom_id), run_seed) == int.from_bytes(bytes.fromhex(first_bytes), "little")


@pytest.mark.parametrize("seed", [0, 5, 2**64 - 1])
def test_a_requests_own_seed_wins(seed):
    assert request_seed(replace(PLAIN, params=SamplingParams(seed=seed)), 3) == seed


# The same of these
@pytest.mark.parametrize(
    ("seed", "index", "first_bytes"),
    [
        (0, 1, "d4feca4dab1c5533"),  # [0,1]
        (2**64 - 1, 255, "a99db97cf24766b9"),  # [18446744073709551615,255]
    ],
)
def test_the_seed_of_a_sample_is_the_hash_of_seed_and_index(seed, index, first_bytes):
    assert sample_seed(seed, index) == int.from_bytes(bytes.fromhex(first_bytes), "little")


def test_samples_differ_by_their_seeds_alone():
    options = slot_options(with_id("a"), 3, run_seed=5, eos_token_ids=(2, 7))
    samples = [sample_options(options, i) for i in range(300)]
    assert samples[0] == options and len({sample.seed for sample in samples}) == 300
    assert {replace(sample, seed=0) for sample in samples} == {replace(options, seed=0)}


def test_how_many_answers_there_are_and_what_is_told_of_them_changes_no_seed():
    assert request_seed(replace(PLAIN, params=SamplingParams(logprobs=0)), 0) == request_seed(PLAIN, 0)
    assert request_seed(replace(PLAIN, params=SamplingParams(n=3)), 0) == request_seed(PLAIN, 0)


def test_with_an_id_the_seed_depends_on_nothing_else_of_the_line():
    request = with_id("a")
    other = replace(request, request_id=9, line=8, prompt="Other", params=SamplingParams(temperature=1.0))
    assert request_seed(request, 0) == request_seed(other, 0)
    assert request_seed(request, 0) != request_seed(request, 1)


def test_without_an_id_the_seed_does_not_know_the_place_in_the_file():
    moved = replace(PLAIN, request_id=7, custom_id="line-8", line=8, metadata_json=b'{"a": 1}')
    assert request_seed(PLAIN, 0) == request_seed(moved, 0)


def test_without_an_id_the_seed_depends_on_what_determines_the_answer():
    variants = [
        PLAIN,
        replace(PLAIN, prompt="Ho"),
        replace(PLAIN, raw=True),
        replace(PLAIN, continue_final_message=True),
        replace(PLAIN, chat_template_kwargs={"a": 1, "b": 2}),
        replace(PLAIN, params=SamplingParams(max_tokens=3)),
        replace(PLAIN, params=SamplingParams(presence_penalty=1.0)),
        replace(PLAIN, params=SamplingParams(logit_bias=((3, 1.0),))),
        replace(PLAIN, prompt=None, prompt_token_ids=(1, 2)),
        replace(PLAIN, prompt=None, messages=(Message("user", "Hi"),)),
        replace(PLAIN, prompt=None, messages=(Message("system", "Hi"),)),
    ]
    seeds = [request_seed(request, run_seed) for request in variants for run_seed in (0, 1)]
    assert len(set(seeds)) == 2 * len(variants)
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_the_order_of_keys_is_no_difference():
    one, other = ({"a": 1, "b": {"c": 2, "d": 3}}, {"b": {"d": 3, "c": 2}, "a": 1})
    assert request_seed(replace(PLAIN, chat_template_kwargs=one), 0) == request_seed(
        replace(PLAIN, chat_template_kwargs=other), 0
    )


def test_half_a_surrogate_pair_is_no_fault():
    assert request_seed(with_id("\ud800"), 0) != request_seed(with_id("\ud801"), 0)


def test_stop_ids_are_eos_and_the_requests_own():
    params = SamplingParams(stop_token_ids=(30, 7), min_tokens=3)
    options = slot_options(replace(PLAIN, params=params), 5, run_seed=0, eos_token_ids=(2, 7))
    assert sorted(options.stop_ids) == [2, 7, 30]
    # Positions 5, 6 and 7 hold the three tokens that must come first.
    assert options.min_position == 8


def test_an_ignored_eos_is_no_stop():
    params = SamplingParams(stop_token_ids=(30,), ignore_eos=True)
    assert slot_options(replace(PLAIN, params=params), 5, run_seed=0, eos_token_ids=(2, 7)).stop_ids == (30,)


def test_options_are_the_requests_params():
    values = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "seed": 4, "logit_bias": ((3, -1.0),)}
    values |= {"presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.5}
    options = slot_options(replace(PLAIN, params=SamplingParams(**values)), 5, run_seed=0, eos_token_ids=())
    assert {name: getattr(options, name) for name in values} == values


@pytest.mark.parametrize("logprobs", [None, 0, 20])
def test_logprobs_are_asked_for_by_any_number(logprobs):
    params = SamplingParams(logprobs=logprobs)
    options = slot_options(replace(PLAIN, params=params), 5, run_seed=0, eos_token_ids=())
    assert options.logprobs is (logprobs is not None)


def test_the_output_starts_behind_the_prompt():
    assert slot_options(PLAIN, 5, run_seed=0, eos_token_ids=()).output_start == 5


@pytest.mark.parametrize("penalty", [5e-324, 1e-30, 1.8, 1e30, 1.7e308])
def test_a_repetition_penalty_leaves_every_logit_a_float32(penalty):
    """For a logit below 3e8, which is more than any model's."""
    params = SamplingParams(repetition_penalty=penalty)
    found = np.float32(slot_options(replace(PLAIN, params=params), 5, run_seed=0, eos_token_ids=()).repetition_penalty)
    assert found == np.float32(min(max(penalty, 1e-30), 1e30))
    logits = np.float32([3e8, 1e-8, -1e-8, -3e8])
    with np.errstate(over="raise", divide="raise", invalid="raise"):
        assert np.isfinite([logits / found, logits * found]).all()


def test_requests_that_use_no_new_field_have_the_seeds_and_fingerprints_that_they_had():
    """What is hashed holds no field at its default: these are the bytes of before there were penalties."""
    request = replace(PLAIN, params=SamplingParams(max_tokens=3, temperature=0.5))
    assert canonical_json(canonical_request(request)) == (
        b'{"chat_template_kwargs":{},"continue_final_message":false,"messages":null,'
        b'"params":{"max_tokens":3,"temperature":0.5},"prompt":"Hi","prompt_token_ids":null,"raw":false}'
    )
