"""The script that says where the time of workloads goes: mean steps, kinds of kernels, shares that add up."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripts import script
from tiny import make_tiny_model

from tinyvllm_cli.backends.timing import Rates
from tinyvllm_cli.bench.limit import Costs, compute_limit
from tinyvllm_cli.bench.workloads import random_requests
from tinyvllm_cli.model.checkpoint import open_checkpoint
from tinyvllm_cli.model.random_weights import random_config
from tinyvllm_cli.types import Batch

work = script("gpu_workload_time")

MEAN = {"decoding": 3, "context": 20, "prompts": 2, "prompt_rows": 5, "computed": 16, "shared": 16}


RATES = Rates(1e12, 1e14)


def rows_of(batch: Batch) -> list[tuple[int, int, int]]:
    """(slot, tokens before, rows) of each sequence."""
    counts = np.diff(batch.query_start_loc)
    return list(zip(batch.slots.tolist(), batch.num_computed.tolist(), counts.tolist(), strict=True))


def test_a_mean_step_holds_both_kinds_of_rows_and_samples_the_last_of_each():
    batch = work.MeanStep(**MEAN).batch(100)
    assert rows_of(batch) == [(0, 20, 1), (1, 20, 1), (2, 20, 1), (3, 16, 5), (4, 16, 5)]
    assert batch.logits_indices.tolist() == [0, 1, 2, 7, 12] and batch.sample_slots.tolist() == [0, 1, 2, 3, 4]
    assert len(batch.token_ids) == 13


def test_sequences_share_the_blocks_of_what_they_share_and_no_other():
    tables = work.MeanStep(**MEAN).batch(100).block_tables
    assert len(set(tables[:, 0])) == 1
    own = tables[:, 1:].ravel().tolist()
    assert len(set(own)) == len(own) and tables[0, 0] not in own
    assert len(np.unique(work.MeanStep(**MEAN | {"shared": 0}).batch(100).block_tables)) == tables.size


def test_the_limits_of_mean_steps_are_those_of_a_workload_that_has_such_steps():
    """Three prompts of 20 tokens, 16 of them shared, then a step of all three; the first computes what they share."""
    config = random_config("smollm2-135m")
    costs = Costs.of(config, 2, 1000)
    wanted = compute_limit(config, [(20, 2)] * 3, elem_bytes=2, token_bytes=1000, slots=3, rates=RATES, shared=16)
    shared = work.MeanStep(0, 0, 1, 16, 0, 16).limit(costs, RATES)
    prompts = work.MeanStep(0, 0, 3, 4, 16, 16).limit(costs, RATES)
    decode = work.MeanStep(3, 20, 0, 0, 0, 16).limit(costs, RATES)
    extra = 2 * costs.head  # drawn from the last row of what they share, which no prompt ends with
    assert shared.flops + prompts.flops + decode.flops - extra == wanted.flops
    assert shared.bytes + prompts.bytes + decode.bytes - costs.weight_bytes == wanted.bytes


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 30)), min_size=1, max_size=8))
def test_the_mean_context_is_that_of_every_row_that_decodes(lengths: list[tuple[int, int]]):
    prompts, outputs = zip(*lengths, strict=True)
    before = [prompt + number for prompt, output in lengths for number in range(output - 1)]
    wanted = sum(before) / max(1, len(before))
    assert work.mean_context(random_requests(prompts, outputs, num_ids=100)) == pytest.approx(wanted)


def step(prompt_rows: int, decode_rows: int) -> Any:
    return SimpleNamespace(metered=SimpleNamespace(prompt_rows=prompt_rows, decode_rows=decode_rows))


def test_means_are_those_of_the_steps_of_a_kind_and_fit_the_backend():
    requests = random_requests([20] * 6, [5] * 6, num_ids=100, shared_prefix_tokens=16)
    trial = SimpleNamespace(cached_tokens=5 * 16, steps=[step(40, 0), step(12, 4), step(0, 5), step(0, 3), step(0, 1)])
    limits = SimpleNamespace(max_slots=8, max_batch_tokens=64)
    found = work.mean_steps(trial, requests, limits)
    assert found["decode"] == work.MeanStep(3, 22, 0, 0, 13, 16)
    assert found["prompts"] == work.MeanStep(2, 22, 3, 9, 13, 16)
    narrow = work.mean_steps(trial, requests, SimpleNamespace(max_slots=4, max_batch_tokens=8))["prompts"]
    assert narrow.decoding + narrow.prompts <= 4 and narrow.decoding + narrow.prompts * narrow.prompt_rows <= 8


@pytest.mark.emulated
def test_the_shares_of_a_workload_add_up_to_its_time(tmp_path: Path, cuda: Any, monkeypatch: pytest.MonkeyPatch):
    from gpu_subject import TINY, gpu_backend

    from tinyvllm_cli.backends.gpu.timing import GpuTiming
    from tinyvllm_cli.bench.subject import IdCodec

    requests = random_requests([9, 20, 4, 12], [5, 3, 6, 2], num_ids=264)
    monkeypatch.setattr(work, "named_requests", lambda name, num_ids: requests)
    monkeypatch.setattr("gpu_timeline.BUSY_PRODUCTS", 2)
    checkpoint = open_checkpoint(make_tiny_model(tmp_path, **TINY))
    options: dict[str, Any] = {"num_blocks": 20, "max_in_flight": 2, "slots": 2}
    with (
        closing(checkpoint.tensors),
        closing(gpu_backend(checkpoint, **options)) as backend,
        closing(GpuTiming(backend)) as timing,
    ):
        subject = SimpleNamespace(backend=backend, codec=IdCodec(264), num_ids=264, config=checkpoint.config)
        found = work.measure(subject, timing, RATES, "mixed")
    assert set(found["kinds"]) == {"decode", "prompts"}
    assert sum(kind["steps"] for kind in found["kinds"].values()) == found["steps"]
    assert sum(found["shares"].values()) == pytest.approx(1)
    assert {"products", "attention", "drawing", work.OTHERS, "card waits"} == set(found["shares"])
    assert len({row.count("|") for row in (*work.HEAD, work.line(found))}) == 1
    assert len({row.count("|") for row in (*work.STEP_HEAD, *work.step_lines(found))}) == 1
