"""Laws of logprobs: each answer has those of its own tokens, of raw logits, whatever ran beside it."""

import math
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from command import strict_json
from fake_backend import FakeBackend, FakeCodec, FakePending, fake_logprob, hashed, limits, request
from hypothesis import given, settings
from hypothesis import strategies as st
from steps import prompt_step
from test_engine_cpu import REQUESTS, Model
from tiny import TOKENIZER_SIZE, make_tiny_model

from tinyvllm_cli.engine.engine import Engine
from tinyvllm_cli.engine.logprobs import LEAST, Logprobs
from tinyvllm_cli.io.results import encode
from tinyvllm_cli.model.checkpoint import open_checkpoint
from tinyvllm_cli.types import (
    Batch,
    Choice,
    Completion,
    Limits,
    Request,
    SlotOptions,
    StepOutput,
    TokenLogprob,
    Usage,
)

VOCAB = 50


# ---------------------------------------------------------------- a scripted model


def wanted(history: tuple[int, ...], token_id: int, count: int) -> TokenLogprob:
    """What is to be told of a token that was drawn behind these."""

    def one(i: int) -> TokenLogprob:
        return TokenLogprob(i, f" {i}".encode(), fake_logprob(history, i))

    likeliest = sorted(map(one, range(VOCAB)), key=lambda token: (-token.logprob, token.id))
    return replace(one(token_id), top=tuple(likeliest[:count]))


class AskedBackend(FakeBackend):
    def step(self, batch: Batch) -> FakePending:
        self.asked = [*getattr(self, "asked", []), batch.top_logprobs]  # by each step
        return super().step(batch)


def run(requests: list[Request], lim: Limits, **options: Any) -> tuple[list[Completion], AskedBackend, Engine]:
    backend = AskedBackend(lim, hashed(VOCAB))
    engine = Engine(backend, FakeCodec(), eos_token_ids=(2, 7), **options)
    for asked in requests:
        engine.add(asked)
    done: list[Completion] = []
    while not engine.idle:
        done += [event for event in engine.step() if isinstance(event, Completion)]
        engine.check()
    return done, backend, engine


counts = st.none() | st.integers(0, 20)
kinds = st.fixed_dictionaries(
    {"logprobs": counts, "n": st.integers(1, 3), "max_tokens": st.integers(1, 20), "temperature": st.just(1.0)},
    optional={"ignore_eos": st.booleans(), "min_tokens": st.integers(0, 4), "stop_token_ids": st.just((5, 9))},
)


def are_their_own(done: list[Completion], requests: list[Request]) -> None:
    for completion in done:
        asked = requests[completion.request_id]
        for choice in completion.choices:
            if asked.params.logprobs is None:
                assert choice.logprobs is None
                continue
            history = (*asked.prompt_token_ids, *choice.token_ids)
            places = range(len(asked.prompt_token_ids), len(history))
            assert choice.logprobs == tuple(wanted(history[:i], history[i], asked.params.logprobs) for i in places)


@settings(max_examples=150)
@given(
    st.lists(kinds, min_size=1, max_size=6),
    st.integers(7, 30),
    st.integers(1, 5),
    st.integers(1, 3),
    st.sampled_from([5, 16]),
    st.booleans(),
)
def test_each_answer_has_those_of_its_own_tokens(
    params: list[dict[str, Any]], num_blocks: int, slots: int, ahead: int, tokens: int, cache: bool
):
    requests = [request(i, [i] * (1 + i % 3), **found) for i, found in enumerate(params)]
    size = {"num_blocks": num_blocks, "max_batch_tokens": tokens, "max_seq_len": 24}
    lim = limits(max_slots=slots, max_in_flight=ahead, **size)
    done, backend, _ = run(requests, lim, prefix_cache=cache)
    assert len(done) == len(requests)
    are_their_own(done, requests)
    # A step asks for as many as the one of its rows that asks for most.
    of = {bound: requests[prompt[0]].params.logprobs or 0 for bound, prompt in enumerate(backend.bound)}
    assert backend.asked == [max((of[owner] for owner in step.sampled), default=0) for step in backend.steps]


