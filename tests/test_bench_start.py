"""Timing the start of a process: what the processes are given, and what becomes of those that give no answer."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from tiny import make_tiny_model

from tinyvllm_cli.bench import start
from tinyvllm_cli.errors import TinyvllmError


@pytest.fixture
def interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A shell script in the place of Python, which gets the same arguments, standard input and environment."""

    def make(script: str) -> Path:
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setattr(start.sys, "executable", str(path))
        return tmp_path

    return make


def test_the_second_process_finds_what_the_first_one_kept(interpreter, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = interpreter(
        'echo "$@" >> $(dirname $0)/said; cat >> $(dirname $0)/said; ls "$TINYVLLM_CACHE" >> $(dirname $0)/said\n'
        'echo $TINYVLLM_OFFLINE >> $(dirname $0)/said; touch "$TINYVLLM_CACHE/kept"; echo answer; sleep 1.5'
    )
    found = start.time_start(Path("/models/a"), ["--slots", "3"], 5)
    said = (folder / "said").read_text().splitlines()
    command = "-P -m tinyvllm_cli run - -m /models/a -q --slots 3"
    assert [said[0], said[2], said[3], *said[5:]] == [command, "1", command, "kept", "1"]
    assert said[1] == said[4] and json.loads(said[1]) == {
        "prompt_token_ids": [0, 1, 2, 3, 4], "max_tokens": 1, "ignore_eos": True
    }  # fmt: skip
    assert 0 < found.first_s < 1.5 and 0 < found.again_s < 1.5, "until the answer, not until the end"


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo error: no such model >&2; exit 1", "no such model"),
        ("echo one >&2; echo error: two >&2; echo answer; exit 3", "two"),
        ("exit 7", "exit code 7"),
        ("exit 0", "exit code 0"),
    ],
)
def test_a_process_without_an_answer_fails_with_its_last_words(interpreter, script: str, why: str):
    interpreter(script)
    with pytest.raises(TinyvllmError, match=f"the process whose start is timed failed: {why}$"):
        start.time_start(Path("/models/a"), [], 128)


@pytest.mark.parametrize(
    ("script", "what"),
    [("exec sleep 60", "answer"), ("echo answer; exec sleep 60", "end"), ("printf answ; exec sleep 60", "end")],
)
def test_a_process_that_hangs_is_ended(interpreter, monkeypatch, script: str, what: str):
    interpreter(script)
    monkeypatch.setattr(start, "TIMEOUT_S", 0.3)
    before = time.monotonic()
    with pytest.raises(TinyvllmError, match=f"failed: no {what} in 0 s"):
        start.time_start(Path("/models/a"), [], 128)
    assert time.monotonic() - before < 10


def test_a_machine_that_runs_no_process_is_an_error_of_ours(tmp_path: Path, monkeypatch):
    """Which costs the figures that are there nothing."""
    monkeypatch.setattr(start.sys, "executable", str(tmp_path / "none"))
    with pytest.raises(TinyvllmError, match="the start cannot be timed: No such file or directory"):
        start.time_start(Path("/models/a"), [], 128)
    monkeypatch.setattr(start.tempfile, "tempdir", str(tmp_path / "none"))
    with pytest.raises(TinyvllmError, match="the start cannot be timed: No such file or directory"):
        start.time_start(Path("/models/a"), [], 128)


def test_what_lies_in_the_current_folder_is_no_part_of_it(own_cache: None, tmp_path: Path, monkeypatch):
    """A module with the name of one that is needed; nor is a model in it looked for where its name leads elsewhere."""
    make_tiny_model(tmp_path / "~root")
    (tmp_path / "numpy.py").write_text("raise SystemExit('a numpy of my own')")
    monkeypatch.chdir(tmp_path)
    found = start.time_start(Path("~root"), ["--backend", "cpu"], 128)
    assert found.first_s > 0 and found.again_s > 0
