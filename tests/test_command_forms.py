"""A form that the command gives and that cannot be had: refused once, in the words of a line, with nothing touched."""

import json
from pathlib import Path
from typing import Any

import pytest
from command import by_id, read_answers, run_here, write_lines

from tinyvllm_cli import load

pytestmark = pytest.mark.usefixtures("own_cache")

BAD: dict[str, Any] = {
    "json_schema": {"type": "string", "maxlength": 3},
    "regex": r"\bword",
    "grammar": "start: thing",
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}},
}
LINES = [
    {"custom_id": "plain", "prompt": "Name a river.", "max_tokens": 2},
    {"custom_id": "own", "prompt": "Yes or no?", "choice": ["yes", "no"]},
]


def line_error(name: str, folder: Path, tiny: Path) -> str:
    """What a line is told that gives the form itself."""
    source, out = write_lines(folder / "line.jsonl", [{**LINES[0], name: BAD[name]}]), folder / "line.out"
    assert run_here("run", source, "-m", tiny, "-o", out, "-q") == 3
    (answer,) = read_answers(out)
    assert answer["error"]["type"] == "invalid_schema"
    return answer["error"]["message"]


@pytest.mark.parametrize("mode", ["new", "--overwrite", "--resume", "--dry-run"])
@pytest.mark.parametrize("name", BAD)
def test_it_is_refused_in_the_words_of_a_line(
    tiny: Path, tmp_path: Path, said, monkeypatch: pytest.MonkeyPatch, name: str, mode: str
):
    told = line_error(name, tmp_path, tiny)
    source, out = write_lines(tmp_path / "in.jsonl", LINES), tmp_path / "out"
    if mode != "new":
        assert run_here("run", source, "-m", tiny, "-o", out, "-q", "--limit", "1") == 0
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    monkeypatch.setattr(load, "load", None)  # to load a model fails
    command = ["run", source, "-m", tiny, "-o", out, *([] if mode == "new" else [mode])]
    value = BAD[name] if isinstance(BAD[name], str) else json.dumps(BAD[name])
    code, printed, err = said(*command, "--set", f"{name}={value}")
    assert (code, printed, err) == (2, "", f"error: --set: {told}\n")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_schema_is_called_by_its_file(tiny: Path, tmp_path: Path, said, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(load, "load", None)
    write_lines(tmp_path / "in.jsonl", LINES)
    (tmp_path / "typo.json").write_text(json.dumps(BAD["json_schema"]))
    code, _, err = said("run", "in.jsonl", "-m", tiny, "--json-schema", "typo.json", "-o", "out")
    wanted = 'typo.json has the unknown keyword "maxlength" at #, did you mean maxLength?'
    assert (code, err) == (2, f"error: --json-schema: {wanted}\n")
    assert not (tmp_path / "out").exists()


def test_lines_keep_their_own_errors(tiny: Path, tmp_path: Path):
    bad = [{**LINES[0], "custom_id": name, name: BAD[name]} for name in ("regex", "grammar")]
    source, out = write_lines(tmp_path / "in.jsonl", [*LINES, *bad]), tmp_path / "out"
    assert run_here("run", source, "-m", tiny, "-o", out, "-q", "--choice", "", "--choice", "a") == 3
    errors = {name: answer["error"] and answer["error"]["type"] for name, answer in by_id(read_answers(out)).items()}
    assert errors == {"plain": None, "own": None, "regex": "invalid_schema", "grammar": "invalid_schema"}
