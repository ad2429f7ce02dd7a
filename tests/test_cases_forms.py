"""Small inputs that ask for answers of a form, and the right outcome of each, on tiny models."""

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from case_runs import failure, made, run_case
from command import CASES, place_free, run_here, write_lines
from lines import read_one
from tiny import byte_ids

from tinyvllm_cli.config import EngineOptions
from tinyvllm_cli.engine.engine import Engine
from tinyvllm_cli.io.results import encode
from tinyvllm_cli.load import open_engine
from tinyvllm_cli.types import Completion

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(scope="module")
def engine(tiny: Path, own_cache: None) -> Iterator[Engine]:
    with closing(open_engine(str(tiny), config=EngineOptions(), report=lambda line: None)) as loaded:
        yield loaded.engine


def streamed(line: dict[str, Any], engine: Engine) -> dict[str, Any]:
    """The output line, of which nothing is taken back that was there before."""
    item = read_one(line)
    if isinstance(item, Completion):
        return json.loads(encode(item))
    engine.add(item)
    shown, completion = "", None
    while completion is None:
        for event in engine.step():
            if isinstance(event, Completion):
                completion = event
            else:
                shown += event.text
    assert shown == completion.choices[0].text
    return json.loads(encode(completion))


@pytest.mark.parametrize(
    ("name", "text", "stop_reason", "tokens"),
    [
        ("basic", "alpha ", "END", 9),
        ("keep", "alpha END", "END", 9),
        ("inside-token", "alpha E", "ND om", 12),
        ("earliest-wins", "alpha ", "END", 9),
        ("never", "alpha END omega", None, 15),
        ("only-in-prompt", "nothing to see", None, 14),
        ("stop-first", "", "alpha", 5),
        ("utf8-stop", "一二", "三", 9),
    ],
)
def test_c12_stops(engine: Engine, name: str, text: str, stop_reason: str | None, tokens: int):
    """Where nothing stops a choice, its text is the end: no EOS is made."""
    answer = streamed(stop_lines()[name], engine)
    choice = {"index": 0, "text": text, "finish_reason": "stop", "stop_reason": stop_reason}
    assert answer["choices"] == [choice] and answer["usage"]["completion_tokens"] == tokens


def test_c12_an_empty_stop(engine: Engine):
    assert failure(streamed(stop_lines()["empty-stop"], engine)) == ("invalid_value", "stop")


def test_c12_in_a_run(tiny: Path, tmp_path: Path, engine: Engine):
    answers = run_case(tmp_path, tiny, "c12_stops.jsonl", code=3)
    lines = stop_lines()
    assert answers.keys() == lines.keys()
    for name in lines.keys() - {"empty-stop"}:
        assert answers[name]["choices"] == streamed(lines[name], engine)["choices"]


def stop_lines() -> dict[str, dict[str, Any]]:
    lines = map(json.loads, (CASES / "c12_stops.jsonl").read_text().splitlines())
    return {line["custom_id"]: line for line in lines}


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 3}, "old": {"type": "boolean"}, "n": {"enum": [1, 2.5]}},
    "required": ["name", "old", "n"],
    "additionalProperties": False,
}
LISTS = {"type": "array", "items": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}, "maxItems": 3}
SCHEMA_LINES = {
    "fits": {"json_schema": PERSON, "temperature": 1.0},
    "wants-more": {"json_schema": PERSON, "temperature": 1.0, "seed": 1, "max_tokens": 40},
    "cut": {"json_schema": PERSON, "temperature": 1.0, "seed": 1, "max_tokens": 11},
    "blanks": {"json_schema": LISTS, "logit_bias": dict.fromkeys(map(str, byte_ids(" \n\t")), 100)},
    "blanks-in-vain": {"response_format": {"type": "json_object"}, "logit_bias": {str(byte_ids(" ")[0]): 100}},
    "bad-type": {"json_schema": {"type": "strin"}},
    "no-schema": {"json_schema": "{}"},
    "bad-regex": {"regex": "(a"},
    "bad-grammar": {"grammar": "start: nothing"},
    "two-kinds": {"regex": "a", "choice": ["a"]},
    "two-names": {"json_schema": {}, "response_format": {"type": "json_object"}},
}
BAD_FORMS = {
    "bad-type": ("invalid_schema", "json_schema"),
    "no-schema": ("invalid_value", "json_schema"),
    "bad-regex": ("invalid_schema", "regex"),
    "bad-grammar": ("invalid_schema", "grammar"),
    "two-kinds": ("invalid_value", "choice"),
    "two-names": ("invalid_value", "response_format"),
}


