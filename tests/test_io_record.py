"""The run record: always a whole JSON file, never in the way of the run or of another file."""

import ast
import json
import os
import pty
import subprocess
import sys
import threading
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from command import strict_json

import tinyvllm_cli
from tinyvllm_cli.errors import UsageError
from tinyvllm_cli.io.record import MAX_BYTES, MAX_TRACEBACKS, RunRecord, check_record_path, read_record
from tinyvllm_cli.run_facts import machine_facts


def make_record(path: Path | None, **options: Any) -> tuple[RunRecord, list[str]]:
    said: list[str] = []
    return RunRecord(path, {"pid": 5}, warn=said.append, **options), said


def full_disk(room: int, never_full: Path | None = None) -> Any:
    """Path.write_bytes where there is room for so many bytes of a new file."""
    write_bytes = Path.write_bytes

    def write(self: Path, data: bytes) -> int:
        if self == never_full:
            return write_bytes(self, data)
        write_bytes(self, data[:room])
        raise OSError(28, "No space left on device")

    return write


def test_it_holds_the_facts_and_the_latest_state(tmp_path: Path):
    path = tmp_path / "out.run.json"
    record, said = make_record(path)
    record.write("running", {"done": 1})
    assert json.loads(path.read_text())["state"] == "running"
    record.write("finished", {"done": 2}, {"ok": 2})
    wanted = {"pid": 5, "state": "finished", "progress": {"done": 2}, "summary": {"ok": 2}, "tracebacks": []}
    assert json.loads(path.read_text()) == wanted
    assert list(tmp_path.iterdir()) == [path] and not said


def test_it_has_the_version_of_each_library_that_answers_are_made_with():
    """What is imported, somewhere, by the code of texts, engine and CPU."""
    package = Path(str(tinyvllm_cli.__file__)).parent
    files = [path for folder in ("text", "engine", "backends/cpu") for path in (package / folder).glob("*.py")]
    nodes = [node for path in files for node in ast.walk(ast.parse(path.read_text()))]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    others = {name.split(".")[0] for name in names} - sys.stdlib_module_names - {"tinyvllm_cli"}
    used = {name.replace("_", "-") for name in others}
    assert {"numpy", "tokenizers"} < used
    listed = machine_facts()["libraries"]
    assert {name: listed.get(name) for name in used} == {name: version(name) for name in used}


def test_it_is_due_now_and_then(tmp_path: Path):
    seldom, _ = make_record(tmp_path / "a", every_s=1000)
    often, _ = make_record(tmp_path / "b", every_s=0)
    for record in (seldom, often):
        assert record.due()
        record.write("running", {})
    assert not seldom.due() and often.due()


def test_what_goes_wrong_is_said_once_and_at_the_end(tmp_path: Path):
    record, said = make_record(tmp_path / "no" / "out.run.json")
    for _ in range(3):
        record.write("running", {})
    assert len(said) == 1 and said[0].endswith("the run goes on")
    record.write("finished", {})
    assert len(said) == 2 and said[1].endswith("this run has none")


def test_a_record_that_could_not_be_written_is_written_when_it_can(tmp_path: Path):
    record, said = make_record(tmp_path / "later" / "r")
    record.write("running", {})
    (tmp_path / "later").mkdir()
    record.write("finished", {})
    assert json.loads((tmp_path / "later" / "r").read_text())["state"] == "finished" and len(said) == 1


def test_no_half_record_takes_the_place_of_a_whole_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "out.run.json"
    record, said = make_record(path)
    record.write("running", {})
    before = path.read_text()

    monkeypatch.setattr(Path, "write_bytes", full_disk(room=10))
    record.write("running", {"done": 1})
    assert path.read_text() == before and list(tmp_path.iterdir()) == [path] and len(said) == 1


@pytest.mark.parametrize("in_place", [True, False])
def test_no_record_of_a_run_that_has_ended_says_that_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_place: bool
):
    path = tmp_path / "out.run.json"
    record, said = make_record(path)
    record.write("running", {})
    monkeypatch.setattr(Path, "write_bytes", full_disk(room=10, never_full=path if in_place else None))
    record.write("failed", {})
    if in_place:
        assert json.loads(path.read_text())["state"] == "failed" and not said
    else:
        assert list(tmp_path.iterdir()) == [] and "is removed" in said[0] and len(said) == 1


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


