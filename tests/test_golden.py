"""The default model against transformers: prompt ids, first logits, and greedy answers in any company."""

import json
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from steps import prompt_step

from tinyvllm_cli.config import EngineOptions
from tinyvllm_cli.load import open_engine
from tinyvllm_cli.types import Completion, Message, Request, SamplingParams

pytestmark = pytest.mark.model

# Greedy output of transformers in float32 on the de-quantized weights; the file names its versions.
GOLDEN = json.loads((Path(__file__).parent / "data" / "golden" / "smollm2_135m_instruct.json").read_text())
RECORDS = GOLDEN["records"]
PROMPTS = [record["prompt_text"][-40:] for record in RECORDS]
LOGIT_TOLERANCE = 2e-3


def load(model, **config):
    return open_engine(str(model), backend="cpu", config=EngineOptions(max_model_len=128, **config), report=print)


@pytest.fixture(scope="module")
def loaded(default_model):
    with closing(load(default_model, slots=8)) as loaded:
        yield loaded


def request(index):
    record = RECORDS[index]
    fields = {"prompt": record["prompt"], "raw": True}
    if record["kind"] == "chat":
        fields = {"messages": tuple(Message(**message) for message in record["prompt"])}
    params = SamplingParams(max_tokens=GOLDEN["decode"]["max_new_tokens"])
    return Request(request_id=index, custom_id=index, params=params, **fields)


def answers(engine, indices):
    """The only choice of each request, by index."""
    for index in indices:
        engine.add(request(index))
    completions = []
    while not engine.idle:
        completions += [event for event in engine.step() if isinstance(event, Completion)]
    assert [done.error for done in completions] == [None] * len(indices)
    return {done.request_id: done.choices[0] for done in completions}


def check_answers(choices):
    reasons = {"eos": "stop", "length": "length"}
    for index, record in enumerate(RECORDS):
        assert list(choices[index].token_ids) == record["output_ids"]
        assert choices[index].text == record["output_text"]
        assert choices[index].finish_reason == reasons[record["finish_reason"]]


def test_tokenizer_gives_the_known_ids(loaded):
    for case in GOLDEN["tokenizer_cases"]:
        assert loaded.codec.tokenizer.encode(case["text"], add_bos=False) == case["ids"]


@pytest.mark.parametrize("index", range(len(RECORDS)), ids=PROMPTS)
def test_prompt_ids_are_equal(loaded, index):
    assert loaded.codec.encode(request(index)) == RECORDS[index]["prompt_ids"]


@pytest.mark.parametrize("index", range(len(RECORDS)), ids=PROMPTS)
def test_first_logits_are_equal(loaded, index):
    logits = loaded.backend.logits(prompt_step(RECORDS[index]["prompt_ids"]))[0].astype(np.float64)
    ids, values = zip(*RECORDS[index]["first_step_top20"], strict=True)
    assert np.abs(logits[list(ids)] - values).max() < LOGIT_TOLERANCE
    assert np.delete(logits, ids).max() < min(values) + LOGIT_TOLERANCE
    top = logits.max()
    logsumexp = top + np.log(np.exp(logits - top).sum())
    assert abs(logsumexp - RECORDS[index]["first_step_logsumexp"]) < LOGIT_TOLERANCE


def test_answers_in_one_batch_are_equal_in_either_order(loaded):
    indices = list(range(len(RECORDS)))
    check_answers(answers(loaded.engine, indices))
    check_answers(answers(loaded.engine, indices[::-1]))


@pytest.mark.parametrize(
    "config", [{"slots": 1}, {"slots": 3, "max_batch_tokens": 16}], ids=["one slot", "chunks and refilled slots"]
)
def test_answers_are_equal_in_other_slots_and_chunks(default_model, config):
    with closing(load(default_model, **config)) as loaded:
        check_answers(answers(loaded.engine, range(len(RECORDS))))