def test_schemas(tiny: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    lines = [{"custom_id": i, "prompt": "Soup?", "max_tokens": 99, **line} for i, line in SCHEMA_LINES.items()]
    case = write_lines(tmp_path / "in.jsonl", lines)
    answers = run_case(tmp_path, tiny, case, code=3)
    assert {i: failure(answer) for i, answer in answers.items() if answer["error"]} == BAD_FORMS
    texts = {i: answers[i]["choices"][0]["text"] for i in answers.keys() - BAD_FORMS.keys()}
    for name in ("fits", "wants-more", "blanks"):
        assert made(answers[name])[1] == "stop"
        jsonschema.validate(json.loads(texts[name]), SCHEMA_LINES[name]["json_schema"])
        assert texts[name] == json.dumps(json.loads(texts[name]), ensure_ascii=False), "one line, with , and : "
    assert made(answers["cut"]) == (11, "length") and texts["wants-more"].startswith(texts["cut"])
    assert made(answers["blanks-in-vain"])[1] in {"stop", "length"} and texts["blanks-in-vain"][:2] in {'{"', "{}"}
    alone = write_lines(tmp_path / "in.jsonl", [line for line in lines if line["custom_id"] not in BAD_FORMS])
    capfd.readouterr()
    kept = run_case(tmp_path, tiny, alone, code=0)
    assert {i: place_free(kept[i]) for i in texts} == {i: place_free(answers[i]) for i in texts}


def test_forms_that_cannot_be_are_known_before_a_run(tiny: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    lines = [{"custom_id": i, "prompt": "Soup?", **line} for i, line in SCHEMA_LINES.items()]
    case = write_lines(tmp_path / "in.jsonl", lines)
    answers = run_case(tmp_path, tiny, case, code=3)
    capfd.readouterr()
    assert run_here("run", case, "-m", tiny, "--dry-run") == 3
    said = capfd.readouterr().err
    for i, line in enumerate(lines, start=1):
        error = answers[line["custom_id"]]["error"]
        told = f'line {i} ("{line["custom_id"]}"): '
        assert (told in said) is (error is not None)
        assert error is None or f"{told}{error['type']}: {error['message']}\n" in said


SHORT = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}


@pytest.fixture
def whole_file(tmp_path: Path) -> tuple[Path, Path]:
    """An input of lines that say nothing, one that asks for another form and one for none; and a schema."""
    own = [{"regex": "[xy]"}, {"response_format": {"type": "text"}, "max_tokens": 5, "ignore_eos": True}]
    lines = [{"custom_id": i, "prompt": f"Number {i}", **more} for i, more in enumerate([{}, {}, *own])]
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps(SHORT))
    return write_lines(tmp_path / "in.jsonl", lines), schema


def texts_of(answers: dict[Any, dict[str, Any]]) -> list[str]:
    return [answers[i]["choices"][0]["text"] for i in range(len(answers))]


def test_a_whole_file_has_the_form_of_the_command(
    tiny: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], whole_file: tuple[Path, Path]
):
    case, schema = whole_file
    forms: list[tuple[list[str | Path], set[str], str, Any]] = [
        (["--choice", "no", "--choice", "yes"], {"no", "yes"}, "choice", ["no", "yes"]),
        (["--json-schema", schema], {'{"a": 1}', '{"a": 2}'}, "json_schema", SHORT),
        (
            ["--set", f"response_format={json.dumps({'type': 'json_object'})}"],
            {"{}"},
            "json_schema",
            {"type": "object"},
        ),
    ]
    for options, wanted, name, value in forms:
        bias = json.dumps({str(byte_ids(char)[0]): 100 for char in "{}"})
        answers = run_case(tmp_path, tiny, case, *map(str, options), "--set", f"logit_bias={bias}", code=0)
        *told, other, free = texts_of(answers)
        assert set(told) <= wanted and other in {"x", "y"} and set(free) <= {*"{}"}
        assert f"{name} {json.dumps(value, separators=(',', ':'))[:40]}" in capfd.readouterr().err
        assert json.loads((tmp_path / "out.jsonl.run.json").read_text())["answers"][name] == value


def test_another_schema_in_the_same_file_is_refused_and_said(
    tiny: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], whole_file: tuple[Path, Path]
):
    case, schema = whole_file
    run_case(tmp_path, tiny, case, "--json-schema", str(schema), code=0)
    before = (tmp_path / "out.jsonl").read_bytes()
    command = ["run", case, "-m", tiny, "-o", tmp_path / "out.jsonl", "--resume", "--json-schema", schema]
    schema.write_text(json.dumps(SHORT, indent=4))
    assert run_here(*command) == 0, "it says the same"
    schema.write_text(json.dumps(SHORT | {"required": []}))
    capfd.readouterr()
    assert run_here(*command) == 2 and (tmp_path / "out.jsonl").read_bytes() == before
    assert "so it is the line, or the file of --json-schema, that changed" in capfd.readouterr().err
    assert run_here(*command[:-2], "--choice", "a") == 2
    assert '--choice was not given and is ["a"]; --json-schema was "' in capfd.readouterr().err
