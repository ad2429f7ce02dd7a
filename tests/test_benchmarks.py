"""The scripts of benchmarks/ that need no GPU: prompts that are the same every time, runs that are compared."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from command import write_lines
from fake_backend import FakeBackend, hashed, limits
from lines import read

from tinyvllm_cli.types import Request

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look for their module
    spec.loader.exec_module(module)
    return module


make_prompts, compare_runs, gpu_engine = map(script, ("make_prompts", "compare_runs", "gpu_engine"))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[Any, str]]:
    """A script's main with arguments: exit code or message, and standard output."""

    def call(module: ModuleType, *arguments: Any) -> tuple[Any, str]:
        monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, arguments)])
        try:
            module.main()
            code: Any = 0
        except SystemExit as end:
            code = end.code
        return code, capsys.readouterr().out

    return call


# ---------------------------------------------------------------- prompts


def test_prompts_are_the_same_however_many_are_asked_for():
    assert list(make_prompts.prompts(50)) == list(make_prompts.prompts())[:50]


def test_every_prompt_is_a_task_over_a_passage_of_the_length_that_is_said():
    for i, line in enumerate(make_prompts.prompts()):
        task, passage = line["prompt"].split("\n\n")
        assert task == make_prompts.TASKS[i % 4]
        assert 40 <= len(passage.split(" ")) <= 260
    assert i == 1999


def test_reversed_prompts_are_the_lines_from_last_to_first_and_can_be_read(run):
    (code, text), (_, turned) = run(make_prompts), run(make_prompts, "--reverse")
    assert code == 0
    assert text.splitlines() == turned.splitlines()[::-1]
    items = read(text.encode())
    assert all(isinstance(item, Request) for item in items)
    assert len({item.custom_id for item in items}) == 2000


# ---------------------------------------------------------------- comparing


def answer(i: int, text: str = "an answer", **changed: Any) -> dict[str, Any]:
    choice = {"index": 0, "text": f"{text} {i}", "finish_reason": "length", "stop_reason": None}
    line = {"custom_id": f"req-{i}", "index": i, "choices": [choice], "usage": {"completion_tokens": 4}}
    return {**line, "error": None, "stats": {"ttft_s": 0.1 * i}, **changed}


WHOLE = [answer(i) for i in range(5)]


@pytest.mark.parametrize(
    "part",
    [
        WHOLE,
        WHOLE[::-1],
        WHOLE[3:],
        [answer(2, index=7, stats={"ttft_s": 9.0})],
    ],
    ids=["the same", "reversed", "some of them", "other times and places"],
)
def test_the_same_answers_are_no_difference(run, tmp_path: Path, part: list[dict[str, Any]]):
    files = write_lines(tmp_path / "whole", WHOLE), write_lines(tmp_path / "part", part)
    code, said = run(compare_runs, *files)
    assert code == 0
    assert said.startswith(f"{len(part)} lines compared ({4 * len(part)} answer tokens, 0 errors): 0 differ")


@pytest.mark.parametrize(
    "other",
    [
        answer(3, "another answer"),
        answer(3, usage={"completion_tokens": 5}),
        answer(3, choices=[], usage=None, error={"type": "nan_logits", "message": "no", "line": 4}),
        answer(9),
        answer(3, custom_id=3),
    ],
    ids=["text", "tokens", "an error", "not in the whole", "another id"],
)
def test_a_difference_is_counted_and_shown(run, tmp_path: Path, other: dict[str, Any]):
    files = write_lines(tmp_path / "whole", WHOLE), write_lines(tmp_path / "part", [WHOLE[0], other, WHOLE[4]])
    code, said = run(compare_runs, *files)
    assert code == 1
    assert "3 lines compared" in said and ": 1 differ" in said
    assert f"custom_id {json.dumps(other['custom_id'])}" in said


def test_an_error_on_another_line_is_the_same_error(run, tmp_path: Path):
    failed = [answer(1, choices=[], usage=None, error={"type": "x", "message": "y", "line": line}) for line in (2, 8)]
    code, said = run(compare_runs, *(write_lines(tmp_path / str(i), [line]) for i, line in enumerate(failed)))
    assert code == 0
    assert "1 errors" in said


@pytest.mark.parametrize(
    ("text", "message"),
    [("", 1), ("{", "not an answer"), ("[]\n", "not an answer"), ('{"custom_id": 1}\n' * 2, ":2: custom_id 1 stands")],
)
def test_a_file_without_answers_is_no_success(run, tmp_path: Path, text: str, message: Any):
    whole, part = write_lines(tmp_path / "whole", WHOLE), tmp_path / "part"
    part.write_text(text)
    code, _ = run(compare_runs, whole, part)
    assert code == message if isinstance(message, int) else message in code
    code, _ = run(compare_runs, whole, tmp_path / "absent")
    assert "cannot be read" in code


# ---------------------------------------------------------------- the engine of the GPU benchmarks


def test_every_request_runs_to_its_last_token():
    backend = FakeBackend(limits(max_in_flight=2), hashed())
    asked = list(gpu_engine.requests([3, 20, 1, 7, 30], [5, 1, 9, 2, 20], vocab_size=50))
    run = gpu_engine.answer(backend, asked)
    assert (run.prompt_tokens, run.answer_tokens, run.steps) == (61, 37, len(backend.steps))
    assert run.seconds > 0


def test_a_request_that_fails_ends_the_benchmark():
    asked = list(gpu_engine.requests([70], [5], vocab_size=50))
    with pytest.raises(SystemExit, match="request 0 failed: prompt_token_ids: found 70 tokens"):
        gpu_engine.answer(FakeBackend(limits(), hashed()), asked)
