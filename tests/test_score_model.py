"""Scores of the default model: those of transformers, in any order, company and chunks."""

import json
import random
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tinyvllm_cli.config import EngineOptions
from tinyvllm_cli.engine.scoring import ScoringEngine
from tinyvllm_cli.load import LoadedModel, open_engine
from tinyvllm_cli.types import Completion, Request, Score

pytestmark = pytest.mark.model

# By transformers in float32 on the de-quantized weights (tests/reference/make_scores.py); the file names its versions.
REFERENCE = json.loads((Path(__file__).parent / "data" / "reference" / "scores.json").read_text())
REQUESTS = [
    Request(request_id=i, custom_id=i, prompt=record["text"], raw=True) for i, record in enumerate(REFERENCE["texts"])
]
REQUESTS += [
    Request(request_id=i, custom_id=i, prompt=record["context"], continuations=tuple(record["continuations"]), raw=True)
    for i, record in enumerate(REFERENCE["pairs"], start=len(REQUESTS))
]
TOLERANCE = 1e-4


def load(model: Path, **options: int) -> LoadedModel:
    config = EngineOptions(max_model_len=128, **options)
    return open_engine(str(model), backend="cpu", config=config, report=print)


def scores(loaded: LoadedModel, requests: list[Request], *, prefix_cache: bool = True) -> dict[int, tuple[Score, ...]]:
    engine = ScoringEngine(loaded.backend, loaded.codec, prefix_cache=prefix_cache)
    for request in requests:
        engine.add(request)
    found = {}
    while not engine.idle:
        for completion in engine.step():
            assert isinstance(completion, Completion) and completion.error is None
            found[completion.request_id] = completion.scores
    return found


@pytest.fixture(scope="module")
def loaded(default_model: Path) -> Iterator[LoadedModel]:
    with closing(load(default_model)) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def found(loaded: LoadedModel) -> dict[int, tuple[Score, ...]]:
    return scores(loaded, REQUESTS)


def test_texts_and_continuations_have_the_scores_of_transformers(found: dict[int, tuple[Score, ...]]):
    wanted = [[record] for record in REFERENCE["texts"]] + [record["scores"] for record in REFERENCE["pairs"]]
    assert len(REFERENCE["texts"]) == 200 and len(found) == len(wanted)
    for i, records in enumerate(wanted):
        assert [(len(score.token_logprobs), score.greedy) for score in found[i]] == [
            (record["tokens"], record["greedy"]) for record in records
        ]
        for score, record in zip(found[i], records, strict=True):
            assert score.logprob == pytest.approx(record["logprob"], rel=TOLERANCE), REQUESTS[i].prompt


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_order_company_slots_chunks_and_cache_change_nothing(
    default_model: Path, found: dict[int, tuple[Score, ...]], prefix_cache: bool
):
    requests = random.Random(prefix_cache).sample(REQUESTS[:200], 15) + REQUESTS[200:]
    with closing(load(default_model, slots=7, max_batch_tokens=18)) as loaded:
        again = scores(loaded, requests, prefix_cache=prefix_cache)
    for request in requests:
        for score, first in zip(again[request.request_id], found[request.request_id], strict=True):
            assert score.greedy == first.greedy
            assert score.token_logprobs == pytest.approx(first.token_logprobs, abs=TOLERANCE, rel=0)