@pytest.mark.parametrize("ahead", [1, 2])
def test_what_gave_its_slot_up_keeps_them(ahead: int):
    kinds = [{"logprobs": i, "max_tokens": 20, "ignore_eos": True} for i in (3, None, 5, 0)]
    requests = [request(i, [i], **found) for i, found in enumerate(kinds)]
    done, _, engine = run(requests, limits(num_blocks=7, max_seq_len=24, max_in_flight=ahead))
    assert engine.stats.preemptions and len(done) == 4
    are_their_own(done, requests)


@given(st.lists(kinds, min_size=1, max_size=6))
def test_what_is_told_changes_no_answer(params: list[dict[str, Any]]):
    """Also of a line without an id, which draws by what it says."""
    silent, told = (
        [
            replace(request(i, [i, 3], **{**found, "logprobs": count}), has_own_id=False)
            for i, (found, count) in enumerate(zip(params, asked, strict=True))
        ]
        for asked in ([None] * len(params), [found["logprobs"] for found in params])
    )
    bare = [
        tuple(replace(choice, logprobs=None) for choice in completion.choices) for completion in run(told, limits())[0]
    ]
    assert bare == [completion.choices for completion in run(silent, limits())[0]]


def test_who_failed_or_left_takes_none_along():
    """Of four that run together, one has no token to draw and one is aborted while tokens of it are in flight."""

    def next_token(history: tuple[int, ...], options: SlotOptions) -> int:
        return -1 if history[0] == 1 and len(history) == 4 else hashed(VOCAB)(history, options)

    backend = AskedBackend(limits(max_in_flight=2), next_token)
    engine = Engine(backend, FakeCodec(), eos_token_ids=())
    requests = [request(i, [i], max_tokens=9, logprobs=2) for i in range(4)]
    for asked in requests:
        engine.add(asked)
    engine.step()
    engine.abort(2)
    done = [event for _ in range(12) for event in engine.step() if isinstance(event, Completion)]
    assert engine.idle
    errors = {completion.request_id: completion.error for completion in done}
    assert list(errors) == [1, 0, 3] and errors[0] is errors[3] is None and errors[1].type == "nan_logits"
    are_their_own(done, requests)


# ---------------------------------------------------------------- numbers that JSON has


def output(*logprobs: float, ids: list[int] | None = None) -> StepOutput:
    """A step with one row: its token's logprob, then those of the likeliest."""
    found = np.array([[logprobs[:1]]], np.float32)[:, 0]
    tops = (np.array([[ids]], np.int32), np.array([[logprobs[1:]]], np.float32)) if ids is not None else (None, None)
    return StepOutput(np.zeros((1, 1), np.int32), found, *tops)


def test_logits_that_lie_further_apart_than_a_float32_says_give_no_infinity():
    told = Logprobs(2)
    told.push(output(-math.inf, 0.0, -math.inf, ids=[4, 5]), 0)
    ((token),) = told.told([5], lambda i: b"x")
    assert [token.logprob, *(other.logprob for other in token.top)] == [LEAST, 0.0, LEAST]
    choice = Choice(0, "x", (5,), "length", logprobs=(token,))
    line = strict_json(encode(Completion(request_id=0, custom_id=0, choices=(choice,), usage=Usage(1, 1))))
    assert np.float32(line["choices"][0]["logprobs"][0]["logprob"]) == LEAST


def test_a_vocabulary_may_have_fewer_tokens_than_are_asked_for():
    told = Logprobs(4)
    told.push(output(-1.0, -1.0, -2.0, math.nan, math.nan, ids=[1, 0, -1, -1]), 0)
    assert [(other.id, other.logprob) for other in told.told([1], lambda i: b"")[0].top] == [(1, -1.0), (0, -2.0)]


def test_a_backend_that_owes_one_is_found_out():
    with pytest.raises(AssertionError, match="owes the logprob"):
        Logprobs(0).push(output(math.nan), 0)


# ---------------------------------------------------------------- on NumPy


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory):
    checkpoint = open_checkpoint(make_tiny_model(tmp_path_factory.mktemp("tiny"), max_position_embeddings=128))
    yield Model(checkpoint)
    checkpoint.tensors.close()


