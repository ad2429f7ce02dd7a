"""--resume: whatever an accident left of an output, it ends as if nothing had happened, and what is done stays."""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from command import CASES, by_id, read_answers, run_apart, run_here, write_lines
from hypothesis import given, settings
from hypothesis import strategies as st
from outputs import as_failed, by_index, failed
from tiny import CHAT_TEMPLATE, make_tiny_model

from tinyvllm_cli import load, run_resume

pytestmark = pytest.mark.usefixtures("own_cache")

GOOD = [
    '{"prompt": "one", "max_tokens": 2, "ignore_eos": true}',
    '{"custom_id": "a", "prompt": "two", "max_tokens": 3, "temperature": 2, "metadata": {"custom_id": 1}}',
    '{"custom_id": 7, "method": "POST", "url": "/v1/completions", "body": {"prompt": "three", "max_tokens": 1}}',
    '{"custom_id": "7", "prompt": "four", "max_tokens": 2, "temperature": 1, "n": 2}',
    '{"custom_id": "none", "prompt": "five", "max_tokens": 0}',
]
BAD = ["{", '{"custom_id": "bad", "prompt": 1}', '{"custom_id": 9, "method": "GET", "url": "x", "body": {}}']
Said = Callable[..., tuple[int, str, str]]


def run(source: Path | str, model: Path, out: Path, *options: str | Path) -> int:
    return run_here("run", source, "-m", model, "-o", out, *options)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> tuple[Path, list[bytes]]:
    """An input of every kind of line, and the lines of an unbroken run over it."""
    folder = tmp_path_factory.mktemp("resume")
    source, out = folder / "in.jsonl", folder / "whole.jsonl"
    source.write_text("\n".join([*GOOD[:2], BAD[0], *GOOD[2:], *BAD[1:]]))
    assert run(source, tiny, out, "-q") == 3
    return source, out.read_bytes().splitlines(keepends=True)


def nothing_to_load(patch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise AssertionError("a model is loaded")

    patch.setattr(load, "load", refuse)


# ---------------------------------------------------------------- the law


@settings(max_examples=60)
@given(data=st.data(), options=st.sampled_from([[], ["--ordered"], ["--slots", "1"]]))
def test_whatever_is_left_it_ends_as_an_unbroken_run_does(
    tiny: Path, mixed: tuple[Path, list[bytes]], data: st.DataObject, options: list[str]
):
    """Each line answered, failed or missing, in any order, cut at any byte."""
    source, whole = mixed
    lines = []
    for line in data.draw(st.permutations(whole), label="lines"):
        state = data.draw(st.sampled_from(["answered", "failed", "missing"]))
        if state != "missing":
            lines.append(as_failed(line) if state == "failed" else line)
    there = b"".join(lines)
    there = there[: data.draw(st.integers(0, len(there)) | st.just(len(there)), label="cut")]
    out = source.parent / "out.jsonl"
    out.write_bytes(there)
    kept = [line for line in there.splitlines(keepends=True) if line.endswith(b"\n") and not failed(line)]

    assert run(source, tiny, out, "--resume", "-q", *options) == 3
    assert by_index(out) == by_index(b"".join(whole))
    assert out.read_bytes().startswith(b"".join(kept)), "byte for byte, at their place"

    found = out.read_bytes().splitlines()
    with pytest.MonkeyPatch.context() as patch:  # again: the bad lines get their errors again, without a model
        nothing_to_load(patch)
        assert run(source, tiny, out, "--resume", "-q", *options) == 3
    again = out.read_bytes().splitlines()
    assert sorted(again) == sorted(found)
    assert [line for line in again if not failed(line)] == [line for line in found if not failed(line)]


def test_a_run_that_is_done_is_left_as_it_is(tiny: Path, tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch):
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(GOOD))
    assert run(source, tiny, out, "-q", "--resume") == 0, "no output yet: from the beginning"
    record = tmp_path / "out.jsonl.run.json"
    for path in (out, record):
        os.utime(path, (5, 5))
    before = {path: path.read_bytes() for path in (out, record)}
    nothing_to_load(monkeypatch)
    code, printed, err = said("run", source, "-m", tiny, "-o", out, "--resume")
    assert (code, printed) == (0, "") and "nothing to do: 5 requests" in err and "model:" not in err
    assert {path: path.read_bytes() for path in before} == before
    assert all(path.stat().st_mtime == 5 for path in before)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl", "out.jsonl.run.json"]


