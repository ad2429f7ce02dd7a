"""The form of an answer as the command gives it: the same as in a line, and refused in the same words."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from command import run_apart, write_lines
from hypothesis import given
from hypothesis import strategies as st
from lines import GOOD, request

from tinyvllm_cli.errors import RequestError, UsageError
from tinyvllm_cli.io.constraints import read_constraint
from tinyvllm_cli.io.fields import FORM_FIELDS
from tinyvllm_cli.io.prompts import Defaults
from tinyvllm_cli.io.settings import TextOption, line_defaults, read_schema, read_settings, read_text_option
from tinyvllm_cli.run_options import RunOptions
from tinyvllm_cli.types import SamplingParams

Said = Callable[..., tuple[int, str, str]]

SCHEMA = {"type": "object", "properties": {"z": {"type": "integer"}, "a": {"enum": ["é", 1.5]}}, "required": ["z"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
GIVEN: dict[str, Any] = {
    "json_schema": SCHEMA,
    "regex": "[a-z]+",
    "grammar": 'start: "a"',
    "choice": ["yes", "no"],
    "response_format": FORMAT,
}
FILES = {
    "s": b"{}", "latin1": b'{"title": "\xe9"}', "cut": b'{"a": ', "empty": b"", "nan": b'{"minimum": NaN}',
    "large": b'{"minimum": 1e999}', "half": b'{"const": "\\ud83d"}', "deep": b"[" * 101 + b"]" * 101,
    "twice": b'{"a": 1, "a": 2}', "list": b"[{}]", "null": b"null",
}  # fmt: skip


def defaults(*assigned: str, **named: Any) -> Defaults:
    return line_defaults(read_settings(named, assigned), {}, raw=False)


@pytest.mark.parametrize("name", GIVEN)
def test_set_says_what_a_line_says(name: str):
    by_line = request({**GOOD, name: GIVEN[name]})
    value = GIVEN[name] if name in {"regex", "grammar"} else json.dumps(GIVEN[name])
    assert request(GOOD, defaults(f"{name}={value}")) == request(GOOD, defaults(f"{name}={json.dumps(GIVEN[name])}"))
    assert request(GOOD, defaults(f"{name}={value}")) == by_line
    assert by_line.params.constraint == read_constraint({name: GIVEN[name]}) is not None


def test_the_options_say_what_a_line_says(tmp_path: Path):
    options = {"input": "in.jsonl", "model": "m"}
    chosen = RunOptions(**options, choice=("yes", "no")).settings(None)
    assert request(GOOD, line_defaults(chosen, {}, raw=False)) == request({**GOOD, "choice": ["yes", "no"]})
    text = json.dumps(SCHEMA, ensure_ascii=False, indent=2)
    described = RunOptions(**options).settings(TextOption(text, "schema.json"))
    asked = request(GOOD, line_defaults(described, {}, raw=False)).params.constraint
    assert asked == request({**GOOD, "json_schema": SCHEMA}).params.constraint
    assert asked is not None and list(json.loads(asked.source)["properties"]) == ["z", "a"], "keys in their order"


@pytest.mark.parametrize("own", GIVEN)
@pytest.mark.parametrize("name", GIVEN)
def test_what_a_line_says_takes_the_place_of_all_that_the_command_says(name: str, own: str):
    default = defaults(f"{name}={json.dumps(GIVEN[name])}", "top_k=5")

    def params(**line: Any) -> SamplingParams:
        return request({**GOOD, **line}, default).params

    assert params(**{own: GIVEN[own]}) == replace(default.params, constraint=read_constraint({own: GIVEN[own]}))
    assert params(response_format={"type": "text"}) == replace(default.params, constraint=None)
    assert params(**{own: None}) == default.params, "null is absent"


@given(st.sampled_from(FORM_FIELDS), st.sampled_from([None, True, 5, "", "a", [], ["a", "a"], [1], {}, {"type": "x"}]))
def test_the_command_refuses_what_a_line_refuses_in_its_words(name: str, value: Any):
    try:
        if value is not None:  # which in a line is absent
            read_constraint({name: value})
            assert read_settings({}, [f"{name}={json.dumps(value)}"]) == {name: value}
            return
        message = f"{name} is null, wanted "
    except RequestError as error:
        message = error.message
    with pytest.raises(UsageError) as caught:
        read_settings({}, [f"{name}={json.dumps(value)}"])
    assert str(caught.value).startswith(f"--set: {message}")
    if name == "choice" and isinstance(value, list) and value:
        with pytest.raises(UsageError) as caught:
            read_settings({"choice": value}, [])
        assert str(caught.value) == f"--{message}"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--choice", "a", "--choice", "a"], '--choice is a list with "a" twice, wanted texts that differ'),
        (["--choice", "a", "--json-schema", "s.json"], "--choice is given beside --json-schema, wanted one of them"),
        (["--choice", "a", "--set", "regex=a"], "--choice is given beside --set regex, wanted one of them"),
        (["--set", "regex=a", "--set", 'grammar=start: "a"'], "--set grammar is given beside --set regex, wanted one"),
        (["--choice", "a", "--set", 'choice=["a"]'], "choice is given twice"),
        (["--json-schema", "s.json", "--set", "json_schema={}"], "json_schema is given twice"),
        (["--choice", "\udcff"], "is not UTF-8 text"),
        (["--set", "constraint=5"], "unknown field constraint"),
        (["--set", 'json_schema={"a": 1, "a": 2}'], '--set: the field "a" stands twice in an object, wanted it once'),
        (["--set", "json_schema=" + '{"a":' * 101 + "1" + "}" * 101], "--set: json_schema is nested too deeply"),
        (["--set", 'json_schema={"minimum": NaN}'], 'json_schema is "{'),
        (
            ["--json-schema", ' {"type": "null"}'],
            '{"type": "null"}, wanted a file; inline: --set json_schema=\'{...}\'',
        ),
        (["--json-schema", "no.json"], "--json-schema: cannot read no.json: No such file"),
        (["--json-schema", "folder"], "--json-schema: cannot read folder: Is a directory"),
        (["--json-schema", "latin1.json"], "--json-schema: latin1.json is not UTF-8 text"),
        (["--json-schema", "cut.json"], "--json-schema: cut.json is no JSON (Input data was truncated)"),
        (["--json-schema", "empty.json"], "--json-schema: empty.json is no JSON (Input data was truncated)"),
        (["--json-schema", "nan.json"], "--json-schema: nan.json is no JSON (JSON is malformed: invalid character"),
        (["--json-schema", "large.json"], "--json-schema: large.json is no JSON (Number out of range"),
        (["--json-schema", "half.json"], "--json-schema: half.json is no JSON ("),
        (["--json-schema", "deep.json"], "--json-schema: deep.json: the schema is nested too deeply"),
        (["--json-schema", "twice.json"], '--json-schema: twice.json: the field "a" stands twice in an object'),
        (["--json-schema", "list.json"], "--json-schema: list.json: json_schema is [{}], wanted a JSON schema"),
        (["--json-schema", "null.json"], "--json-schema: null.json: json_schema is null, wanted a JSON schema"),
        (["--json-schema", "s.json", "-o", "s.json", "--overwrite"], "is the --json-schema file itself"),
        (["--json-schema", "s.json", "-o", "new", "--record", "s.json"], "is the --json-schema file itself"),
    ],
)
def test_a_form_that_cannot_be_is_refused_before_anything_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Said, options: list[str], message: str
):
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "in.jsonl", [GOOD])
    (tmp_path / "folder").mkdir()
    for name, data in FILES.items():
        (tmp_path / f"{name}.json").write_bytes(data)
    code, printed, err = said("run", "in.jsonl", "-m", "/no/such/model", *options)
    assert (code, printed) == (2, "") and message in err
    assert err.startswith("error: ") and err.count("\n") == 1
    assert (tmp_path / "s.json").read_bytes() == b"{}" and not (tmp_path / "new").exists()


@pytest.mark.parametrize("start", ["", "\ufeff", " \n"])
@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_a_schema_is_read_as_editors_leave_it(tmp_path: Path, start: str, end: str):
    (tmp_path / "s.json").write_bytes(f"{start}{json.dumps(SCHEMA, indent=2)}{end}".encode())
    file = read_text_option("--json-schema", f"@{tmp_path / 's.json'}")
    assert file is not None and read_schema(file) == SCHEMA


def test_a_schema_may_come_from_a_pipe_but_not_from_the_one_of_the_lines(tmp_path: Path):
    source = write_lines(tmp_path / "in.jsonl", [{**GOOD, "max_token": 1}])
    command = ["-m", "/no/such/model", "--dry-run", "--json-schema"]
    taken = run_apart("run", "-", *command, "/dev/stdin", stdin=source.read_bytes())
    wanted = b"error: --json-schema: /dev/stdin is standard input, from which the lines are read: give another file\n"
    assert (taken.returncode, taken.stdout, taken.stderr) == (2, b"", wanted)
    assert run_apart("run", source, *command, "/dev/stdin", stdin=b"[]").returncode == 2
    read = run_apart("run", source, *command, "/dev/stdin", stdin=b"{}")
    assert read.returncode == 1 and b"/no/such/model" in read.stderr, "it is the model that is missed"


def test_a_named_pipe_is_read_to_its_end(tmp_path: Path):
    pipe, schema = tmp_path / "pipe", json.dumps(SCHEMA)
    os.mkfifo(pipe)
    writer = Thread(target=pipe.write_text, args=[schema])
    writer.start()
    file = read_text_option("--json-schema", f"@{pipe}", takes_input=True)
    writer.join()
    assert file is not None and read_schema(file) == SCHEMA
