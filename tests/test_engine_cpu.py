"""The engine over the NumPy backend and real text: an answer is the same in any company, order, slot, chunk, memory."""

import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from steps import prompt_step
from tiny import BYTE_OFFSET, EOS_IDS, make_tiny_model

from tinyvllm_cli.backends.choose import engine_config
from tinyvllm_cli.backends.cpu.backend import CpuBackend
from tinyvllm_cli.backends.cpu.sample import sample_rows
from tinyvllm_cli.config import EngineOptions
from tinyvllm_cli.engine.engine import Engine
from tinyvllm_cli.engine.sampling import request_seed, sample_seed, slot_options
from tinyvllm_cli.model.checkpoint import Checkpoint, open_checkpoint
from tinyvllm_cli.text.codec import TextCodec
from tinyvllm_cli.text.tokenizer import load_tokenizer
from tinyvllm_cli.types import U32, Choice, Completion, Constraint, Request, SamplingParams

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 2}, "old": {"type": "boolean"}},
        "required": ["name", "old"],
    }
)
ANSWERS: list[dict[str, Any]] = [  # ends of every kind, greedy and drawn
    {},
    {"temperature": 1.0},
    {"temperature": 1.5, "top_k": 30, "seed": 5, "ignore_eos": True},
    {"temperature": 1.0, "stop": ("a", "e"), "min_tokens": 2, "logit_bias": ((BYTE_OFFSET + ord("a"), 4.0),)},
    {"temperature": 2.0, "stop_token_ids": tuple(range(BYTE_OFFSET, BYTE_OFFSET + 90)), "min_tokens": 4},
    {"temperature": 0.8, "top_p": 0.9, "min_tokens": 1, "logit_bias": ((EOS_IDS[1], 4.0),)},
]
CONSTRAINED: list[dict[str, Any]] = [
    {"constraint": Constraint("choice", '["more than one", "more and more", "less"]', "choice"), "min_tokens": 3},
    {"constraint": Constraint("regex", "(ab|[c-f]+x{6})*", "regex"), "temperature": 1.2, "frequency_penalty": 0.7},
    {"constraint": Constraint("json_schema", SCHEMA, "json_schema"), "temperature": 1.0, "ignore_eos": True},
]
REQUESTS = [
    Request(
        request_id=i,
        custom_id=f"r-{i}",
        prompt="Tell me more. "[: 1 + 5 * i % 13] * (1 + i % 5),
        params=SamplingParams(max_tokens=5 + 3 * i % 17, **answer),
    )
    for i, answer in enumerate([*ANSWERS, *ANSWERS, *ANSWERS[:4], *CONSTRAINED, *CONSTRAINED, *CONSTRAINED])
]


