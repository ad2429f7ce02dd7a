"""examples/lm_eval_model.py: lm-evaluation-harness finds with this engine what it finds with its own `hf` model."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from scripts import EXAMPLES, script

from tinyvllm_cli import SamplingParams
from tinyvllm_cli.config import DEFAULT_MODEL

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

pytestmark = [pytest.mark.extras, pytest.mark.model]

# By its `hf` model in float32 (tests/reference/make_lm_eval.py); the file names its versions.
REFERENCE = json.loads((Path(__file__).parent / "data" / "reference" / "lm_eval.json").read_text())
ROOT = Path(__file__).parent.parent
TASKS = "examples/lm_eval_tasks"
TOLERANCE = 1e-3  # natural logarithms, of a whole text; metrics too


@pytest.fixture(autouse=True)
def root(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tasks name their data from here."""
    monkeypatch.chdir(ROOT)


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    options = {"backend": "cpu", "max_model_len": REFERENCE["context"]}
    model = script("lm_eval_model", EXAMPLES).TinyvllmLM(DEFAULT_MODEL, **options)
    with closing(model.llm):
        yield model


@pytest.fixture(scope="module")
def task_manager() -> TaskManager:
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=str(ROOT / TASKS), include_defaults=False)


def name(run: dict[str, Any]) -> str:
    return f"{run['task']}-{run['shots']}{'-chat' if run['chat'] else ''}"


@pytest.mark.parametrize("run", REFERENCE["runs"], ids=name)
def test_metrics_and_every_answer_are_those_of_the_reference(run: dict[str, Any], model: Any, task_manager: Any):
    from lm_eval import simple_evaluate

    found = simple_evaluate(
        model,
        tasks=[run["task"]],
        task_manager=task_manager,
        apply_chat_template=run["chat"],
        num_fewshot=run["shots"],
        bootstrap_iters=0,
    )
    metrics = {metric: found["results"][run["task"]][metric] for metric in run["metrics"]}
    assert metrics == pytest.approx(run["metrics"], abs=TOLERANCE, rel=0)
    samples = found["samples"][run["task"]]
    for sample, wanted in zip(samples, run["responses"], strict=True):
        responses = [response for (response,) in sample["resps"]]
        assert list(map(exact, responses)) == list(map(exact, wanted)), sample["doc"]
        assert list(map(logprob, responses)) == pytest.approx(list(map(logprob, wanted)), abs=TOLERANCE, rel=0)


def logprob(response: Any) -> float:
    """0 of a text."""
    if isinstance(response, str):
        return 0
    return response if isinstance(response, float) else response[0]


def exact(response: Any) -> Any:
    """What has to be the same: a text, and whether a choice is what greedy decoding gives."""
    if isinstance(response, float):
        return None
    return response if isinstance(response, str) else response[1]


def test_repeats_of_a_sampled_answer_differ_and_come_again(model: Any):
    from lm_eval.api.instance import Instance

    options = {"do_sample": True, "temperature": 1.0, "max_gen_toks": 8}
    requests = [Instance("generate_until", {}, ("My favourite word is", options), number) for number in range(6)]
    texts = model.generate_until(requests)
    assert len(set(texts)) > 3 and model.generate_until(requests) == texts


def test_too_long_a_prompt_loses_its_start_until_the_answer_fits(model: Any):
    from lm_eval.api.instance import Instance

    words = ["plum", "river", "lamp", "seven", "cloud", "engine", "paper", "north", "glass", "honey", "winter", "boat"]
    rng, max_tokens = random.Random(0), 12
    text = " ".join(rng.choice(words) for _ in range(70))  # the start of a salad shows in what comes of it
    ids, room = model.llm.tokenizer.encode(text, add_bos=True), model.max_length - max_tokens
    cut = [ids[-kept:] for kept in (room, room - 1, room + 1)]
    wanted, *others = (done.choices[0].text for done in model.llm.generate(cut, SamplingParams(max_tokens=max_tokens)))
    assert wanted not in others
    request = Instance("generate_until", {}, (text, {"until": [], "max_gen_toks": max_tokens}), 0)
    assert model.generate_until([request]) == [wanted]


def test_an_answer_that_has_begun_is_open_in_the_template(model: Any):
    question = [{"role": "user", "content": "What is the capital of Japan?"}]
    begun = [*question, {"role": "assistant", "content": "It is"}]
    prompt = model.apply_chat_template(question)
    assert model.apply_chat_template(begun, add_generation_prompt=False) == f"{prompt}It is"


def test_a_request_that_fails_ends_the_evaluation(model: Any):
    from lm_eval.api.instance import Instance

    with pytest.raises(RuntimeError, match="request 1: the prompt has no tokens"):
        model.generate_until(
            [Instance("generate_until", {}, (text, {"max_gen_toks": 1}), 0) for text in ("a text", "")]
        )


def test_the_command_prints_the_metrics():
    options = ["--include-path", TASKS, "--limit", "2", "--backend", "cpu", "--max-model-len", "64"]
    command = [sys.executable, "examples/lm_eval_model.py", "--tasks", "capitals,opposites", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line.split("|") for line in done.stdout.splitlines()]
    found = {(cells[1].strip(), cells[5].strip()) for cells in lines if len(cells) > 7}
    assert {("capitals", "acc"), ("opposites", "exact_match")} <= found
