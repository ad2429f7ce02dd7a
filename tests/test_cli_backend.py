"""`tinyvllm run` and its backend: which one, how much of it, and what is left where it fails under way."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from backend_runs import finished_before, run
from command import run_here, write_lines
from tiny import make_tiny_model

from tinyvllm_cli import run_file
from tinyvllm_cli.backends.cpu.backend import CpuBackend, CpuStep
from tinyvllm_cli.backends.gpu import device, driver, packages
from tinyvllm_cli.backends.gpu.driver import Driver
from tinyvllm_cli.config import EngineConfig
from tinyvllm_cli.errors import DeviceError
from tinyvllm_cli.types import BackendFacts, Batch

pytestmark = pytest.mark.usefixtures("own_cache")

LINES = [{"custom_id": i, "prompt": f"Number {i}", "max_tokens": 2 + 3 * (i % 3), "ignore_eos": True} for i in range(9)]


class StandIn(CpuBackend):
    """The CPU in the place of a GPU; it breaks at a step where it is told to."""

    failing_step = -1

    @property
    def facts(self) -> BackendFacts:
        return BackendFacts("gpu", "NVIDIA Stand-in", super().facts.dtype, 96, {"driver": "580.1", "planned_bytes": 7})

    def step(self, batch: Batch) -> CpuStep:
        self.steps = getattr(self, "steps", 0) + 1
        if self.steps == self.failing_step:
            raise DeviceError("CUDA error 700 (illegal address)")
        return super().step(batch)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> list[EngineConfig]:
    """A machine with a GPU, which is a stand-in; the configs it was opened with."""
    opened: list[EngineConfig] = []

    def opening(config: Any, tensors: Any, engine: EngineConfig, *, tokenizer_size: int, cache: Path | None) -> StandIn:
        opened.append(engine)
        return StandIn(config, tensors, replace(engine, max_model_len=64), tokenizer_size=tokenizer_size)

    monkeypatch.setattr(driver, "find_driver", lambda: Driver((13, 0), 1, None))
    monkeypatch.setattr(packages, "check_packages", lambda driver: None)
    monkeypatch.setattr(device, "open_card", lambda: None)
    gpu = ModuleType("tinyvllm_cli.backends.gpu.backend")
    gpu.open_gpu_backend = opening
    monkeypatch.setitem(sys.modules, gpu.__name__, gpu)
    return opened


# ---------------------------------------------------------------- options


@pytest.fixture
def gpu_memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], float | int | None]:
    """What --gpu-memory means; None where it is refused."""

    def read(text: str) -> float | int | None:
        asked: list[Any] = []
        monkeypatch.setattr(run_file, "run_file", lambda options, **rest: asked.append(options) or 0)
        code = run_here("run", "in.jsonl", "--gpu-memory", text)
        assert (code, len(asked)) in {(0, 1), (2, 0)}
        return asked[0].gpu_memory if asked else None

    return read


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("0.9", 0.9),
        ("1", 1.0),
        ("1.0", 1.0),
        ("0.001", 0.001),
        ("20GiB", 20 << 30),
        ("0.5GiB", 1 << 29),
        ("1.5GB", 1_500_000_000),
        ("300MiB", 300 << 20),
        ("300MB", 300_000_000),
        ("4KiB", 4096),
        ("1B", 1),
    ],
)
def test_a_share_is_a_float_and_a_size_is_bytes(gpu_memory, text: str, wanted: float | int):
    assert gpu_memory(text) == wanted and type(gpu_memory(text)) is type(wanted)


REFUSED = ["0", "0.0", "1.01", "20", "-1", "-1GiB", "90%", "", " ", "GiB", ".5", "5.", "1e-1", "0x1", "nan", "inf"]
REFUSED += ["20 GiB", "20gib", "20G", "20TiB", "0GiB", "0.5B", "1,5GiB", "1_0GiB", "٣GiB", "9" * 5000, "9" * 5000 + "B"]


@pytest.mark.parametrize("text", REFUSED, ids=lambda text: text[:10])
def test_what_is_neither_share_nor_size_is_refused_with_both_named(gpu_memory, capfd: Any, text: str):
    assert gpu_memory(text) is None
    said = capfd.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1
    assert "--gpu-memory" in said and "0.9" in said and "20GiB" in said


# ---------------------------------------------------------------- a run


def test_what_runs_is_said_and_recorded(tiny: Path, tmp_path: Path, card: list[EngineConfig], capfd: Any):
    on_gpu, record = run(tmp_path, tiny, LINES, "--gpu-memory", "2GiB")
    assert "float32 weights as bfloat16 on the NVIDIA Stand-in, 256 slots, context 64" in capfd.readouterr().err
    facts = {"name": "gpu", "device": "NVIDIA Stand-in", "dtype": "bfloat16", "kv_bytes_per_token": 96}
    assert record["backend"] == facts | {"driver": "580.1", "planned_bytes": 7}
    assert record["engine"]["gpu_memory"] == card[0].gpu_memory == 2 << 30
    assert (card[0].slots, card[0].max_batch_tokens, card[0].dtype) == (256, 8192, "bfloat16")
    on_cpu, record = run(tmp_path, tiny, LINES, "--backend", "cpu", "--dtype", "bfloat16")
    assert len(card) == 1 and on_cpu.keys() == on_gpu.keys()
    assert "float32 weights as bfloat16 on the CPU, 32 slots" in capfd.readouterr().err
    kv_bytes = 4 * 2 * 2 * 2 * 16  # float32: layers, K and V, heads, numbers
    assert record["backend"] == {"name": "cpu", "device": "CPU", "dtype": "bfloat16", "kv_bytes_per_token": kv_bytes}
    assert (record["engine"]["slots"], record["engine"]["max_batch_tokens"]) == (32, 512)


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_a_kv_cache_in_fp8_is_said_and_recorded(
    tiny: Path, tmp_path: Path, card: list[EngineConfig], capfd: Any, backend: str
):
    plain, record = run(tmp_path, tiny, LINES, "--backend", backend)
    assert "FP8" not in capfd.readouterr().err
    assert record["options"]["kv_dtype"] == {"value": "auto", "from": "default"}
    found, record = run(tmp_path, tiny, LINES, "--backend", backend, "--kv-dtype", "fp8")
    device = "CPU" if backend == "cpu" else "NVIDIA Stand-in"
    assert f" on the {device}, K and V in FP8, " in capfd.readouterr().err
    assert record["options"]["kv_dtype"] == {"value": "fp8", "from": "command line"}
    assert record["engine"]["kv_dtype"] == "fp8"
    assert [config.kv_dtype for config in card] == ["auto", "fp8"] * (backend == "gpu")
    assert found.keys() == plain.keys()


def test_the_model_s_own_dtype_is_kept_on_a_gpu(tmp_path: Path, card: list[EngineConfig], capfd: Any):
    run(tmp_path, make_tiny_model(tmp_path / "half", dtype="float16"), LINES, "--slots", "3")
    assert (card[0].dtype, card[0].slots) == ("float16", 3)
    assert "float16 weights as float16 on the NVIDIA Stand-in, 3 slots" in capfd.readouterr().err


def test_float32_on_a_gpu_is_refused_before_a_model_is_looked_for(tmp_path: Path, card: list[EngineConfig], capfd: Any):
    source = write_lines(tmp_path / "in.jsonl", LINES)
    assert run_here("run", source, "-m", "/no/such/model", "--dtype", "float32") == 2
    said = capfd.readouterr().err
    assert said.startswith("error: --dtype float32 is for the CPU") and said.count("\n") == 1
    assert card == []


def test_a_gpu_that_cannot_be_used_ends_the_run_before_a_model_is_looked_for(
    tmp_path: Path, card: list[EngineConfig], monkeypatch: pytest.MonkeyPatch, capfd: Any
):
    def too_old(driver: Driver) -> None:
        raise DeviceError("the driver is too old: update it")

    monkeypatch.setattr(packages, "check_packages", too_old)
    out = tmp_path / "out.jsonl"
    assert run_here("run", write_lines(tmp_path / "in.jsonl", LINES), "-m", "/no/such/model", "-o", out) == 1
    assert capfd.readouterr().err == "error: the driver is too old: update it; or give --backend cpu\n"
    assert not out.exists()


@pytest.mark.parametrize("at", [1, 4])
def test_a_gpu_that_fails_under_way_keeps_the_finished_lines(
    tiny: Path, tmp_path: Path, card: list[EngineConfig], monkeypatch: pytest.MonkeyPatch, capfd: Any, at: int
):
    whole, _ = run(tmp_path, tiny, LINES, "--slots", "2")
    capfd.readouterr()
    monkeypatch.setattr(StandIn, "failing_step", at)
    found, record = run(tmp_path, tiny, LINES, "--slots", "2", code=1)
    fault = "CUDA error 700 (illegal address)"
    done = finished_before(fault, found, record, whole, capfd.readouterr().err, slots=2)
    assert bool(done) == (at > 1)
