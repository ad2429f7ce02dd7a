"""On the card: the default model beside transformers' stored answers, and what doctor says."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from command import run_here

from tinyvllm_cli.backends.gpu.checks import agreement, forced_logits
from tinyvllm_cli.config import EngineOptions
from tinyvllm_cli.load import open_engine

pytestmark = [pytest.mark.gpu, pytest.mark.model]

RECORDS = json.loads((Path(__file__).parent / "data/golden/smollm2_135m_instruct.json").read_text())["records"]


def all_logits(model: Path, backend: Any) -> npt.NDArray[np.float32]:
    """f32[steps of all records, V] with the stored answers forced; each record in one step."""
    config = EngineOptions(slots=max(len(record["output_ids"]) for record in RECORDS), max_model_len=128)
    with closing(open_engine(str(model), backend=backend, config=config, report=print)) as loaded:
        return np.concatenate(
            [forced_logits(loaded.backend, record["prompt_ids"], record["output_ids"]) for record in RECORDS]
        )


def test_the_stored_answers_are_the_likeliest_wherever_rounding_cannot_change_that(default_model, capsys):
    found = all_logits(default_model, "gpu")
    exact = all_logits(default_model, "cpu")
    ids = [token_id for record in RECORDS for token_id in record["output_ids"]]
    margins = [margin for record in RECORDS for margin in record["margins"]]
    result = agreement(found, exact, ids, margins)
    equal = int((found.argmax(axis=1) == np.array(ids)).sum())
    with capsys.disabled():
        print(f"\ngolden file on the GPU: {result}; the same id at {equal} of all")
    assert result.ok, result


@pytest.mark.parametrize("args", [(), ("--compare", "cpu")], ids=["checks", "compare"])
def test_doctor_finds_nothing_wrong(default_model, args, capfd):
    code = run_here("doctor", *args)
    captured = capfd.readouterr()
    with capfd.disabled():
        print(f"\n{captured.out}")
    lines = captured.out.splitlines()
    assert (code, [line for line in lines if not line.startswith("ok ")]) == (0, []), captured.err
    wanted = "first op that differs beyond its tolerance: none" if args else "known answer on the GPU: equal at"
    assert lines[-1].startswith(f"ok  {wanted}")
