"""Where an input comes from never changes what is read: slow, non-blocking or growing, every line once and whole."""

import io
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from command import run_apart, run_here

from tinyvllm_cli.errors import InputError, UsageError
from tinyvllm_cli.io.prompts import read_lines
from tinyvllm_cli.io.source import MAX_TEXT, open_source, read_whole


def test_a_non_blocking_pipe_has_no_early_end(tmp_path: Path):
    """Its writer is slower than its reader, and stops in the middle of a line."""
    path = tmp_path / "in.jsonl"
    os.mkfifo(path)
    parts = [b'{"prompt": ', b'"a"}\n', b'{"prompt": "b"}\n{"pro', b'mpt": "c"}']

    def write() -> None:
        with path.open("wb", buffering=0) as file:
            for part in parts:
                file.write(part)
                time.sleep(0.02)

    writer = threading.Thread(target=write)
    writer.start()
    with open_source(str(path)).stream as stream:
        os.set_blocking(stream.fileno(), False)
        lines = [line.text for line in read_lines(stream)]
    writer.join()
    assert lines == b"".join(parts).split(b"\n")


def test_what_is_appended_later_is_not_read(tmp_path: Path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"1\n2\n")
    source = open_source(str(path))
    with source.stream as stream:
        assert source.twice and not source.changed()
        with path.open("ab") as file:
            file.write(b"3\n" * 10_000)
        for _ in range(2):
            stream.seek(0)
            assert [line.text for line in read_lines(stream)] == [b"1", b"2"]
        assert source.changed()


@pytest.mark.parametrize("left", [0, 2, 3])
def test_an_end_that_comes_before_the_files_own_is_no_end(tmp_path: Path, left: int):
    """Neither a line that was cut nor those behind it are taken for less than they were."""
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"1\n23\n")
    with open_source(str(path)).stream as stream:
        os.truncate(path, left)
        found = []
        with pytest.raises(InputError, match=f"in.jsonl ends after {left} of the 5 bytes"):
            found.extend(line.text for line in read_lines(stream))
        assert found == ([b"1"] if left else [])
        stream.seek(0)
        path.write_bytes(b"1\n23\n")
        assert [line.text for line in read_lines(stream)] == [b"1", b"23"]


def test_a_file_that_takes_the_inputs_name_is_not_read(tmp_path: Path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"1\n")
    with open_source(str(path)).stream as stream:
        (tmp_path / "other").write_bytes(b"2\n3\n")
        (tmp_path / "other").replace(path)
        assert [line.text for line in read_lines(stream)] == [b"1"]


class Endless(io.RawIOBase):
    """Zeros, as of /dev/zero, and a fault where more of them are taken than a text may have by far."""

    taken = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self.taken += len(buffer)
        assert self.taken < 2 * MAX_TEXT
        return len(buffer)


def test_a_text_without_end_is_read_no_further_than_it_may_be():
    with pytest.raises(UsageError, match=r"zeros holds more than 16,777,216 bytes, wanted"):
        read_whole(io.BufferedReader(Endless()), "zeros")


def test_a_text_may_be_as_long_as_its_bound(tmp_path: Path):
    path = tmp_path / "text"
    path.touch()
    os.truncate(path, MAX_TEXT)
    with path.open("rb") as file:
        assert len(read_whole(file, "text")) == MAX_TEXT


@pytest.mark.parametrize(
    "command",
    [
        ("run", "in.csv", "-t", "@long"),
        ("run", "in.txt", "-s", "@long"),
        ("run", "in.txt", "--json-schema", "long"),
        ("chat", "Hello", "-s", "@long"),
        ("chat", "Hello", "--json-schema", "long"),
        ("chat", "Hello", "--load", "long"),
    ],
)
def test_each_option_that_reads_a_file_refuses_one_that_is_too_long_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], command: tuple[str, ...]
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.csv").write_text("a\nx\n")
    (tmp_path / "in.txt").write_text("x\n")
    (tmp_path / "long").touch()
    os.truncate(tmp_path / "long", MAX_TEXT + 1)
    assert run_here(*command, "-m", "/no/model") == 2
    option = {"-t": "--template", "-s": "--system"}.get(command[2], command[2])
    assert f"error: {option}: long holds more than" in capfd.readouterr().err


def test_a_prompt_on_standard_input_that_is_too_long_is_refused(tmp_path: Path):
    said = run_apart("chat", "Hello", "-", "-m", "/no/model", stdin=b"x" * (MAX_TEXT + 1))
    assert said.returncode == 2 and b"error: standard input holds more than" in said.stderr


@pytest.mark.parametrize("name", ["in.tsv", "no.jsonl", "folder.jsonl"])
def test_what_is_no_input(tmp_path: Path, name: str):
    (tmp_path / "in.tsv").touch()
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(UsageError, match=name):
        open_source(str(tmp_path / name))


@pytest.mark.parametrize(
    ("name", "what_to_do"),
    [("a.json", "jq"), ("a.jsonl.gz", "gunzip"), ("a.tsv", "commas"), ("a.parquet", "batch-files.md"), ("a", "- for")],
)
def test_another_kind_of_file_is_refused_with_the_way_to_lines(name: str, what_to_do: str):
    with pytest.raises(UsageError, match=what_to_do):
        open_source(name)
