"""The options of the machine: both commands have them all, and a benchmark hands them on to the runs that it starts."""

import json
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest

from tinyvllm_cli.backends.timing import Rates
from tinyvllm_cli.bench import bench as module
from tinyvllm_cli.bench.bench import BenchOptions
from tinyvllm_cli.bench.limit import compute_limit
from tinyvllm_cli.bench.measure import ELEM_BYTES, _limit
from tinyvllm_cli.bench.start import StartTimes
from tinyvllm_cli.bench.workloads import Lengths
from tinyvllm_cli.cli.bench import bench
from tinyvllm_cli.cli.run import run
from tinyvllm_cli.config import EngineOptions
from tinyvllm_cli.machine_options import MachineOptions
from tinyvllm_cli.model.random_weights import random_config
from tinyvllm_cli.run_options import RunOptions

NAMES = [field.name for field in fields(MachineOptions)]
OTHER: dict[str, Any] = {  # than the default
    "dtype": "bfloat16",
    "backend": "cpu",
    "gpu_memory": 3 << 30,
    "slots": 7,
    "max_model_len": 99,
    "kv_dtype": "fp8",
    "no_prefix_cache": True,
    "threads": 2,
}


@pytest.mark.parametrize(("command", "arguments"), [(run, ["in.jsonl"]), (bench, [])], ids=["run", "bench"])
def test_every_option_of_the_machine_is_one_of_the_command(command: click.Command, arguments: list[str]):
    params = command.make_context(command.name, arguments).params
    assert MachineOptions(**{name: params[name] for name in NAMES}) == MachineOptions()


@pytest.mark.parametrize("names", [[], NAMES, *([name] for name in NAMES)], ids=",".join)
def test_a_run_that_a_benchmark_starts_has_its_options(names: list[str]):
    measured = BenchOptions(workload="latency", trials=1, **{name: OTHER[name] for name in names})
    started = RunOptions(**run.make_context("run", ["in.jsonl", *measured.run_options()]).params)
    assert [getattr(started, name) for name in NAMES] == [getattr(measured, name) for name in NAMES]


@pytest.mark.parametrize("name", [name for name in NAMES if name != "backend"])
def test_an_engine_is_asked_for_what_the_option_says(name: str):
    changed = MachineOptions(**{name: OTHER[name]}).engine_options()
    wanted = {"prefix_cache": False} if name == "no_prefix_cache" else {name: OTHER[name]}
    assert changed == EngineOptions(**wanted) != EngineOptions()


@pytest.mark.usefixtures("own_cache")
def test_a_benchmark_with_a_kv_cache_in_fp8_says_so(said, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    started: list[list[str]] = []
    monkeypatch.setattr(module, "time_start", lambda _, options, __: started.append(options) or StartTimes(2.0, 1.0))
    found = {}
    for kv_dtype in ("auto", "fp8"):
        out = tmp_path / f"{kv_dtype}.json"
        code, shown, _ = said(
            "bench", "-m", tiny, "--backend", "cpu", "--threads", "1", "--trials", "1", "--kv-dtype", kv_dtype,
            "--json", out
        )  # fmt: skip
        assert code == 0
        result = found[kv_dtype] = json.loads(out.read_bytes())
        assert result["engine"]["kv_dtype"] == kv_dtype
        assert ("float32 on the CPU, K and V in FP8, 32 slots" in shown) == (kv_dtype == "fp8")
        assert result["backend"]["kv_bytes_per_token"] == 4 * 2 * 2 * 2 * 16  # layers, K and V, heads, numbers
    assert [options[options.index("--kv-dtype") + 1] for options in started] == ["auto", "fp8"]


@pytest.mark.parametrize("kv_bytes", [1, 33_792, 65_536])
@pytest.mark.parametrize(("dtype", "layer_bytes"), [("bfloat16", 2), ("fp8", 1)])
def test_the_limit_counts_k_and_v_and_weights_as_the_backend_holds_them(kv_bytes: int, dtype: str, layer_bytes: int):
    config, rates = random_config("llama-3.2-1b"), Rates(4e12, 6e14)
    backend = SimpleNamespace(
        facts=SimpleNamespace(name="gpu", dtype=dtype, kv_bytes_per_token=kv_bytes), limits=SimpleNamespace(max_slots=2)
    )
    lengths = Lengths(prompts=(9, 5, 7), outputs=(3, 8, 2), shared=1)
    assert _limit(SimpleNamespace(config=config, backend=backend), lengths, rates) == compute_limit(
        config,
        [(9, 3), (5, 8), (7, 2)],
        elem_bytes=ELEM_BYTES["gpu"],
        layer_bytes=layer_bytes,
        token_bytes=kv_bytes,
        slots=2,
        rates=rates,
        shared=1,
    )