def test_a_device_is_written_to_and_not_replaced():
    leader, follower = pty.openpty()
    path = Path(os.ttyname(follower))
    record, said = make_record(check_record_path(path, {}))
    record.write("running", {})
    assert path.is_char_device() and not said
    assert json.loads(os.read(leader, 10_000))["state"] == "running"
    os.close(leader)
    os.close(follower)


def test_a_pipe_is_no_record_as_who_writes_waits_for_a_reader(tmp_path: Path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(UsageError, match="is a pipe, wanted a file"):
        check_record_path(path, {})
    assert path.is_fifo() and read_record(path) is None


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
    with pytest.raises(UsageError, match="standard output is for the answers"):
        check_record_path(Path("-"), {})


RECORD = {"tinyvllm": "1", "command": [], "state": "finished", "progress": {}}


@pytest.mark.parametrize(
    ("text", "is_record"),
    [
        (json.dumps(RECORD), True),
        ("", True),
        ("notes", False),
        ("\x00\xff", False),
        ("[" * 100_000, False),
        ("[1]", False),
        ('{"model_type": "llama"}', False),
        (json.dumps(RECORD) + " " * MAX_BYTES, False),
    ],
)
def test_only_a_record_is_replaced(tmp_path: Path, text: str, is_record: bool):
    path = tmp_path / "r.json"
    path.write_text(text, "latin-1")
    if is_record:
        assert check_record_path(path, {}) == path
    else:
        with pytest.raises(UsageError, match="is something else"):
            check_record_path(path, {})
    assert path.read_text("latin-1") == text and list(tmp_path.iterdir()) == [path]


def test_a_record_that_cannot_be_made_is_refused_before_the_run(tmp_path: Path):
    with pytest.raises(UsageError, match="cannot write the run record"):
        check_record_path(tmp_path / ("x" * 250), {})  # too long with what makes it a temporary name
    assert list(tmp_path.iterdir()) == []


def test_bytes_of_the_command_line_that_are_no_text_leave_strict_json(tmp_path: Path):
    RunRecord(tmp_path / "r", {"command": ["a\udcff", "\U0001f600"]}, warn=print).write("running", {})
    assert strict_json((tmp_path / "r").read_bytes())["command"] == ["a?", "\U0001f600"]


@pytest.mark.parametrize(
    ("text", "known"),
    [(json.dumps(RECORD | {"frozen_date": 5}), True), ("", False), ("{", False), ("[]", False), ("{}", False),
     ("5", False), ("[" * 100_000, False), ('"\\ud800"', False), (json.dumps(RECORD) + " " * MAX_BYTES, False)],
)  # fmt: skip
def test_an_earlier_record_is_read_or_there_is_none(tmp_path: Path, text: str, known: bool):
    (tmp_path / "r").write_text(text)
    assert read_record(tmp_path / "r") == (RECORD | {"frozen_date": 5} if known else None)
    assert read_record(tmp_path / "no") is read_record(tmp_path) is read_record(None) is None
    (tmp_path / "r").write_bytes(b"\xff" + text.encode())
    assert read_record(tmp_path / "r") is None


def test_a_device_is_no_record_and_is_not_read(monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object) -> None:
        raise AssertionError("it may have no end")

    monkeypatch.setattr(Path, "read_bytes", fail)
    assert read_record(Path("/dev/zero")) is None


def test_whoever_reads_it_finds_a_whole_one(tmp_path: Path):
    path = tmp_path / "r.json"
    record, said = make_record(path)
    record.write("running", {"done": 0, "more": "x" * 100_000})
    ended = threading.Event()

    def write() -> None:
        for done in range(1, 200):
            record.write("running", {"done": done, "more": "x" * 100_000})
        ended.set()

    thread = threading.Thread(target=write)
    thread.start()
    seen = []
    while not ended.is_set():
        seen.append(json.loads(path.read_bytes())["progress"]["done"])
    thread.join()
    assert seen == sorted(seen) and len(set(seen)) > 5 and not said


def test_what_killed_runs_left_is_taken_away_and_nothing_else(tmp_path: Path):
    path = tmp_path / "o[1].run.json"
    ended = subprocess.Popen(["true"])
    ended.wait()
    left = f"{path.name}.{ended.pid}.tmp"
    others = {f"{path.name}.{os.getppid()}.tmp", f"{path.name}.x.tmp", "o1.run.json.1.tmp"}
    for name in (left, *others):
        (tmp_path / name).touch()
    check_record_path(path, {})
    assert {file.name for file in tmp_path.iterdir()} == others
