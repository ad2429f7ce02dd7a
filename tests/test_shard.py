"""Shards: parts of one input that share nothing and lack nothing, each a run of its own."""

import json
from pathlib import Path
from typing import Any

import pytest
from command import read_answers, run_here
from hypothesis import given, settings
from hypothesis import strategies as st
from outputs import index, timeless

from tinyvllm_cli import load
from tinyvllm_cli.errors import UsageError
from tinyvllm_cli.io.scan import scan_file
from tinyvllm_cli.io.shard import WHOLE, Shard, read_shard

pytestmark = pytest.mark.usefixtures("own_cache")

GOOD = [
    '{"prompt": "one", "max_tokens": 2, "ignore_eos": true}',
    '{"custom_id": "a", "prompt": "two", "max_tokens": 3, "temperature": 2}',
    '{"custom_id": 7, "method": "POST", "url": "/v1/completions", "body": {"prompt": "three", "max_tokens": 1}}',
    '{"prompt": "four", "max_tokens": 2, "temperature": 1, "n": 2}',
]
BAD = ["{", "[]", '{"prompt": 1}', '{"custom_id": "bad", "method": "GET", "url": "/v1/completions", "body": {}}']


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shard")


# ---------------------------------------------------------------- the numbers


@given(st.integers(1, 9), st.integers(0, 30))
def test_each_request_is_in_one_shard(of: int, requests: int):
    shards = [read_shard(f"{part}/{of}") for part in range(of)]
    for number in range(requests):
        assert [shard.holds(number) for shard in shards].count(True) == 1
    assert [shard.count(requests) for shard in shards] == [sum(map(shard.holds, range(requests))) for shard in shards]
    assert all(abs(shard.count(requests) - requests / of) < 1 for shard in shards), "as equal as can be"


def test_no_shard_is_the_whole():
    assert read_shard(None) == WHOLE == Shard(0, 1) and all(map(WHOLE.holds, range(5)))


@pytest.mark.parametrize(
    "text", ["", "/", "0", "0/", "/2", "2/2", "3/2", "0/0", "-1/2", "+0/2", "0/2/3", " 0/2", "0/2\n", "a/b", "0.0/2",
             "٠/٢", "1e0/2", "0/9999999999", "0x0/2"],
)  # fmt: skip
def test_what_is_no_shard_is_refused(text: str, said: Any, tmp_path: Path):
    with pytest.raises(UsageError, match="wanted I/N"):
        read_shard(text)
    (tmp_path / "in.jsonl").write_text("{}\n")
    code, out, err = said("run", tmp_path / "in.jsonl", "-m", "/no/model", "--shard", text)
    assert (code, out) == (2, "") and err.startswith("error: --shard is ") and err.count("\n") == 1


@given(st.integers(1, 5), st.integers(0, 9), st.none() | st.integers(0, 9))
def test_a_scan_counts_those_of_the_shard(folder: Path, of: int, lines: int, limit: int | None):
    path = folder / "scan.jsonl"
    path.write_text("{\n\n" * lines)
    for part in range(of):
        with path.open("rb") as file:
            found = scan_file(file, "in", text_lines=False, limit=limit, shard=Shard(part, of))
        held = [i for i in range(lines if limit is None else min(limit, lines)) if i % of == part]
        assert (found.requests, found.lines) == (len(held), lines)


# ---------------------------------------------------------------- the answers


def run(folder: Path, source: Path | str, model: Path, *options: str) -> list[dict[str, Any]]:
    out = folder / "out.jsonl"
    code = run_here("run", source, "-m", model, "-o", out, "--overwrite", "-q", "--temperature", "1", *options)
    answers = [timeless(answer) for answer in read_answers(out)]
    assert code == (3 if any(answer["error"] for answer in answers) else 0)
    return answers


@settings(max_examples=15)
@given(
    lines=st.lists(st.sampled_from(["", *BAD]), max_size=3).flatmap(lambda bad: st.permutations([*GOOD, *bad])),
    of=st.integers(1, 8),
    limit=st.none() | st.integers(0, 8),
    piped=st.booleans(),
)
def test_the_shards_together_are_the_whole_run(
    folder: Path, tiny: Path, lines: list[str], of: int, limit: int | None, piped: bool
):
    lines = list(dict.fromkeys(lines)) + ([lines[0], *GOOD] if piped else [])  # ids again, on standard input
    source = folder / "in.jsonl"
    source.write_text("\n".join(lines))
    limits = [] if limit is None else ["--limit", str(limit)]
    with pytest.MonkeyPatch.context() as patch:

        def take(*options: str) -> list[dict[str, Any]]:
            if not piped:
                return run(folder, source, tiny, *limits, *options)
            with source.open("rb") as file:
                patch.setattr("tinyvllm_cli.io.source.STDIN", file.fileno())
                return run(folder, "-", tiny, *limits, *options)

        whole = sorted(take(), key=index)
        parts = [take("--shard", f"{part}/{of}") for part in range(of)]
    assert [index(answer) for answer in whole] == list(range(len(whole)))
    for part, answers in enumerate(parts):
        assert {index(answer) % of for answer in answers} <= {part}
    assert sorted((answer for answers in parts for answer in answers), key=index) == whole


def test_an_empty_shard_is_an_empty_output_and_needs_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Any
):
    monkeypatch.delattr(load, "prepare")
    (tmp_path / "in.jsonl").write_text("\n".join(GOOD[:2]))
    out = tmp_path / "out.jsonl"
    command = ["run", tmp_path / "in.jsonl", "-m", "/no/model", "--shard", "2/3", "-o", out]
    code, _, err = said(*command)
    assert code == 0 and out.read_bytes() == b"" and "with --shard holds no requests: nothing to do" in err
    assert json.loads((tmp_path / "out.jsonl.run.json").read_text())["state"] == "finished"
    assert said(*command, "--resume")[0] == 0


def test_ids_are_checked_in_the_whole_file_whatever_the_shard(tmp_path: Path, said: Any):
    """Two shards would else answer one id."""
    (tmp_path / "in.jsonl").write_text('{"custom_id": 1, "prompt": "a"}\n{"custom_id": 1, "prompt": "b"}\n')
    for part in range(2):
        code, _, err = said("run", tmp_path / "in.jsonl", "-m", "/no/model", "--shard", f"{part}/2")
        assert code == 2 and "lines 1 and 2 have the same custom_id 1" in err
