"""`tinyvllm run --backend gpu` on a card: a line has the same answer in any company, its form given or not."""

from __future__ import annotations

from pathlib import Path

import pytest
from backend_runs import run
from gpu_subject import TINY
from test_emulated_run import ANSWERS, LINES, place_free_answers
from tiny import make_tiny_model

pytestmark = pytest.mark.gpu

GPU = ("--backend", "gpu", "--gpu-memory", "256MiB")


def test_answers_are_the_same_in_any_order_and_company(tmp_path: Path):
    model = make_tiny_model(tmp_path / "model", **TINY)
    lines = [{**LINES[i % len(LINES)], **ANSWERS[i % len(ANSWERS)], "custom_id": i} for i in range(60)]
    wanted = place_free_answers(run(tmp_path, model, lines, *GPU, "--slots", "32")[0])
    assert not any(answer["error"] for answer in wanted.values())
    for order, slots in ((lines[::-1], "32"), (lines, "1"), (lines, "7")):
        assert place_free_answers(run(tmp_path, model, order, *GPU, "--slots", slots)[0]) == wanted, slots
