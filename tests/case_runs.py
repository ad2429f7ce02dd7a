"""Running a file of tests/data/cases, and reading what an answer or an error line says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from command import CASES, by_id, place_free, read_answers, run_here


def run_case(folder: Path, model: Path, case: str | Path, *options: str, code: int) -> dict[Any, dict[str, Any]]:
    out = folder / "out.jsonl"
    assert run_here("run", CASES / case, "-m", model, "-o", out, "--overwrite", *options) == code
    return by_id(read_answers(out))


def failure(answer: dict[str, Any]) -> tuple[str, str | None]:
    assert answer["choices"] == [] and answer["usage"] is None and answer["stats"] is None
    return answer["error"]["type"], answer["error"].get("field")


def made(answer: dict[str, Any]) -> tuple[int, str]:
    """Tokens made, and how the answer ended."""
    assert answer["error"] is None
    return answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]


def made_ids(answer: dict[str, Any]) -> list[int]:
    """Of an answer that has logprobs: one of each token that counts, every number finite."""
    (choice,) = answer["choices"]
    told = choice["logprobs"]
    assert len(told) == answer["usage"]["completion_tokens"]
    assert all(type(number) is float and -1e39 < number <= 0 for token in told for number in numbers(token))
    return [token["id"] for token in told]


def numbers(token: dict[str, Any]) -> list[float]:
    return [token["logprob"], *(other["logprob"] for other in token["top"])]


def without_logprobs(answer: dict[str, Any]) -> dict[str, Any]:
    choices = [{name: value for name, value in c.items() if name != "logprobs"} for c in answer["choices"]]
    return place_free(answer) | {"choices": choices}
