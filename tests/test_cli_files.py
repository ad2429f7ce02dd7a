"""The files of `tinyvllm run`: none is written that it should keep, and an input that changes is read as it was."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command import by_id, read_answers, run_here, strict_json, write_lines
from tiny import make_tiny_model
from tiny_gguf import write_gguf_twin

from tinyvllm_cli import load

LINES = [{"custom_id": i, "prompt": f"Number {i}", "max_tokens": 2} for i in range(3)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINYVLLM_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "tiny")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.mark.parametrize("lines", [LINES, []])
@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "new.jsonl"])
def test_no_output_takes_the_place_of_a_file_of_the_model(
    tiny: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], lines: list[Any], name: str
):
    before = contents(tiny)
    source = write_lines(tmp_path / "in.jsonl", lines)
    link = tmp_path / "link.jsonl"
    link.symlink_to(tiny / name)
    for output in (tiny / name, link):
        assert run_here("run", source, "-m", tiny, "-o", output, "--overwrite") == 2
        assert "is a file of the model" in capfd.readouterr().err
        assert contents(tiny) == before


def test_no_output_takes_the_place_of_a_model_that_is_found_by_its_name(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    model = write_gguf_twin(tiny, tmp_path / "cached.gguf")
    found = load.find_model(str(model))
    monkeypatch.setattr(load, "find_model", lambda *_, **__: found)
    before = model.read_bytes()
    source = write_lines(tmp_path / "in.jsonl", LINES)
    assert run_here("run", source, "-m", "some-name", "-o", model, "--overwrite") == 2
    assert model.read_bytes() == before


@pytest.mark.parametrize("options", [["-o", "system.txt", "--overwrite"], ["-o", "out", "--record", "system.txt"]])
def test_neither_output_nor_record_takes_the_place_of_the_system_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], options: list[str]
):
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "in.jsonl", LINES)
    (tmp_path / "system.txt").write_text("Be brief.")
    assert run_here("run", "in.jsonl", "-m", "/no/model", "-s", "@system.txt", *options) == 2
    assert "is the --system file itself" in capfd.readouterr().err
    assert (tmp_path / "system.txt").read_text() == "Be brief." and not (tmp_path / "out").exists()


def test_a_record_replaces_only_a_record(tiny: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    source, out = write_lines(tmp_path / "in.jsonl", LINES), tmp_path / "out.jsonl"
    record = tmp_path / "out.jsonl.run.json"
    record.write_text("my notes")
    assert run_here("run", source, "-m", "/no/model", "-o", out) == 2
    assert record.read_text() == "my notes" and "is something else" in capfd.readouterr().err
    record.unlink()
    for _ in range(2):
        assert run_here("run", source, "-m", tiny, "-o", out, "--overwrite") == 0
    assert json.loads(record.read_text())["state"] == "finished"


def test_the_record_of_a_command_that_is_no_text(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source = write_lines(tmp_path / "in.jsonl", LINES)
    out = tmp_path / os.fsdecode(b"\xff.jsonl")
    monkeypatch.setattr("sys.argv", ["tinyvllm", str(out)])
    assert run_here("run", source, "-m", tiny, "-o", out, "--record", tmp_path / "r") == 0
    assert len(read_answers(out)) == len(LINES)
    assert strict_json((tmp_path / "r").read_bytes())["command"] == ["tinyvllm", f"{tmp_path}/?.jsonl"]


def test_progress_and_summary_are_one_count(tiny: Path, tmp_path: Path):
    lines = [*LINES, {"prompt": "no token", "max_tokens": 0}, {}]
    out = tmp_path / "out.jsonl"
    assert run_here("run", write_lines(tmp_path / "in.jsonl", lines), "-m", tiny, "-o", out, "--threads=1") == 3
    found = json.loads((tmp_path / "out.jsonl.run.json").read_text())
    used = [answer["usage"] for answer in read_answers(out) if answer["usage"]]
    for name in ("prompt_tokens", "completion_tokens"):
        assert found["summary"][name] == found["progress"][name] == sum(usage[name] for usage in used)
    assert found["summary"]["tokens_per_s"] == pytest.approx(found["progress"]["tokens_per_s"], abs=1e-3)
    assert found["engine"]["threads"] == 1 and found["engine"]["dtype"] == "float32"


@pytest.fixture
def meanwhile(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What is to happen while the model loads."""
    todo: list[Any] = []
    find_model = load.find_model

    def find(*args: Any, **options: Any) -> Any:
        for do in todo:
            do()
        return find_model(*args, **options)

    monkeypatch.setattr(load, "find_model", find)
    yield todo