class Model:
    """A tiny checkpoint with its text side, run by a fresh engine each time."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        eos_token_ids = checkpoint.generation.eos_token_ids
        tokenizer = load_tokenizer(checkpoint.path)
        self.codec = TextCodec(tokenizer, None, None, checkpoint.config.vocab_size, eos_token_ids)

    def backend(self, *, num_blocks: int | None = None, max_in_flight: int = 1, **config: Any) -> CpuBackend:
        return CpuBackend(
            self.checkpoint.config,
            self.checkpoint.tensors,
            engine_config("cpu", EngineOptions(max_model_len=96, **config), self.checkpoint),
            tokenizer_size=self.codec.size,
            num_blocks=num_blocks,
            max_in_flight=max_in_flight,
        )

    def answers(self, requests: Sequence[Request], **machine: Any) -> dict[int, Choice]:
        """The first answer to each request."""
        return {request_id: choices[0] for request_id, choices in self.choices(requests, **machine).items()}

    def choices(
        self,
        requests: Sequence[Request],
        *,
        num_blocks: int | None = None,
        max_in_flight: int = 1,
        prefix_cache: bool = True,
        **config: Any,
    ) -> dict[int, tuple[Choice, ...]]:
        backend = self.backend(num_blocks=num_blocks, max_in_flight=max_in_flight, **config)
        eos_token_ids = self.checkpoint.generation.eos_token_ids
        engine = Engine(backend, self.codec, eos_token_ids=eos_token_ids, prefix_cache=prefix_cache)
        for request in requests:
            engine.add(request)
        done: list[Completion] = []
        while not engine.idle:
            done += [event for event in engine.step() if isinstance(event, Completion)]
            engine.check()
        backend.close()
        self.stats = engine.stats
        assert [completion.error for completion in done] == [None] * len(requests)
        return {completion.request_id: completion.choices for completion in done}


def near_ties(model: Model, requests: Sequence[Request], answers: dict[int, Choice], **config: Any) -> int:
    """How many tokens of some answers would be others if their logits were lower by a thousandth."""
    count = 0
    for request in requests:
        prompt, token_ids = model.codec.encode(request), answers[request.request_id].token_ids
        eos_token_ids = model.checkpoint.generation.eos_token_ids
        options = slot_options(request, len(prompt), run_seed=0, eos_token_ids=eos_token_ids)
        step = prompt_step([*prompt, *token_ids[:-1]])
        rows = np.arange(len(prompt) - 1, len(step.token_ids), dtype=np.int32)
        with closing(model.backend(slots=len(rows), **config)) as backend:
            logits = backend.logits(replace(step, logits_indices=rows, sample_slots=np.zeros_like(rows)))
        histories = [step.token_ids[: row + 1] for row in rows]
        how = [options] * len(rows), rows + 1, model.codec.size, histories, masks(model, request, token_ids)
        drawn = sample_rows(logits, *how)
        assert drawn.tolist() == list(token_ids)
        logits[np.arange(len(rows)), token_ids] -= np.float32(1e-3)
        count += np.count_nonzero(sample_rows(logits, *how) != drawn)
    return count


def masks(model: Model, request: Request, token_ids: Sequence[int]) -> list[U32 | None]:
    """Of each token of an answer the mask that it is drawn from."""
    if request.params.constraint is None:
        return [None] * len(token_ids)
    matcher = model.codec.grammars.matcher(request.params.constraint)
    rows = np.zeros((len(token_ids), model.codec.grammars.words), np.uint32)
    for token_id, row in zip(token_ids, rows, strict=True):
        matcher.fill(row)
        matcher.advance(token_id)
    return list(rows)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory):
    checkpoint = open_checkpoint(make_tiny_model(tmp_path_factory.mktemp("tiny"), max_position_embeddings=128))
    yield Model(checkpoint)
    checkpoint.tensors.close()


@pytest.fixture(scope="module")
def alone(model: Model) -> dict[int, Choice]:
    answers = {request.request_id: model.answers([request], slots=1)[request.request_id] for request in REQUESTS}
    assert near_ties(model, REQUESTS, answers) == 0, "sums in another order might draw another token"
    return answers


@pytest.fixture(scope="module")
def alone_in_fp8(model: Model) -> dict[int, Choice]:
    answers = {
        request.request_id: model.answers([request], slots=1, kv_dtype="fp8")[request.request_id]
        for request in REQUESTS
    }
    assert near_ties(model, REQUESTS, answers, kv_dtype="fp8") == 0
    return answers


def test_the_requests_end_in_every_way(alone: dict[int, Choice]):
    reasons = {(choice.finish_reason, type(choice.stop_reason).__name__) for choice in alone.values()}
    assert reasons == {("length", "NoneType"), ("stop", "NoneType"), ("stop", "str"), ("stop", "int")}


def test_forced_tokens_are_computed_together_and_not_drawn(model: Model):
    """Those of one text: the first steps compute the prompt and draw, the last ones draw nothing that is known."""
    constraint = Constraint("choice", '["more and more of it"]', "choice")
    ask = Request(request_id=0, custom_id=0, prompt="Tell", params=SamplingParams(constraint=constraint))
    for ahead in (1, 2, 3):
        choice = model.answers([ask], slots=1, max_in_flight=ahead)[0]
        assert (choice.text, choice.finish_reason) == ("more and more of it", "stop")
        assert (len(choice.token_ids), model.stats.completion_tokens) == (19, 19)
        assert model.stats.steps <= ahead


def test_a_form_holds_for_all_of_the_text(model: Model):
    """Nothing that looks like a thought leaves it."""
    text = "<think>no</think>yes"
    for deltas_and_more in ({}, {"stop": ("none of it",)}):
        params = SamplingParams(constraint=Constraint("choice", json.dumps([text]), "choice"), **deltas_and_more)
        choice = model.answers([Request(request_id=0, custom_id=0, prompt="Tell", params=params)], slots=1)[0]
        assert (choice.text, choice.reasoning, choice.finish_reason) == (text, None, "stop")


def test_every_token_under_a_constraint_has_its_logprob(model: Model):
    constrained = [request for request in REQUESTS if request.params.constraint]
    told = [replace(request, params=replace(request.params, logprobs=2)) for request in constrained]
    without = model.answers(constrained, slots=4)
    for request in told:
        choice = model.answers([request], slots=4, max_in_flight=2)[request.request_id]
        plain = without[request.request_id]
        assert (choice.token_ids, choice.text) == (plain.token_ids, plain.text)
        assert [told.id for told in choice.logprobs] == list(choice.token_ids)


@pytest.mark.parametrize(
    "machine",
    [
        {"slots": 16},
        {"slots": 16, "max_batch_tokens": 7},
        {"slots": 3, "max_batch_tokens": 64},
        {"slots": 16, "num_blocks": 1 + 3 * 6},
        {"slots": 16, "max_in_flight": 3},
        {"slots": 2, "max_in_flight": 4, "max_batch_tokens": 5},
        {"slots": 16, "num_blocks": 1 + 7, "max_in_flight": 2},
        {"slots": 16, "prefix_cache": False},
        {"slots": 16, "prefix_cache": False, "num_blocks": 1 + 7},
    ],
    ids=str,
)
def test_an_answer_does_not_depend_on_its_company(model: Model, alone: dict[int, Choice], machine: dict[str, int]):
    assert model.answers(REQUESTS, **machine) == alone
    assert model.answers(REQUESTS[::-1], **machine) == alone


@pytest.mark.parametrize(
    "machine",
    [
        {"slots": 16},
        {"slots": 3, "max_batch_tokens": 7},
        {"slots": 16, "num_blocks": 1 + 7, "max_in_flight": 2},
        {"slots": 16, "prefix_cache": False},
    ],
    ids=str,
)
def test_an_answer_does_not_depend_on_its_company_in_fp8(
    model: Model, alone: dict[int, Choice], alone_in_fp8: dict[int, Choice], machine: dict[str, int]
):
    assert alone_in_fp8 != alone, "the cache rounds, and the longest answers show it"
    assert model.answers(REQUESTS, **machine, kv_dtype="fp8") == alone_in_fp8
    assert model.answers(REQUESTS[::-1], **machine, kv_dtype="fp8") == alone_in_fp8


@pytest.mark.parametrize(
    "machine",
    [
        {"slots": 16},
        {"slots": 3, "max_batch_tokens": 7},
        {"slots": 16, "num_blocks": 1 + 7, "max_in_flight": 2},
        {"slots": 5, "prefix_cache": False, "max_in_flight": 3},
    ],
    ids=str,
)
def test_samples_are_the_answers_to_requests_with_their_seeds(model: Model, machine: dict[str, int]):
    drawn = [request for request in REQUESTS if request.params.temperature]
    several = [replace(request, params=replace(request.params, n=4)) for request in drawn]
    found = model.choices(several, **machine)
    for request in drawn:
        seeds = [sample_seed(request_seed(request, 0), i) for i in range(4)]
        alone = [replace(request, request_id=i, params=replace(request.params, seed=s)) for i, s in enumerate(seeds)]
        wanted = model.answers(alone, slots=1)
        assert near_ties(model, alone, wanted) == 0
        assert list(found[request.request_id]) == [replace(wanted[i], index=i) for i in range(4)]
    assert sum(len({choice.token_ids for choice in choices}) == 4 for choices in found.values()) > len(found) / 2


def shared_requests() -> list[Request]:
    """Long prompts with a common begin, some wholly the same, greedy: prompts of whole blocks among them."""
    begin = [BYTE_OFFSET + i * 7 % 90 for i in range(40)]
    prompts = [begin[:32], begin[:32], begin, [*begin[:35], *begin[:9]], begin[:48], [*begin, *begin[:8]], begin[:16]]
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    return [
        Request(request_id=i, custom_id=i, prompt_token_ids=tuple(ids), params=params) for i, ids in enumerate(prompts)
    ]


def test_a_found_prefix_changes_no_token(model: Model):
    requests = shared_requests()
    wanted = model.answers(requests, slots=8, prefix_cache=False)
    assert model.stats.cached_tokens == 0
    assert near_ties(model, requests, wanted) == 0
    assert model.answers(requests, slots=8) == wanted
    assert model.stats.cached_tokens > 100 and model.stats.peak_shared_blocks > 1
    assert model.answers(requests, slots=8, num_blocks=1 + 8, max_in_flight=2, max_batch_tokens=20) == wanted
    assert model.stats.preemptions > 0
