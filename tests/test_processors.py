"""The logits that a draw is made from: those of transformers' processors, and of the formula where it has none."""

import json
from pathlib import Path

import numpy as np
import pytest
from draws import bits_of, penalised
from processor_cases import CASES, HISTORY, PROMPT_LEN, VOCAB, Case, case_logits

from tinyvllm_cli.backends.cpu.filters import filtered_ids, temperature
from tinyvllm_cli.backends.cpu.sample import processed_logits
from tinyvllm_cli.types import F32, SlotOptions

STORED = json.loads((Path(__file__).parent / "data" / "reference" / "processors.json").read_text())["logits"]


def scores(logits: F32, case: Case) -> F32:
    """What the noise is added to; -inf where an id cannot be drawn."""
    mask = None if case.allowed is None else bits_of([case.allowed], VOCAB)[0]
    row = processed_logits(logits, case.options, len(HISTORY), np.array(HISTORY, np.int32), mask)
    kept = filtered_ids(row, row.max(), case.options)
    ids = np.arange(VOCAB) if kept is None else kept
    made = np.full(VOCAB, -np.inf, np.float32)
    made[ids] = row[ids] / temperature(case.options)
    return made


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_the_processors_of_transformers(name: str):
    stored = np.array([-np.inf if value is None else value for value in STORED[name]])
    logits = case_logits(list(CASES).index(name))
    assert name in ("min_tokens reached", "top_k of all") or not np.array_equal(stored, logits)
    np.testing.assert_allclose(scores(logits, CASES[name]), stored, rtol=0, atol=1e-5)


def test_every_stored_case_is_compared():
    assert list(STORED) == list(CASES)


@pytest.mark.parametrize(("presence", "frequency"), [(1.5, 0.0), (0.0, 0.7), (-2.0, 1.5), (0.3, -0.2)])
@pytest.mark.parametrize("repetition", [1.0, 1.3])
def test_presence_and_frequency_are_their_formula(presence: float, frequency: float, repetition: float):
    options = SlotOptions(
        presence_penalty=presence,
        frequency_penalty=frequency,
        repetition_penalty=repetition,
        output_start=PROMPT_LEN,
        temperature=1.0,
    )
    logits = case_logits(100)
    exact = penalised(logits.astype(np.float64), options, HISTORY)
    assert np.count_nonzero(exact != logits) == len({*HISTORY[PROMPT_LEN:], *(HISTORY if repetition != 1 else ())})
    np.testing.assert_allclose(scores(logits, Case(options)), exact, rtol=0, atol=1e-5)
