"""What `tinyvllm bench` refuses, before anything is opened or measured, and how it ends when the end comes early."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command import run_here, write_lines

from tinyvllm_cli.backends.cpu.backend import CpuBackend, Done
from tinyvllm_cli.bench import bench, subject
from tinyvllm_cli.bench.start import StartTimes
from tinyvllm_cli.cli.signals import Interrupted
from tinyvllm_cli.errors import DeviceError
from tinyvllm_cli.types import Batch

pytestmark = pytest.mark.usefixtures("own_cache")

CPU = ("--backend", "cpu", "--threads", "1")


@pytest.fixture
def no_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """No processes of their own are started."""
    monkeypatch.setattr(bench, "time_start", lambda *arguments: StartTimes(2.5, 1.25))


@pytest.fixture
def said(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Exit code, standard output and standard error of a command."""

    def call(*args: str | Path) -> tuple[int, str, str]:
        capfd.readouterr()
        code = run_here(*args)
        return code, *capfd.readouterr()

    return call


def refused(*args: str | Path, said, code: int = 2) -> str:
    """The one line that a command ends with, and nothing else."""
    found, shown, errors = said("bench", *args)
    assert (found, shown, errors.count("\n")) == (code, "", 1), errors
    assert errors.startswith("error: ")
    return errors


@pytest.fixture
def unopened(monkeypatch: pytest.MonkeyPatch) -> None:
    """No model is opened: what is refused was found before."""

    def opened(*args: Any, **options: Any) -> None:
        raise AssertionError("a model was opened")

    monkeypatch.setattr(bench, "open_model", opened)
    monkeypatch.setattr(subject, "open_backend", opened)
    monkeypatch.setattr(bench, "open_random", opened)


@pytest.mark.usefixtures("unopened")
def test_what_cannot_be_is_refused_before_a_model_is_opened(said, tiny: Path, tmp_path: Path):
    other, folder = tmp_path / "notes.json", tmp_path / "folder"
    other.write_text('{"my": "notes"}')
    folder.mkdir()
    (bad := tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\n{"prompt": 1}\n')
    (empty := tmp_path / "empty.jsonl").write_text("\n")
    random = ("--random-weights", "smollm2-135m")
    for args, message in [
        (("--random-weights", "llama-4"), "'llama-4' is not one of 'llama-3.2-1b'"),
        (("-m", tiny, *random), "--model and --random-weights are two models"),
        (("-m", tiny, "--write", folder), "--write keeps random weights"),
        ((*random, "--revision", "main"), "--revision is that of a Hub model"),
        (("--trials", "0"), "0 is not in the range"),
        (("--workload", "fast"), "--workload fast: wanted latency, mixed, short, prefix, or a .jsonl or .txt file"),
        (("--workload", tmp_path / "none.jsonl"), "cannot read the input"),
        (("--workload", empty), "holds no requests"),
        (("--workload", empty, *random), "random weights have no tokenizer"),
        (("--json", other), "notes.json exists and is something else"),
        (("--trace", other), "notes.json exists and is something else"),
        (("--json", folder), "is a directory"),
        (("--json", tmp_path / "no" / "out.json"), "does not exist: make it first"),
        (("--json", "/proc/out.json"), "cannot be written"),
        (("--json", tmp_path / "a", "--trace", tmp_path / "a"), "give each a file of its own"),
    ]:
        assert message in refused(*args, said=said), args
    assert "request line-2, line 2 failed: prompt is 1" in refused("--workload", bad, said=said, code=1)
    assert other.read_text() == '{"my": "notes"}' and sorted(path.name for path in tmp_path.iterdir()) == [
        "bad.jsonl", "empty.jsonl", "folder", "notes.json"
    ]  # fmt: skip


def test_a_workload_longer_than_the_context_says_what_to_do(said, tiny: Path):
    found = refused("-m", tiny, "--max-model-len", "383", *CPU, said=said)
    assert "a request of 384 tokens" in found and "holds 383" in found and "--max-model-len" in found


def test_a_request_that_fails_is_named(said, tiny: Path, tmp_path: Path):
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "a"}, {"custom_id": "b", "prompt_token_ids": [9999]}])
    found = refused("--workload", source, "-m", tiny, *CPU, said=said, code=1)
    assert "request b, line 2 failed: prompt_token_ids has 9999" in found


def test_a_workload_of_no_tokens_is_refused(said, tiny: Path, tmp_path: Path):
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "a", "max_tokens": 0}])
    assert "asks for no token" in refused("--workload", source, "-m", tiny, *CPU, said=said)


def test_files_of_an_earlier_benchmark_are_replaced(said, tiny: Path, tmp_path: Path, no_start):
    files = ("--json", tmp_path / "out.json", "--trace", tmp_path / "trace.json")
    for trials in ("2", "1"):
        assert said("bench", "-m", tiny, "--trials", trials, *files, *CPU)[0] == 0
    assert len(json.loads((tmp_path / "out.json").read_bytes())["trials"]) == 1


# ---------------------------------------------------------------- the end comes early


def break_at(monkeypatch: pytest.MonkeyPatch, number: int, error: BaseException) -> None:
    """The device raises at a step."""
    step, steps = CpuBackend.step, []

    def breaking(self: CpuBackend, batch: Batch) -> Done:
        steps.append(batch)
        if len(steps) == number:
            raise error
        return step(self, batch)

    monkeypatch.setattr(CpuBackend, "step", breaking)


def test_a_device_that_fails_ends_it_in_one_line(said, tiny: Path, tmp_path: Path, monkeypatch):
    break_at(monkeypatch, 300, DeviceError("NVIDIA Stand-in failed: illegal address"))
    out = tmp_path / "out.json"
    found = refused("-m", tiny, "--json", out, *CPU, said=said, code=1)
    assert "NVIDIA Stand-in failed: illegal address" in found and not out.exists()


def test_an_interrupt_ends_it_with_a_line(tiny: Path, tmp_path: Path, monkeypatch, capfd):
    break_at(monkeypatch, 300, Interrupted(2))
    with pytest.raises(Interrupted) as caught:
        run_here("bench", "-m", tiny, "--json", tmp_path / "out.json", *CPU)
    assert caught.value.exit_code == 130 and not list(tmp_path.iterdir())
    assert capfd.readouterr() == ("", "stopped before the end: nothing is kept\n")


def test_a_start_that_fails_says_why_and_leaves_the_figures(said, tiny: Path, monkeypatch):
    monkeypatch.setattr(bench.BenchOptions, "run_options", lambda self: ["--max-model-len", "9000"])
    code, shown, errors = said("bench", "-m", tiny, "--trials", "1", *CPU)
    assert code == 1 and "output tokens/s" in shown
    assert errors.startswith("error: the process whose start is timed failed: --max-model-len 9000 is more than")
