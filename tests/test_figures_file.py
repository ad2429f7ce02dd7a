"""What benchmarks keep: the commit beside the figures, found or given, and files that stay what they were otherwise."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripts import script

from tinyvllm_cli.config import EngineConfig
from tinyvllm_cli.model.random_weights import random_config
from tinyvllm_cli.types import BackendFacts, Limits

figures_file, run_main = map(script, ("figures_file", "run_main"))


def git(folder: Path, *words: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    return subprocess.run(
        ["git", "-C", folder, *who, *words], capture_output=True, check=True, text=True
    ).stdout.strip()


def test_the_commit_is_that_of_the_folder_and_says_whether_files_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(figures_file, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert figures_file.found_commit() is None, "no history"
    git(tmp_path, "init", "-q")
    assert figures_file.found_commit() is None, "no commit"
    (tmp_path / "a").write_text("1")
    git(tmp_path, "add", "a")
    git(tmp_path, "commit", "-qm", "m")
    git(tmp_path, "tag", "-am", "t", "t")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert figures_file.found_commit() == commit
    (tmp_path / "a").write_text("2")
    assert figures_file.found_commit() == f"{commit}-dirty"


def test_a_folder_without_git_has_no_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert figures_file.found_commit() is None


def test_a_file_begins_with_its_kind_and_its_commit():
    facts = BackendFacts("gpu", "a card", "bfloat16", 4, {"cublas": "1.2.3"})
    subject = SimpleNamespace(
        name="m",
        path=None,
        config=random_config("llama-3.2-1b"),
        engine=EngineConfig(slots=4, max_batch_tokens=8, dtype="bfloat16"),
        backend=SimpleNamespace(facts=facts, limits=Limits(9, 16, 8, 4, 64, 100, 1)),
    )
    found = figures_file.describe("tinyvllm_x", subject, "abc")
    assert list(found)[:3] == ["tinyvllm_x", "commit", "tinyvllm"] and found["commit"] == "abc"
    assert found["backend"]["device"] == "a card" and found["backend"]["cublas"] == "1.2.3"
    assert found["command"][0] == "python" and json.dumps(found)


def test_a_commit_is_put_into_files_and_nothing_else_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path, before = tmp_path / "a.json", {"tinyvllm_x": 1, "b": [1, 2.5], "commit": "old", "c": {"d": "ä"}}
    for commit in ("x", "y"):
        path.write_text(json.dumps(before))
        monkeypatch.setattr(sys, "argv", ["figures_file", "--commit", commit, str(path)])
        figures_file.main()
        after = json.loads(path.read_bytes())
        assert after == before | {"commit": commit} and list(after)[:2] == ["tinyvllm_x", "commit"]


@pytest.mark.parametrize(
    "content", [None, b"", b"{", b"[]", b"{}", b"\xff\xfe{", b"[" * 100_000, b'{"a": NaN}', b'{"tinyvllm_bench": 1}']
)
def test_a_file_without_figures_is_said_in_a_line_and_no_other_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None
):
    good, broken = tmp_path / "good.json", tmp_path / "broken.json"
    good.write_text('{"tinyvllm_x": 1}')
    if content is not None:
        broken.write_bytes(content)
    monkeypatch.setattr(sys, "argv", ["figures_file", "--commit", "x", str(good), str(broken)])
    with pytest.raises(SystemExit) as ended:
        run_main.run_main(figures_file.main)
    message = ended.value.code
    assert isinstance(message, str) and message.startswith(f"error: {broken} ") and "\n" not in message
    assert good.read_text() == '{"tinyvllm_x": 1}'


@given(st.lists(st.floats(-1e6, 1e6), min_size=1))
def test_a_spread_is_between_its_ends_with_half_on_each_side(values: list[float]):
    found = figures_file.spread(values)
    assert found["least"] == min(values) and found["most"] == max(values)
    for side in (lambda v: v <= found["median"], lambda v: v >= found["median"]):
        assert 2 * sum(map(side, values)) >= len(values)