def test_new_lines_are_done_and_answers_to_others_stay(tiny: Path, tmp_path: Path, said: Said):
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(GOOD[1:3]))
    assert run(source, tiny, out, "-q") == 0
    before = out.read_bytes()
    source.write_text("\n".join(GOOD[2:]))
    code, _, err = said("run", source, "-m", tiny, "-o", out, "--resume")
    assert code == 0 and out.read_bytes().startswith(before)
    assert "keeps 2 answers, 2 requests to do; 1 of the answers belong to no request of this input" in err
    assert by_id(read_answers(out)).keys() == {"a", 7, "7", "none"}
    record = json.loads((tmp_path / "out.jsonl.run.json").read_text())
    assert (record["kept"], record["progress"]["done"], record["progress"]["total"]) == (1, 2, 2)


@pytest.mark.parametrize("part", [["--limit", "2"], ["--shard", "1/2"]])
def test_a_part_of_an_input_can_be_resumed_as_the_whole(tiny: Path, tmp_path: Path, part: list[str]):
    source, out, whole = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    source.write_text("\n".join([*GOOD, BAD[0]]))
    assert run(source, tiny, whole, "-q") == 3
    code = run(source, tiny, out, "-q", *part)
    before = out.read_bytes()
    assert code == (3 if b'"error":{' in before else 0)
    assert run(source, tiny, out, "-q", "--resume") == 3
    assert by_index(out) == by_index(whole)
    kept = b"".join(line for line in before.splitlines(keepends=True) if not failed(line))
    assert kept and out.read_bytes().startswith(kept)


@pytest.mark.parametrize("suffix", [".txt", ".csv", ".jsonl"])
@pytest.mark.parametrize("cut", [0, 0.3, 0.9])
def test_each_kind_of_input(tiny: Path, tmp_path: Path, suffix: str, cut: float):
    source, out, whole = tmp_path / f"in{suffix}", tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    names = ["apple", "plum", "pear", "fig"]
    rows = {
        ".txt": "\n".join(names),
        ".csv": "\n".join(["name,id", *(f'"{name}\n{name}",{i}' for i, name in enumerate(names)), "short"]),
        ".jsonl": "\n".join([*(json.dumps({"name": name, "id": i}) for i, name in enumerate(names)), "{}"]),
    }
    source.write_text(rows[suffix])
    options = [] if suffix == ".txt" else ["-t", "Eat {{ name }}", "--id", "id", "--keep", "*"]
    options += ["--max-tokens", "4", "--temperature", "1", "-q"]
    code = run(source, tiny, whole, *options)
    assert code == (0 if suffix == ".txt" else 3)
    out.write_bytes(whole.read_bytes()[: int(cut * whole.stat().st_size)])
    assert run(source, tiny, out, *options, "--resume") == code
    assert by_index(out) == by_index(whole)


def test_standard_input_with_an_id_that_comes_twice(tiny: Path, tmp_path: Path):
    """Nobody knows what will come: all that failed goes, and comes again."""
    text = b"\n".join([b'{"custom_id": "a", "prompt": "x", "max_tokens": 2}'] * 2 + [b"{", b'{"prompt": "y"}', b""])
    out, whole = tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    command = ["run", "-", "-m", tiny, "--max-tokens", "3"]
    assert run_apart(*command, "-o", whole, stdin=text).returncode == 3
    lines = whole.read_bytes().splitlines(keepends=True)
    out.write_bytes(b"".join(lines[:2]) + lines[2][:9])
    for _ in range(2):
        ended = run_apart(*command, "-o", out, "--resume", stdin=text)
        assert ended.returncode == 3, ended.stderr
        assert by_index(out) == by_index(whole)


def test_ordered_keeps_the_order_of_each_run(tiny: Path, tmp_path: Path):
    lines = [{"prompt": f"{i}", "max_tokens": 1 + 5 * i % 7, "ignore_eos": True} for i in range(12)]
    source, out = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    assert run(source, tiny, out, "-q", "--ordered", "--shard", "2/3", "--slots", "3") == 0
    assert run(source, tiny, out, "-q", "--ordered", "--resume", "--slots", "3") == 0
    assert [answer["index"] for answer in read_answers(out)] == [2, 5, 8, 11, 0, 1, 3, 4, 6, 7, 9, 10]


# ---------------------------------------------------------------- answers of others


