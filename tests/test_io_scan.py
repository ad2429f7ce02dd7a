"""Before the model: requests are counted, and two lines with one id are found, whatever else the file holds."""

import hashlib
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinyvllm_cli.errors import UsageError
from tinyvllm_cli.io import scan
from tinyvllm_cli.io.prompts import Line, line_id, read_lines
from tinyvllm_cli.io.scan import Scan, id_hash, scan_file
from tinyvllm_cli.io.source import open_source

ids = st.one_of(st.none(), st.integers(0, 6), st.integers(0, 6).map(str), st.integers(0, 6).map(lambda i: f"line-{i}"))


def scan_path(path: Path, *, text_lines: bool = False, limit: int | None = None) -> Scan:
    with path.open("rb") as file:
        return scan_file(file, str(path), text_lines=text_lines, limit=limit)


def write(folder: Path, lines: list[str]) -> Path:
    path = folder / "in.jsonl"
    path.write_text("\n".join(lines))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scan")


@given(custom_ids=st.lists(ids, max_size=6), weak=st.booleans(), limit=st.none() | st.integers(0, 6))
def test_two_lines_with_one_id_are_refused_and_no_others(
    folder: Path, custom_ids: list[str | int | None], weak: bool, limit: int | None
):
    path = write(folder, [json.dumps({"custom_id": i}) for i in custom_ids])
    named = [f"line-{n}" if i is None else i for n, i in enumerate(custom_ids, start=1)][:limit]
    pairs = [(a + 1, b + 1) for b in range(len(named)) for a in range(b) if named[a] == named[b]]
    with pytest.MonkeyPatch.context() as patch:
        if weak:  # every two ids have one hash
            patch.setattr(scan, "id_hash", lambda custom_id: 7)
        if not pairs:
            assert scan_path(path, limit=limit).requests == len(named)
            return
        with pytest.raises(UsageError, match=f"lines {pairs[0][0]} and {pairs[0][1]} "):
            scan_path(path, limit=limit)


def test_what_a_scan_knows(tmp_path: Path):
    path = write(tmp_path, ["", "{", "  ", "[]", '{"prompt": "x"}', "\x00"])
    found = scan_path(path, limit=3)
    assert (found.requests, found.lines) == (3, 4)
    assert found.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_equal_text_lines_are_no_equal_ids(tmp_path: Path):
    path = write(tmp_path, ['{"custom_id": 1}'] * 3)
    assert scan_path(path, text_lines=True).requests == 3
    with pytest.raises(UsageError, match="lines 1 and 2 have the same custom_id 1,"):
        scan_path(path)


@pytest.mark.parametrize("lines", [["{}", '{"custom_id": "line-1"}'], ['{"custom_id": "line-2"}', "{}"]])
def test_an_id_that_another_line_gets_is_named_as_the_reason(tmp_path: Path, lines: list[str]):
    given = 1 + lines.index(max(lines, key=len))
    with pytest.raises(UsageError, match=f"line {given} gives it, and line {3 - given}, which gives none"):
        scan_path(write(tmp_path, lines))


def test_a_file_stands_at_its_start_after_a_scan(tmp_path: Path):
    with open_source(str(write(tmp_path, ["{}", '{"custom_id": 1}']))).stream as stream:
        scan_file(stream, "in", text_lines=False, limit=None)
        assert [line.number for line in read_lines(stream)] == [1, 2]


@given(st.text() | st.integers(-(2**63), 2**64), st.text() | st.integers(-(2**63), 2**64))
def test_ids_have_one_hash_where_they_are_one_id(one: str | int, other: str | int):
    """Text and number differ; how JSON spells an id does not matter."""
    alike = type(one) is type(other) and one == other
    assert (id_hash(one) == id_hash(other)) is alike
    assert 0 <= id_hash(one) < 2**64
    if isinstance(one, int):
        assert id_hash(one) != id_hash(str(one))
    spelled = [json.dumps({"custom_id": one}, ensure_ascii=ascii) for ascii in (True, False)]
    lines = [Line(0, 1, text.encode()) for text in spelled]
    assert {id_hash(line_id(line)[0]) for line in lines} == {id_hash(one)}
