"""What `tinyvllm bench` refuses, before anything is opened or measured, and how it ends when the end comes early."""

from __future__ import annotations

import errno
import json
import os
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from command import TINYVLLM, run_here, strict_json, write_lines

from tinyvllm_cli.backends.cpu.backend import CpuBackend, CpuStep
from tinyvllm_cli.bench import bench, subject
from tinyvllm_cli.cli.signals import Interrupted
from tinyvllm_cli.errors import DeviceError
from tinyvllm_cli.types import Batch

pytestmark = pytest.mark.usefixtures("own_cache")

CPU = ("--backend", "cpu", "--threads", "1")


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
    other, folder, theirs, link = (tmp_path / name for name in ("notes.json", "folder", "theirs.json", "link"))
    other.write_text('{"my": "notes"}')
    theirs.write_text('{"traceEvents": []}')
    link.symlink_to(tmp_path / "a")
    folder.mkdir()
    (bad := tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\n{"prompt": 1}\n')
    (empty := tmp_path / "empty.jsonl").write_text("\n")
    ids = {"prompt_token_ids": [1]}
    text = write_lines(tmp_path / "ids.jsonl", [ids, ids, {"prompt": "a"}, {"prompt": "b"}])
    several = write_lines(tmp_path / "several.jsonl", [ids, {**ids, "n": 3, "temperature": 1}])
    stops = write_lines(tmp_path / "stops.jsonl", [{**ids, "stop": "a"}])
    (plain := tmp_path / "plain.txt").write_text("\na\n")
    (model := tmp_path / "model").mkdir()
    (model / "config.json").write_text("{}")
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
        (("--workload", several), "several.jsonl, line 2: n is 3, wanted 1"),
        (("--workload", text, *random), "ids.jsonl, line 3 holds text (prompt), and random weights have no tokenizer"),
        (("--workload", plain, *random), "plain.txt, line 2 holds text (prompt), and random weights have no tokenizer"),
        (
            ("--workload", stops, *random),
            "line 1 holds text (stop), and random weights have no tokenizer: give stop_to",
        ),
        ((*random, "--write", model), f"{model} is not empty: give the name of a new folder, or use the model in it"),
        (("--json", other), "notes.json exists and is something else"),
        (("--trace", other), "notes.json exists and is something else"),
        (("--json", folder), "is a directory"),
        (("--json", tmp_path / "no" / "out.json"), "does not exist: make it first"),
        (("--json", "/proc/out.json"), "cannot be written"),
        (("--json", tmp_path / "a", "--trace", tmp_path / "a"), "are one place: give each its own"),
        (("--json", tmp_path / "a", "--trace", tmp_path / "folder" / ".." / "a"), "are one place: give each its own"),
        (("--json", tmp_path / "a", "--trace", link), "are one place: give each its own"),
        ((*random, "--json", tmp_path / "a", "--write", tmp_path / "a"), "are one place: give each its own"),
        ((*random, "--trace", tmp_path / "a", "--write", tmp_path / "a" / "b"), "are one place: give each its own"),
        (("--json", "-"), "--json is a file, wanted a name"),
        (("--trace", theirs), "theirs.json exists and is something else"),
    ]:
        assert message in refused(*args, said=said), args
    assert "request line-2, line 2 failed: prompt is 1" in refused("--workload", bad, said=said, code=1)
    assert other.read_text() == '{"my": "notes"}' and sorted(path.name for path in tmp_path.iterdir()) == [
        "bad.jsonl", "empty.jsonl", "folder", "ids.jsonl", "link", "model", "notes.json", "plain.txt", "several.jsonl",
        "stops.jsonl", "theirs.json",
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

    def breaking(self: CpuBackend, batch: Batch) -> CpuStep:
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
    assert capfd.readouterr() == ("", "stopped before the end: no figures are kept\n")


@pytest.mark.usefixtures("no_start")
def test_files_that_cannot_be_written_after_all_cost_the_table_nothing(said, tiny: Path, tmp_path: Path, monkeypatch):
    out, trace = tmp_path / "out.json", tmp_path / "trace.json"
    out.write_text('{"tinyvllm_bench": "of an earlier one"}')

    def full(self: Path, text: bytes) -> int:
        with self.open("wb") as file:
            file.write(text[:100])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    code, shown, errors = said("bench", "-m", tiny, "--trials", "1", "--json", out, "--trace", trace, *CPU)
    reasons = [f"cannot write {path}: No space left on device" for path in (out, trace)]
    assert (code, errors) == (1, f"error: {'; '.join(reasons)}\n") and "output tokens/s" in shown
    assert out.read_text() == '{"tinyvllm_bench": "of an earlier one"}' and list(tmp_path.iterdir()) == [out]


@pytest.mark.usefixtures("no_start")
def test_a_link_stays_a_link_and_a_device_a_device(said, tiny: Path, tmp_path: Path):
    (link := tmp_path / "link").symlink_to("out.json")
    for _ in range(2):
        assert said("bench", "-m", tiny, "--trials", "1", "--json", link, "--trace", "/dev/null", *CPU)[0] == 0
        assert link.readlink() == Path("out.json") and strict_json((tmp_path / "out.json").read_bytes())
    assert {path.name for path in tmp_path.iterdir()} == {"link", "out.json"} and Path("/dev/null").is_char_device()


def test_where_the_table_goes_no_file_goes(tiny: Path, tmp_path: Path):
    """With one the other would be written over."""
    for option in ("--json", "--trace"):
        for stream in ("stdout", "stderr"):
            out = tmp_path / "out.txt"
            with out.open("wb") as file:
                streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, stream: file}
                command = [*TINYVLLM, "bench", "-m", str(tiny), option, f"/dev/{stream}", *CPU]
                run = subprocess.run(command, **streams, check=False)
            said = out.read_bytes() if stream == "stderr" else run.stderr
            name = {"stdout": "output", "stderr": "error"}[stream]
            assert run.returncode == 2, said
            assert said.decode() == f"error: {option} /dev/{stream} is where standard {name} goes: give another name\n"


@pytest.mark.usefixtures("no_start")
def test_a_standard_output_that_takes_nothing_is_named(tiny: Path, tmp_path: Path, monkeypatch, capfd):
    out = tmp_path / "out.json"
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr("sys.stdout", full)
        assert run_here("bench", "-m", tiny, "--trials", "1", "--json", out, *CPU) == 1
        monkeypatch.undo()
        with suppress(OSError):
            full.close()
    assert capfd.readouterr().err == "error: cannot write standard output: No space left on device\n"
    assert strict_json(out.read_bytes())["trials"]


def test_a_start_that_fails_says_why_and_leaves_the_figures(said, tiny: Path, monkeypatch):
    monkeypatch.setattr(bench.BenchOptions, "run_options", lambda self: ["--max-model-len", "9000"])
    code, shown, errors = said("bench", "-m", tiny, "--trials", "1", *CPU)
    assert code == 1 and "output tokens/s" in shown
    assert errors.startswith("error: the process whose start is timed failed: --max-model-len 9000 is more than")
