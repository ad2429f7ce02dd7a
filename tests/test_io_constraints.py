"""Laws of reading the form of an answer from the fields of a line."""

import itertools
import json

import pytest
from lines import refusal

from tinyvllm_cli.errors import RequestError
from tinyvllm_cli.io.constraints import as_field, read_constraint, read_params
from tinyvllm_cli.types import Constraint

SCHEMA = {"type": "object", "properties": {"z": {"type": "integer"}, "a": {"type": "string"}}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": SCHEMA}}
FIELDS = {
    "json_schema": SCHEMA,
    "regex": "[a-z]+",
    "grammar": 'start: "a"',
    "choice": ["yes", "no"],
    "response_format": FORMAT,
}


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_is_a_constraint_with_its_name(name):
    constraint = read_constraint({name: FIELDS[name], "temperature": 1.0})
    assert constraint.field == name
    assert constraint.kind == ("json_schema" if name == "response_format" else name)
    source = SCHEMA if name == "response_format" else FIELDS[name]
    assert (source if isinstance(source, str) else json.dumps(source)) == (
        constraint.source if isinstance(source, str) else json.dumps(json.loads(constraint.source))
    )


@pytest.mark.parametrize("name", FIELDS)
def test_the_field_of_a_constraint_says_the_same(name):
    constraint = read_constraint({name: FIELDS[name]})
    back, value = as_field(constraint)
    assert json.dumps(value) == json.dumps(SCHEMA if name == "response_format" else FIELDS[name]), "keys in their order"
    assert read_constraint({back: value}) == constraint


def test_params_are_the_answer_fields_and_one_constraint_for_five_of_them():
    values = {"prompt": "hi", "top_k": 5, "seed": 0}
    assert read_params(values) == {"top_k": 5, "seed": 0}
    assert read_params(values | {"regex": "a"}) == {
        "top_k": 5,
        "seed": 0,
        "constraint": read_constraint({"regex": "a"}),
    }
    assert read_params({"response_format": {"type": "text"}}) == {"constraint": None}, "it says that there is none"


def test_a_line_without_one_has_none():
    assert read_constraint({}) is None
    assert read_constraint({"prompt": "hi", "regex": None}) is None
    assert read_constraint({"response_format": {"type": "text"}, "regex": "a"}).kind == "regex"


def test_equal_demands_are_one_key_however_they_are_put():
    own, theirs = read_constraint({"json_schema": SCHEMA}), read_constraint({"response_format": FORMAT})
    assert own == theirs
    assert len({own, theirs}) == 1
    assert read_constraint({"response_format": {"type": "json_object"}}) == read_constraint(
        {"json_schema": {"type": "object"}}
    )
    absent = {
        "type": "json_schema",
        "json_schema": FORMAT["json_schema"] | {"strict": None, "more": None},
        "more": None,
    }
    assert read_constraint({"response_format": absent}) == own, "null is absent"
    turned = {"type": "object", "properties": dict(reversed(SCHEMA["properties"].items()))}
    assert read_constraint({"json_schema": turned}) != own, "the order of names is that of the answer"
    assert Constraint("regex", "a", "regex") != Constraint("grammar", "a", "grammar")


@pytest.mark.parametrize("one, other", list(itertools.combinations(FIELDS, 2)))
def test_two_at_once_are_refused_by_their_names(one, other):
    with pytest.raises(RequestError, match=f"{other} is given beside {one}") as raised:
        read_constraint({other: FIELDS[other], one: FIELDS[one]})
    assert (raised.value.type, raised.value.field) == ("invalid_value", other)


@pytest.mark.parametrize(
    "name, value, found",
    [
        ("json_schema", [SCHEMA], '[{"type"'),
        ("json_schema", json.dumps(SCHEMA), '"{'),
        ("json_schema", 5, "5"),
        ("regex", "", '""'),
        ("regex", ["a"], '["a"]'),
        ("grammar", {"start": "a"}, '{"start"'),
        ("grammar", "", '""'),
        ("choice", [], "[]"),
        ("choice", "yes", '"yes"'),
        ("choice", ["a", 1], '["a",1]'),
        ("choice", ["a", "b", "a"], '"a" twice'),
        ("choice", {"a": 1}, '{"a":1}'),
        ("response_format", "json_object", '"json_object"'),
        ("response_format", {}, "null"),
        ("response_format", {"type": "xml"}, '"xml"'),
        ("response_format", {"type": "json_object", "schema": {}}, '"schema"'),
        ("response_format", {"type": "text", "json_schema": {}}, '"json_schema"'),
        ("response_format", {"type": "json_schema"}, "missing"),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x"}}, '{"name":"x"}'),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": {}, "strictly": True}}, '"strictly"'),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": []}}, "[]"),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": None}}, '{"schema":null}'),
        ("response_format", {"type": ["text"]}, '["text"]'),
        (
            "response_format",
            {"type": "json_schema", "schema": SCHEMA},
            'wanted {"type": "json_schema", "json_schema": {"schema": ',
        ),
        (
            "response_format",
            {"type": "json_object", "schema": SCHEMA},
            'wanted {"type": "json_schema", "json_schema": {',
        ),
        ("response_format", {"type": "json_schema", "json_schema": {"type": "object"}}, "the schema in schema"),
    ],
)
def test_a_wrong_value_is_refused_with_the_name_what_was_found_and_what_is_wanted(name, value, found):
    with pytest.raises(RequestError) as raised:
        read_constraint({name: value})
    assert (raised.value.type, raised.value.field) == ("invalid_value", name)
    assert raised.value.message.startswith(name)
    assert found in raised.value.message
    assert ", wanted " in raised.value.message
    assert "\n" not in raised.value.message


@pytest.mark.parametrize(
    "name, ours",
    [
        ("guided_json", "json_schema"),
        ("guided_regex", "regex"),
        ("guided_grammar", "grammar"),
        ("guided_choice", "choice"),
        ("structured_outputs", "json_schema, regex, grammar or choice"),
        ("schema", "json_schema"),
        ("pattern", "regex"),
        ("enum", "choice"),
    ],
)
def test_other_names_of_a_form_are_told_ours(name, ours):
    unknown = ("unknown_field", f"unknown field {name}, did you mean {ours}?", name)
    assert refusal({"prompt": "x", name: {}}) == unknown
    theirs = ("unsupported", f"{name} is not supported, wanted {ours}", name)
    batch = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x", name: {}}}
    assert refusal(batch) == (theirs if name.startswith(("guided", "struct")) else unknown)
