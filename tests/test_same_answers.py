"""The benchmark of answers in several companies: what it compares, and that it sees a difference."""

from __future__ import annotations

from contextlib import closing

import pytest
from scripts import script

from tinyvllm_cli.bench.subject import open_random
from tinyvllm_cli.config import EngineOptions

same = script("same_answers")


def test_some_requests_share_a_prefix_and_others_do_not():
    prompts = [request.prompt_token_ids for request in same.make_requests(1000)]
    first = prompts[0][: same.PREFIX]
    begins = [prompt[: same.PREFIX] == first for prompt in prompts]
    assert begins == [i % same.OF < same.SHARED for i in range(same.COUNT)]
    assert all(0 <= token < 1000 for prompt in prompts for token in prompt)


def test_an_answer_is_its_tokens_and_their_log_probabilities_in_any_company(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(same, "OUTPUT", 2)
    monkeypatch.setattr(same, "PREFIX", 20)
    monkeypatch.setattr(same, "LONE", (3, 9))
    monkeypatch.setattr(same, "COUNT", 6)
    options = EngineOptions(slots=6, max_model_len=128)
    with closing(open_random("smollm2-135m", backend="cpu", options=options, write=None)) as subject:
        requests = same.make_requests(subject.num_ids)
        whole, some = (same.answer(subject, requests, at_once) for at_once in (6, 2))
    ids = [{key: [token for token, _ in answer] for key, answer in found.items()} for found in (whole, some)]
    assert ids[0] == ids[1] and all(len(tokens) == 2 for tokens in ids[0].values()), "of a CPU bits may differ"


def test_one_bit_is_a_difference():
    whole = {0: ((5, -0.25),), 1: ((7, -0.5),), 2: ((8, -1.0),)}
    assert same.differing(whole, dict(whole)) == 0
    assert same.differing(whole, {1: ((7, -0.5000000596046448),), 2: ((8, -1.0),)}) == 1
    assert same.differing(whole, {2: ((9, -1.0),)}) == 1
