"""`tinyvllm score --backend gpu` over an emulated card: the CPU's scores, and the same bits in any company."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from command import by_id, place_free, read_answers, run_here, write_lines
from emulated_cuda import Runtime
from gpu_subject import TINY
from tiny import make_tiny_model

pytestmark = [pytest.mark.emulated, pytest.mark.usefixtures("own_cache")]

GPU = ("--backend", "gpu", "--gpu-memory", "64MiB")
CONTEXT = "Number one. Number two. Number three. "
LINES: list[dict[str, Any]] = [
    {"custom_id": 0, "text": CONTEXT + "é"},
    {"custom_id": 1, "context": CONTEXT, "continuations": ["Number four.", "x", "Number"]},
    {"custom_id": 2, "context": CONTEXT, "continuations": ["Number five."]},
    {"custom_id": 3, "text": "plum"},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), **TINY)


def scores(folder: Path, model: Path, lines: list[dict[str, Any]], *options: str) -> dict[Any, dict[str, Any]]:
    source = write_lines(folder / "in.jsonl", lines)
    out = folder / "out.jsonl"
    assert run_here("score", source, "-m", model, "-o", out, "--overwrite", "--tokens", "-q", *options) == 0
    return {name: place_free(answer) for name, answer in by_id(read_answers(out)).items()}


def test_scores_are_those_of_the_cpu_and_the_same_bits_in_any_company(model: Path, tmp_path: Path, cuda: Runtime):
    first = scores(tmp_path, model, LINES, *GPU, "--slots", "4")
    for lines, options in (
        (LINES[::-1], ("--slots", "7")),
        (LINES[1:3], ("--slots", "2", "--no-prefix-cache")),
        (LINES[3:], ("--slots", "1")),
    ):
        found = scores(tmp_path, model, lines, *GPU, *options)
        assert found == {name: first[name] for name in found}, options
    cpu = scores(tmp_path, model, LINES, "--backend", "cpu", "--dtype", "bfloat16")
    for name, answer in cpu.items():
        for one, other in zip(answer["scores"], first[name]["scores"], strict=True):
            assert one["tokens"] == other["tokens"]
            assert one["token_logprobs"] == pytest.approx(other["token_logprobs"], abs=0.3)  # activations are rounded
    assert not cuda.held, "a run gives everything back"
