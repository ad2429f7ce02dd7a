"""`tinyvllm bench` on the card: its rates are those of the card, its times add up."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing, nullcontext
from pathlib import Path

import kernel_laws
import pytest
from command import run_here
from gpu_tools import open_device

from tinyvllm_cli.backends.gpu.timing import READ_PART, open_gpu_timing
from tinyvllm_cli.bench.figures import busy
from tinyvllm_cli.bench.meter import Meter
from tinyvllm_cli.bench.runner import run_trial
from tinyvllm_cli.bench.subject import Subject, open_random
from tinyvllm_cli.bench.workloads import random_requests
from tinyvllm_cli.config import EngineOptions

pytestmark = pytest.mark.gpu

# Bytes a second that a plain read reaches, and operations of products of 8,192 rows: less than either means a fault.
READ_RATES = {"NVIDIA H200": 4.3e12, "NVIDIA H100 80GB HBM3": 2.8e12}


@pytest.fixture(scope="module")
def subject() -> Iterator[Subject]:
    options = EngineOptions(slots=64, max_model_len=2048)
    opened = open_random("smollm2-135m", backend="gpu", options=options, write=None)
    yield opened
    opened.close()


@pytest.mark.parametrize("blocks", [1, 3, 400])
def test_sum_words(blocks: int):
    kernel_laws.sum_words(open_device("bfloat16"), blocks)


def test_the_rates_are_those_of_the_card(subject: Subject):
    with closing(open_gpu_timing(subject.backend)) as timing:
        rates = timing.rates()
    name = subject.backend.facts.device
    assert subject.backend.facts.details["pool_bytes"] > 1000 * READ_PART
    assert rates.read >= READ_RATES.get(name, 1e11), f"{name} reads {rates.read / 1e12:.2f} TB/s"
    assert 1e13 < rates.product < 1e16, f"{name} multiplies {rates.product / 1e12:.0f} TFLOP/s"


def test_times_of_steps_add_up_to_less_than_the_run(subject: Subject):
    requests = random_requests([100, 30, 400] * 20, [30, 60, 10] * 20, num_ids=subject.num_ids)
    with closing(open_gpu_timing(subject.backend)) as timing:
        meter = Meter(subject.backend, timing)
        for _ in range(2):
            trial = run_trial(
                meter, timing, subject.codec, requests, eos_token_ids=(), prefix_cache=True, hold=nullcontext
            )
    assert trial.output_tokens == 2000
    assert 0 < sum(step.end - step.begin for step in trial.steps) <= trial.seconds
    for before, after in zip(trial.steps, trial.steps[1:], strict=False):
        assert before.begin < before.end <= after.begin + 1e-6
    assert 0 < (found := busy(trial.steps) or 0) <= 1, found
    assert trial.counts["sample_rows"] == len(trial.steps), trial.counts


def test_random_weights_are_measured_and_their_folder_is_timed(tmp_path: Path, subject: Subject):
    folder, out, trace = tmp_path / "model", tmp_path / "out.json", tmp_path / "trace.json"
    options = ("--backend", "gpu", "--gpu-memory", "8GiB", "--trials", "2", "--json", out, "--trace", trace)
    assert run_here("bench", "--random-weights", "smollm2-135m", "--write", folder, *options) == 0
    found = json.loads(out.read_bytes())
    assert found["workload"]["output_tokens"] == 256 and found["figures"]["of_limit"]["median"] < 1
    assert 0 < found["start"]["again_s"] < found["start"]["first_s"], found["start"]
    assert found["memory"]["used_bytes"] > found["memory"]["planned_bytes"]
    assert len(json.loads(trace.read_bytes())["traceEvents"]) > 256
