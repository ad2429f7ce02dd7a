"""The sweep over slots and context, on an emulated card where everything that is done takes a millisecond."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu_subject import TINY, gpu_backend, to_host
from scripts import script
from tiny import make_tiny_model

from tinyvllm_cli.backends.gpu.timing import GpuTiming
from tinyvllm_cli.backends.timing import Rates
from tinyvllm_cli.bench.limit import Costs
from tinyvllm_cli.model.checkpoint import open_checkpoint
from tinyvllm_cli.types import SlotOptions

gpu_timeline, gpu_sweep = map(script, ("gpu_timeline", "gpu_sweep"))

pytestmark = [pytest.mark.emulated, pytest.mark.usefixtures("own_cache")]

WARM_UP, STEPS = 3, 5


@pytest.fixture
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_sweep, "WARM_UP", WARM_UP)
    monkeypatch.setattr(gpu_sweep, "STEPS", STEPS)


@pytest.mark.usefixtures("few_steps")
def test_a_point_is_captured_steps_that_feed_each_other(tmp_path: Path, cuda: Any):
    checkpoint = open_checkpoint(make_tiny_model(tmp_path, **TINY))
    with closing(checkpoint.tensors), closing(gpu_backend(checkpoint, num_blocks=20, max_in_flight=2)) as backend:
        timing, costs = GpuTiming(backend), Costs.of(checkpoint.config, 2, backend.facts.kv_bytes_per_token)
        gpu_timeline.fill_pool(backend)
        for slot in range(3):
            backend.bind(slot, [1], SlotOptions())
        before = backend.counts()
        point = gpu_sweep.measure_point(backend, timing, costs, Rates(1e12, 1e12), 3, 20)
        launched = {name: count - before.get(name, 0) for name, count in backend.counts().items()}
        steps = WARM_UP + STEPS
        assert launched["embed"] == launched["sample_rows"] == steps and launched["attend_ahead"] == 2 * steps
        assert point["captured_steps"] == launched["graphs"] == steps - 1, "all but the first"
        tokens = np.array([to_host(backend, backend._slots.token_table[slot]) for slot in range(3)])
        drawn = tokens[:, 21 : 21 + steps]
        assert ((drawn >= 0) & (drawn < 264)).all(), "each step's token stands behind its own row"
        work = sum(count for name, count in launched.items() if name != "graphs") / steps
        assert point["step_ms"]["median"] == pytest.approx(work, abs=2), "and copies to and from the card"
        middle = 20 + WARM_UP + (STEPS - 1) / 2
        limit = costs.decode_step(Rates(1e12, 1e12), rows=3, context=middle)
        assert point["limit"]["tokens_per_s"] == 3 / limit.seconds
        for name in ("median", "least", "most"):
            assert point["of_limit"][name] == pytest.approx(
                point["tokens_per_s"][name] / point["limit"]["tokens_per_s"]
            )
        timing.close()


@pytest.mark.usefixtures("few_steps")
def test_what_does_not_fit_is_left_out(tmp_path: Path, cuda: Any):
    checkpoint = open_checkpoint(make_tiny_model(tmp_path, **TINY))
    with closing(checkpoint.tensors), closing(gpu_backend(checkpoint, num_blocks=9)) as backend:
        fitting = [
            (count, context)
            for context in (24, 56, 121)
            for count in (1, 2, 4, 5)
            if gpu_sweep.fits(backend, count, context)
        ]
    assert fitting == [(1, 24), (2, 24), (4, 24), (1, 56), (2, 56)], "8 blocks of 16 tokens, 4 slots"


def test_every_block_is_filled_with_many_values(tmp_path: Path, cuda: Any, monkeypatch: pytest.MonkeyPatch):
    checkpoint = open_checkpoint(make_tiny_model(tmp_path, **TINY))
    with closing(checkpoint.tensors), closing(gpu_backend(checkpoint, num_blocks=7)) as backend:
        monkeypatch.setattr(gpu_timeline, "MAX_FILLED", 3 * backend._cache.blocks[0].size)
        gpu_timeline.fill_pool(backend)
        blocks = to_host(backend, backend._cache.blocks).reshape(7, -1)
    assert all(len(np.unique(block)) > 100 for block in blocks)
    assert len({block.tobytes() for block in blocks}) == 7, "no part repeats another"
