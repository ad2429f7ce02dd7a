"""The run record: always a whole JSON file, never in the way of the run or of another file."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tinyvllm_cli.errors import UsageError
from tinyvllm_cli.io.record import MAX_TRACEBACKS, RunRecord, check_record_path


def make_record(path: Path | None, **options: Any) -> tuple[RunRecord, list[str]]:
    said: list[str] = []
    return RunRecord(path, {"pid": 5}, warn=said.append, **options), said


def test_it_holds_the_facts_and_the_latest_state(tmp_path: Path):
    path = tmp_path / "out.run.json"
    record, said = make_record(path)
    record.write("running", {"done": 1})
    assert json.loads(path.read_text())["state"] == "running"
    record.write("finished", {"done": 2}, {"ok": 2})
    wanted = {"pid": 5, "state": "finished", "progress": {"done": 2}, "summary": {"ok": 2}, "tracebacks": []}
    assert json.loads(path.read_text()) == wanted
    assert list(tmp_path.iterdir()) == [path] and not said


def test_it_is_due_now_and_then(tmp_path: Path):
    seldom, _ = make_record(tmp_path / "a", every_s=1000)
    often, _ = make_record(tmp_path / "b", every_s=0)
    for record in (seldom, often):
        assert record.due()
        record.write("running", {})
    assert not seldom.due() and often.due()


def test_what_goes_wrong_is_said_once(tmp_path: Path):
    record, said = make_record(tmp_path / "no" / "out.run.json")
    record.write("running", {})
    record.write("finished", {})
    assert len(said) == 1 and "cannot write the run record" in said[0] and not record.due()


def test_no_half_record_takes_the_place_of_a_whole_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "out.run.json"
    record, said = make_record(path)
    record.write("running", {})
    before = path.read_text()

    def write_half(self: Path, text: str) -> None:
        with self.open("w") as file:
            file.write(text[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", write_half)
    record.write("finished", {})
    assert path.read_text() == before and list(tmp_path.iterdir()) == [path] and len(said) == 1


def test_tracebacks_are_kept_but_not_without_end(tmp_path: Path):
    record, _ = make_record(tmp_path / "r")
    for i in range(MAX_TRACEBACKS + 5):
        record.add_traceback(f"t{i}")
    record.write("finished", {})
    assert json.loads((tmp_path / "r").read_text())["tracebacks"] == [f"t{i}" for i in range(MAX_TRACEBACKS)]


def test_no_path_no_record():
    record, said = make_record(None)
    record.write("running", {})
    assert not record.due() and not said


def test_what_is_no_file_is_written_to_and_not_replaced(tmp_path: Path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    record, said = make_record(check_record_path(path, {}))
    record.write("running", {})
    assert path.is_fifo() and not said
    assert json.loads(os.read(reader, 10_000))["state"] == "running"
    os.close(reader)


def test_a_record_never_takes_the_place_of_input_or_output(tmp_path: Path):
    source, link = tmp_path / "in.jsonl", tmp_path / "link"
    source.write_text("{}")
    link.symlink_to(source)
    for path in (source, link):
        with pytest.raises(UsageError, match="is the input itself"):
            check_record_path(path, {"input": source.stat()})
    with pytest.raises(UsageError, match="does not exist"):
        check_record_path(tmp_path / "no" / "r", {})
    with pytest.raises(UsageError, match="is a directory"):
        check_record_path(tmp_path, {})