def asking(requests: list[Request]) -> list[Request]:
    """The same with logprobs, of every number and none, and penalties."""
    penalties = [{}, {"presence_penalty": 0.7, "frequency_penalty": 0.4}, {"repetition_penalty": 1.7}]
    return [
        replace(asked, params=replace(asked.params, logprobs=[0, 3, None, 20, 1][i % 5], **penalties[i % 3]))
        for i, asked in enumerate(requests)
    ]


MIXED = asking(REQUESTS)


@pytest.fixture(scope="module")
def alone(model: Model) -> dict[int, Choice]:
    return {asked.request_id: model.answers([asked], slots=1)[asked.request_id] for asked in MIXED}


def same(found: dict[int, Choice], alone: dict[int, Choice]) -> None:
    """The tokens and texts, and logprobs but for the order of sums in a matrix product."""
    assert found.keys() == alone.keys()
    for i, choice in found.items():
        assert replace(choice, logprobs=None) == replace(alone[i], logprobs=None)
        assert (choice.logprobs is None) == (alone[i].logprobs is None)
        for token, other in zip(choice.logprobs or (), alone[i].logprobs or (), strict=True):
            assert numbers(token) == pytest.approx(numbers(other), abs=1e-4)
            assert token.id == other.id and certain(token.top) == certain(other.top)


def certain(top: tuple[TokenLogprob, ...]) -> list[int | None]:
    """The ids in their places, None for those whose neighbours are so near that a rounding could swap them."""
    numbers = np.array([math.inf, *(token.logprob for token in top), top[-1].logprob]) if top else np.empty(2)
    gaps = -np.diff(numbers)
    return [token.id if gaps[i] > 1e-3 < gaps[i + 1] else None for i, token in enumerate(top)]


def numbers(token: TokenLogprob) -> list[float]:
    return [token.logprob, *(other.logprob for other in token.top)]


@pytest.mark.parametrize(
    "machine",
    [
        {"slots": 16},
        {"slots": 16, "max_batch_tokens": 7},
        {"slots": 3, "max_batch_tokens": 64, "max_in_flight": 2},
        {"slots": 16, "num_blocks": 1 + 7, "max_in_flight": 2},
        {"slots": 16, "prefix_cache": False},
    ],
    ids=str,
)
def test_penalties_and_logprobs_do_not_depend_on_their_company(
    model: Model, alone: dict[int, Choice], machine: dict[str, int]
):
    same(model.answers(MIXED, **machine), alone)
    same(model.answers(MIXED[::-1], **machine), alone)


def test_they_are_the_log_softmax_of_the_raw_logits(model: Model, alone: dict[int, Choice]):
    """In float64, of the model's logits behind the prompt and every token: whatever was biased, masked or penalized."""
    for asked in MIXED:
        choice = alone[asked.request_id]
        if asked.params.logprobs is None:
            assert choice.logprobs is None
            continue
        prompt = model.codec.encode(asked)
        step = prompt_step([*prompt, *choice.token_ids[:-1]])
        rows = np.arange(len(prompt) - 1, len(step.token_ids), dtype=np.int32)
        with closing(model.backend(slots=len(rows))) as backend:
            raw = backend.logits(replace(step, logits_indices=rows, sample_slots=np.zeros_like(rows)))
        exact = raw.astype(np.float64)
        exact -= np.log(np.exp(exact).sum(axis=1, keepdims=True))
        assert choice.logprobs is not None and len(choice.logprobs) == len(choice.token_ids) == len(rows)
        for token_id, token, row in zip(choice.token_ids, choice.logprobs, exact, strict=True):
            greatest = np.sort(row[:TOKENIZER_SIZE])[::-1][: asked.params.logprobs]
            ids = [other.id for other in token.top]
            assert token.id == token_id and len(set(ids)) == len(ids) and max(ids, default=0) < TOKENIZER_SIZE
            assert numbers(token) == pytest.approx(row[[token_id, *ids]], abs=1e-4)
            assert numbers(token) == pytest.approx([row[token_id], *greatest], abs=1e-4)
