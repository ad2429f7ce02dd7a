"""Answers behind shared prefixes, which decoding attends to together, and those of an engine that shares nothing.

test_gpu_backend.py has the card run it, test_emulated_shared.py the processor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from fake_backend import FakeCodec, request
from seam import prompt

from tinyvllm_cli.backends.gpu import attention_work
from tinyvllm_cli.backends.gpu.backend import GpuBackend
from tinyvllm_cli.engine.engine import Engine
from tinyvllm_cli.types import Completion

PREFIXES = (prompt(530, seed=1)[:262], prompt(530, seed=1))  # one whole partial of attention's, and another behind it
SAMPLING = ({}, {"temperature": 1.2, "seed": 4})


def requests() -> list[tuple[list[int], dict[str, object]]]:
    """Of each prefix some, whose ends and lengths differ, and one of neither."""
    prompts = [PREFIXES[i % 3 == 2] + prompt(3 + 5 * i % 31, seed=10 + i) for i in range(7)]
    prompts.append(prompt(40, seed=3))
    return [(ids, {"max_tokens": 3 + 7 * i % 11, **SAMPLING[i % 2]}) for i, ids in enumerate(prompts)]


def answers(backend: GpuBackend, *, prefix_cache: bool) -> tuple[dict[int, list[list[int]]], Counter[str]]:
    """Token ids by request, and what was launched."""
    before = Counter(backend.counts())
    engine = Engine(backend, FakeCodec(), eos_token_ids=(), prefix_cache=prefix_cache)
    for i, (ids, params) in enumerate(requests()):
        engine.add(request(i, ids, **params))
    done = {}
    while not engine.idle:
        for event in engine.step():
            if isinstance(event, Completion):
                done[event.request_id] = [list(choice.token_ids) for choice in event.choices]
        engine.check()
    return done, Counter(backend.counts()) - before


def answers_are_those_of_an_engine_that_shares_nothing(make: Callable[[], GpuBackend]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_work, "LEAST_SEQUENCES", 2)
        patch.setattr(attention_work, "LEAST_SAVED", 1)
        shared, launches = answers(backend := make(), prefix_cache=True)
        backend.close()
        alone, without = answers(backend := make(), prefix_cache=False)
        backend.close()
    assert launches["attend_prefix"] and not without["attend_prefix"]
    assert launches["graphs"], "steps that share are captured too"
    assert len(shared) == len(requests()) and shared == alone