def test_c05_answers_without_a_fingerprint_are_kept_with_one_note(tiny: Path, tmp_path: Path, said: Said):
    partial = (CASES / "c05_partial_out_torn.jsonl").read_bytes()
    out = tmp_path / "out.jsonl"
    out.write_bytes(partial)
    command = ["run", CASES / "c05_resume_in.jsonl", "-m", tiny, "-o", out, "--resume", "--limit", "4"]
    code, _, err = said(*command, "--max-tokens", "2")
    assert code == 0 and err.count("without a fingerprint") == 1 and "keeps 1 answer, 3 requests to do" in err
    assert out.read_bytes().startswith(partial[: partial.index(b"\n") + 1])
    assert by_id(read_answers(out)).keys() == {"r-000", "r-001", "r-002", "r-003"}


# ---------------------------------------------------------------- the date


@pytest.fixture
def today(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[datetime]]:
    """The clock of the wall, to be set."""
    days = [datetime(2001, 2, 3, 4, 5, 6)]

    class Clock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return days[-1]

    monkeypatch.setattr(run_resume, "datetime", Clock)
    yield days


def dated(folder: Path, *, asks: bool) -> tuple[Path, Path]:
    """A model, and an input whose answers show the date."""
    template = CHAT_TEMPLATE + ("{{ strftime_now('%d %b %Y %H:%M:%S') }}" if asks else "")
    model = make_tiny_model(folder / "model", chat_template=template)
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
    batch = {"custom_id": "b", "method": "POST", "url": "/v1/chat/completions", "body": body}
    return model, write_lines(folder / "in.jsonl", [{"prompt": "Hi", "max_tokens": 3}, batch])


def cut(out: Path, whole: Path, lines: Sequence[int]) -> None:
    found = whole.read_bytes().splitlines(keepends=True)
    out.write_bytes(b"".join(found[number] for number in lines))


@pytest.mark.parametrize("missing", [0, 1])
@pytest.mark.parametrize("asks", [True, False])
def test_the_date_of_the_first_run_is_kept(tmp_path: Path, today: list[datetime], asks: bool, missing: int):
    model, source = dated(tmp_path, asks=asks)
    out = tmp_path / "out.jsonl"
    assert run(source, model, out, "-q") == 0
    whole = Path(out.rename(tmp_path / "whole.jsonl"))
    cut(out, whole, [1 - missing])
    today.append(datetime(2022, 2, 2, 2, 2, 2))
    assert run(source, model, out, "-q", "--resume") == 0

    def without_stats(path: Path) -> list[Any]:
        answers = {answer["custom_id"]: answer for answer in read_answers(path)}
        for answer in answers.values():
            answer.get("tinyvllm", answer).pop("stats")
        return [answers["b"], answers["line-1"]]

    assert without_stats(out) == without_stats(whole), "created, too"
    record = json.loads((tmp_path / "out.jsonl.run.json").read_text())
    assert datetime.fromisoformat(record["frozen_date"]).replace(tzinfo=None) == today[0]


@pytest.mark.parametrize("asks", [True, False])
@pytest.mark.parametrize("record", [None, "", "{", '{"frozen_date": 5}', "[]"])
def test_without_its_record_a_run_loses_only_the_date(
    tmp_path: Path, today: list[datetime], said: Said, asks: bool, record: str | None
):
    model, source = dated(tmp_path, asks=asks)
    out, path = tmp_path / "out.jsonl", tmp_path / "out.jsonl.run.json"
    assert run(source, model, out, "-q") == 0
    cut(out, out, [0])
    before = out.read_bytes()
    today.append(datetime(2022, 2, 2))
    path.unlink()
    if record is not None:
        (tmp_path / "r").write_text(record)
    options = [] if record is None else ["--record", tmp_path / "r"]
    code, _, err = said("run", source, "-m", model, "-o", out, "--resume", *options)
    if record in {"{", "[]", '{"frozen_date": 5}'}:
        assert code == 2 and "is something else" in err
    elif asks:
        assert code == 2 and "the run record, which would tell in what, is not there" in err
        assert out.read_bytes() == before
    else:
        assert code == 0 and out.read_bytes().startswith(before) and len(read_answers(out)) == 2


@pytest.mark.parametrize("date", ["yesterday", 5, None, "0001-01-01T00:00:00", "9999-12-31T23:59:59", "2001-02-03"])
def test_no_record_makes_a_run_fail(date: Any):
    found = run_resume.frozen_date({"frozen_date": date})
    assert found.tzinfo is not None
    assert run_resume.frozen_date({}).tzinfo is not None and run_resume.frozen_date(None).tzinfo is not None
