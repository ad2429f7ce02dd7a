"""`tinyvllm run --backend gpu`, from the command line to the kernels, over an emulated card."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from backend_runs import Answers, finished_before, run
from command import place_free
from emulated_cuda import ERRORS, ILLEGAL_ADDRESS, Runtime
from gpu_subject import TINY
from tiny import make_tiny_model

pytestmark = [pytest.mark.emulated, pytest.mark.usefixtures("own_cache")]

GPU = ("--backend", "gpu", "--gpu-memory", "64MiB")
ANSWERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9, "seed": 5, "ignore_eos": True},
    {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_tokens": 3, "logit_bias": {"100": 3.0}},
    {"choice": ["more and more", "more or less"], "presence_penalty": 0.5},
    {"json_schema": {"type": "object", "required": ["a"], "properties": {"a": {"type": "string"}}}, "temperature": 1},
]
LINES = [
    {"custom_id": i, "prompt": f"Number {i}. " * (1 + 5 * i % 4), "max_tokens": 3 + 4 * i % 9, **ANSWERS[i % 5]}
    for i in range(10)
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), **TINY)


def place_free_answers(answers: Answers) -> Answers:
    """Without fingerprints, for a context that is asked for is in them, whether it cuts an answer or not."""
    return {name: place_free(answer) | {"fingerprint": None} for name, answer in answers.items()}


@pytest.mark.parametrize("dtype", ["auto", "fp8"])
def test_answers_are_the_same_in_any_order_and_company(dtype: str, model: Path, tmp_path: Path, cuda: Runtime):
    asked = (*GPU, "--dtype", dtype)
    first, record = run(tmp_path, model, LINES, *asked, "--slots", "4")
    wanted = place_free_answers(first)
    assert len(wanted) == len(LINES) and not any(answer["error"] for answer in wanted.values())
    assert (record["backend"]["name"], record["backend"]["device"]) == ("gpu", "Emulated")
    for lines, options in (
        (LINES[::-1], ("--slots", "4")),
        (LINES, ("--slots", "1")),
        (LINES, ("--slots", "8")),
        (LINES[::-1], ("--slots", "3", "--max-model-len", "80")),
    ):
        assert place_free_answers(run(tmp_path, model, lines, *asked, *options)[0]) == wanted, options
    assert not cuda.held, "a run gives everything back"


def test_a_card_that_fails_under_way_keeps_the_finished_lines(model: Path, tmp_path: Path, cuda: Runtime, capfd: Any):
    whole, _ = run(tmp_path, model, LINES, *GPU, "--slots", "2")
    capfd.readouterr()
    cuda.breaks_at = cuda.work_done + cuda.work_done // 2
    found, record = run(tmp_path, model, LINES, *GPU, "--slots", "2", code=1)
    fault = f"Emulated failed: {ERRORS[ILLEGAL_ADDRESS]}"
    assert finished_before(fault, found, record, whole, capfd.readouterr().err, slots=2)