@pytest.mark.parametrize("appended", [0, 3])
def test_lines_appended_while_the_model_loads_are_not_read(
    tiny: Path, tmp_path: Path, meanwhile: list[Any], capfd: pytest.CaptureFixture[str], appended: int
):
    source, out = write_lines(tmp_path / "in.jsonl", LINES), tmp_path / "out.jsonl"

    def append() -> None:
        with source.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in LINES[:appended])

    meanwhile.append(append)
    assert run_here("run", source, "-m", tiny, "-o", out) == 0
    assert by_id(read_answers(out)).keys() == {0, 1, 2}
    said = capfd.readouterr().err
    assert ("in.jsonl has changed since the run began" in said) is bool(appended)
    meanwhile.clear()
    source.write_text("".join(json.dumps({**line, "custom_id": i}) + "\n" for i, line in enumerate(2 * LINES)))
    assert run_here("run", source, "-m", tiny, "-o", out, "--resume") == 0, "as the warning says"
    assert by_id(read_answers(out)).keys() == {*range(6)}


@pytest.mark.parametrize("command", ["run", "score"])
@pytest.mark.parametrize("options", [(), ("--ordered",)])
@pytest.mark.parametrize("torn", [0, 1, 9])
def test_an_input_that_is_cut_ends_the_run_as_failed_and_resume_does_the_rest(
    tiny: Path,
    tmp_path: Path,
    meanwhile: list[Any],
    capfd: pytest.CaptureFixture[str],
    command: str,
    options: tuple[str, ...],
    torn: int,
):
    """torn: bytes that are left of the second line."""
    lines = LINES if command == "run" else [{"custom_id": i, "text": f"Number {i}"} for i in range(3)]
    source, out = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    whole = source.read_bytes()
    left = whole.index(b"\n") + 1 + torn
    asked = (command, source, "-m", tiny, "-o", out, *options)
    meanwhile.append(lambda: os.truncate(source, left))
    assert run_here(*asked) == 1
    *_, said = capfd.readouterr().err.splitlines()
    assert f"{source} ends after {left} of the {len(whole)} bytes" in said and "restore it" in said
    assert "--resume" in said
    assert json.loads((tmp_path / "out.jsonl.run.json").read_text())["state"] == "failed"
    kept = out.read_bytes()
    assert [answer["custom_id"] for answer in read_answers(kept)] == [0], "no line for what is left of the second"
    meanwhile.clear()
    source.write_bytes(whole)
    assert run_here(*asked, "--resume") == 0
    assert out.read_bytes().startswith(kept) and by_id(read_answers(out)).keys() == {0, 1, 2}


def test_an_input_that_holds_other_requests_in_as_many_bytes_is_a_run_that_failed(
    tiny: Path, tmp_path: Path, meanwhile: list[Any], capfd: pytest.CaptureFixture[str]
):
    source, out = write_lines(tmp_path / "in.jsonl", LINES), tmp_path / "out.jsonl"
    first, rest = source.read_bytes().split(b"\n", 1)
    meanwhile.append(lambda: source.write_bytes(first + b"\n" * (1 + len(rest))))
    assert run_here("run", source, "-m", tiny, "-o", out, "-q") == 1
    said = capfd.readouterr().err
    assert f"{source} was rewritten" in said and "3 requests" in said and "and 1 when" in said
    assert json.loads((tmp_path / "out.jsonl.run.json").read_text())["state"] == "failed"
    assert by_id(read_answers(out)).keys() == {0}


def test_a_dry_run_of_an_input_that_is_cut_says_so(
    tiny: Path, tmp_path: Path, meanwhile: list[Any], capfd: pytest.CaptureFixture[str]
):
    source = tmp_path / "in.csv"
    source.write_text("custom_id,word\n1,one\n2,two\n")
    meanwhile.append(lambda: os.truncate(source, source.stat().st_size - 2))
    assert run_here("run", source, "-m", tiny, "-t", "{{ word }}", "--dry-run") == 1
    assert f"{source} ends after" in capfd.readouterr().err
