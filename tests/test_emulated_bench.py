"""`tinyvllm bench --backend gpu` over an emulated card, whose clock counts what was done on it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kernel_laws
import numpy as np
import pytest
from command import run_here, write_lines
from emulated_cuda import ERRORS, ILLEGAL_ADDRESS, Runtime
from gpu_subject import TINY, gpu_backend
from test_emulated_ops import open_device
from tiny import make_tiny_model

from tinyvllm_cli.backends.gpu.backend import GpuBackend
from tinyvllm_cli.backends.gpu.timing import READ_BYTES, GpuTiming
from tinyvllm_cli.bench import bench
from tinyvllm_cli.bench.start import StartTimes
from tinyvllm_cli.model.checkpoint import open_checkpoint

pytestmark = [pytest.mark.emulated, pytest.mark.usefixtures("own_cache")]

LINES = [{"prompt_token_ids": list(range(9, 12 + i)), "max_tokens": 6, "ignore_eos": True} for i in range(5)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), **TINY)


@pytest.fixture
def backend(model: Path, cuda: Runtime) -> Iterator[GpuBackend]:
    made = gpu_backend(open_checkpoint(model), num_blocks=40)
    yield made
    made.close()


@pytest.mark.parametrize("blocks", [1, 3])
def test_sum_words(blocks: int):
    kernel_laws.sum_words(open_device("bfloat16"), blocks)


def command(model: Path, tmp_path: Path) -> list[str | Path]:
    source = write_lines(tmp_path / "in.jsonl", LINES)
    options = ["--backend", "gpu", "--gpu-memory", "64MiB", "--slots", "3", "--trials", "2"]
    return ["bench", "--workload", source, "-m", model, "--json", tmp_path / "out.json", *options]


def test_a_gpu_is_measured(model: Path, tmp_path: Path, cuda: Runtime, monkeypatch: pytest.MonkeyPatch):
    held: list[dict[int, Any]] = []

    def start(*arguments: Any) -> StartTimes:
        held.append(dict(cuda.held))
        return StartTimes(2.0, 1.0)

    monkeypatch.setattr(bench, "time_start", start)
    assert run_here(*command(model, tmp_path)) == 0
    assert held == [{}], "another process has the card for itself"
    found = json.loads((tmp_path / "out.json").read_bytes())
    assert (found["backend"]["name"], found["backend"]["device"]) == ("gpu", "Emulated")
    assert found["workload"]["output_tokens"] == 6 * len(LINES)
    assert found["memory"]["used_bytes"] == found["memory"]["planned_bytes"] == found["backend"]["total_bytes"]
    steps, kernels = found["trials"][0]["steps"], found["kernels"]
    assert kernels["sample_rows"] == kernels["embed"] == steps, "whatever is launched by graphs, too"
    assert "sum_words" not in kernels and "fill_random" not in kernels, "only what the workload needs"


def test_a_model_that_is_too_small_to_read_is_refused(model: Path, tmp_path: Path, cuda: Runtime, capfd: Any):
    assert run_here(*command(model, tmp_path), "--slots", "1", "--max-model-len", "16") == 1
    assert re.fullmatch(r"error: the read rate cannot be measured over \d+ bytes of .*\n", capfd.readouterr().err)


def test_a_card_that_fails_ends_it_in_one_line(model: Path, tmp_path: Path, cuda: Runtime, capfd: Any):
    cuda.breaks_at = cuda.work_done + 400
    assert run_here(*command(model, tmp_path)) == 1
    assert capfd.readouterr() == ("", f"error: Emulated failed: {ERRORS[ILLEGAL_ADDRESS]}\n")


def test_marks_are_times_of_the_device(backend: GpuBackend, cuda: Runtime):
    """On this card everything takes a millisecond."""
    timing = GpuTiming(backend)
    for _ in range(2):
        timing.restart()
        done = cuda.work_done
        backend.copy_blocks([(1, 2), (3, 4)])
        first = timing.mark()
        assert cuda.work_done == done, "a mark waits for nothing"
        backend.copy_blocks([(5, 6)])
        last = timing.mark()
        assert [timing.seconds(mark) for mark in (first, last)] == pytest.approx([2e-3, 3e-3])
        assert cuda.work_done == done + 3
    timing.close()


def test_rates_are_bytes_and_operations_over_the_time_of_the_device(backend: GpuBackend, monkeypatch):
    """A read of the pool is one thing done; the products of two layers are eight."""
    timing, parameters = GpuTiming(backend), backend._parameters
    rates = timing.rates()
    pool = backend._cache.blocks.nbytes
    assert 128 << 10 < pool < READ_BYTES and rates.read == pytest.approx(pool // (128 << 10) * (128 << 10) / 1e-3)
    weights = sum(w.data.size for layer in parameters.layers for w in (layer.qkv, layer.o, layer.gate_up, layer.down))
    assert rates.product == pytest.approx(2 * backend.limits.max_batch_tokens * weights / 8e-3)
    backend._device.stream.synchronize()
    multiplied = np.array(backend._device.buffers.normed, np.float32)[: backend.limits.max_batch_tokens]
    assert len(np.unique(multiplied)) > 1000, "as many values as a model has"
    timing.close()


def test_rates_in_fp8_are_those_of_the_layers_and_of_the_rest(model: Path, cuda: Runtime):
    """The products of two layers are eight things done, one of 16 bits is one."""
    backend = gpu_backend(open_checkpoint(model), num_blocks=40, dtype="fp8")
    timing, parameters, rows = GpuTiming(backend), backend._parameters, backend.limits.max_batch_tokens
    rates = timing.rates()
    weights = sum(w.data.size for layer in parameters.layers for w in (layer.qkv, layer.o, layer.gate_up, layer.down))
    assert rates.fp8_product == pytest.approx(2 * rows * weights / 8e-3)
    hidden = parameters.embed.data.shape[1]
    assert rates.product == pytest.approx(2 * rows * hidden * hidden / 1e-3)
    backend._device.stream.synchronize()
    codes = np.array(backend._device.buffers.normed)[:rows]
    assert len(np.unique(codes)) > 100 and not (codes & 0x7F == 0x7F).any(), "as many codes as a model has, and no NaN"
    timing.close()
    backend.close()
