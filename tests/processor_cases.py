"""Settings whose logits are compared with those of transformers' processors (tests/reference/make_processors.py)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tinyvllm_cli.types import F32, SlotOptions

VOCAB = 40
LATE = 1000  # of a sequence whose next position is len(HISTORY)
HISTORY = (5, 17, 5, 31, 2, 2, 9, 17, 5, 38, 0, 17)
PROMPT_LEN = 4


@dataclass(frozen=True)
class Case:
    options: SlotOptions
    allowed: tuple[int, ...] | None = None  # ids of a mask


CASES = {
    "temperature": Case(SlotOptions(temperature=0.7)),
    "high temperature": Case(SlotOptions(temperature=3.0)),
    "top_k": Case(SlotOptions(temperature=1.0, top_k=7)),
    "top_k of all": Case(SlotOptions(temperature=1.0, top_k=100)),
    "top_p": Case(SlotOptions(temperature=1.0, top_p=0.8)),
    "little top_p": Case(SlotOptions(temperature=1.0, top_p=0.01)),
    "min_p": Case(SlotOptions(temperature=1.0, min_p=0.1)),
    "filters": Case(SlotOptions(temperature=1.3, top_k=20, top_p=0.9, min_p=0.05)),
    "repetition": Case(SlotOptions(temperature=1.0, repetition_penalty=1.3)),
    "repetition wanted": Case(SlotOptions(temperature=1.0, repetition_penalty=0.8)),
    "bias": Case(SlotOptions(temperature=1.0, logit_bias=((3, 2.5), (17, -4.0), (39, 1.0)))),
    "min_tokens": Case(SlotOptions(temperature=1.0, stop_ids=(3, 38), min_position=LATE)),
    "min_tokens reached": Case(SlotOptions(temperature=1.0, stop_ids=(3, 38), min_position=len(HISTORY))),
    "mask": Case(SlotOptions(temperature=1.0), allowed=(1, 2, 5, 17, 30, 31, 32, 38)),
    "all": Case(
        SlotOptions(
            temperature=0.8,
            top_k=12,
            top_p=0.95,
            min_p=0.02,
            repetition_penalty=1.2,
            logit_bias=((17, 1.0), (8, 0.5)),
            stop_ids=(2,),
            min_position=LATE,
        ),
        allowed=tuple(range(1, 40)),
    ),
}


def case_logits(number: int) -> F32:
    """Of the case with this number; the ids of HISTORY are among the likelier ones."""
    logits = np.random.default_rng(number).normal(0, 3, VOCAB).astype(np.float32)
    logits[list(HISTORY)] += 1
    return logits
