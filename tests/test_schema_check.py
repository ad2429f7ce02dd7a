"""Laws of the check of JSON schemas: what is accepted is enforced, and the rest refused by its name."""

import datetime
import json
import random
from fractions import Fraction
from itertools import product

import pytest
from constraint_tools import accepts, compiled, draw_all, is_valid, refused
from jsonschema_specifications import REGISTRY

from tinyvllm_cli.text.schema_check import ANNOTATIONS, KNOWN, prepare_schema

DRAFT = "https://json-schema.org/draft/2020-12/meta/"
VOCABULARIES = ("core", "applicator", "unevaluated", "validation", "meta-data", "format-annotation", "content")


def takes(schema, text):
    """Whether a text is an answer to the schema."""
    return accepts("bytes", text, json_schema=schema)


def test_each_keyword_of_the_draft_is_known_or_refused_by_name():
    keywords = {name for part in VOCABULARIES for name in REGISTRY.contents(DRAFT + part)["properties"]}
    assert len(keywords) > 55
    assert keywords >= KNOWN - {"definitions", "discriminator", "example", "externalDocs"}
    for keyword in keywords - KNOWN:
        error = refused("bytes", json_schema={"properties": {"a": {keyword: {}}}})
        assert error.message == (
            f"json_schema has {keyword} at #/properties/a, which is not supported, wanted a schema without it"
        ) or (keyword.startswith("dependent") and "wanted anyOf" in error.message)


@pytest.mark.parametrize("keyword", sorted(ANNOTATIONS))
def test_an_annotation_changes_nothing(keyword):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    noted = schema | {keyword: "text", "properties": {"a": {"type": "integer", keyword: {"not": {}}}}}
    assert prepare_schema(noted) == prepare_schema(schema)
    named = {"type": "object", "properties": {keyword: {"type": "integer"}}, "required": [keyword]}
    assert takes(named, f'{{"{keyword}": 1}}'), "as the name of a property it is none"
    assert not takes(named, "{}")


@pytest.mark.parametrize(
    "schema, reason",
    [
        (False, "is false"),
        ({"type": "text"}, 'type "text" at #, wanted null, boolean'),
        ({"type": "strnig"}, 'type "strnig" at #, did you mean string?'),
        ({"items": {"type": ["null", "Dict"]}}, 'type "Dict" at #/items, did you mean object?'),
        ({"type": []}, "type [] at #, wanted null, boolean"),
        ({"type": [["null"]]}, 'type ["null"] at #'),
        ({"name": "x", "strict": True, "schema": {"type": "null"}}, 'wanted what stands in its "schema" alone'),
        ({"type": "json_schema", "json_schema": {"schema": {}}}, 'wanted what stands in its "schema" alone'),
        ({"type": "string", "maxlength": 3}, "did you mean maxLength?"),
        ({"properties": {"a": {"requird": ["b"]}}}, '"requird" at #/properties/a, did you mean required?'),
        ({"x-guidance": {"lenient": True}}, '"x-guidance"'),
        ({"type": "string", "nullable": True}, '["string", "null"]'),
        ({"items": {"uniqueItems": True}}, "uniqueItems at #/items"),
        ({"allOf": [{}, {"not": {"type": "null"}}]}, "not at #/allOf/1"),
        ({"if": {}, "then": {}}, "if at #"),
        ({"items": [{"type": "string"}]}, "a list of schemas is prefixItems"),
        ({"additionalItems": False}, "prefixItems"),
        ({"$defs": {"a/b": {"contains": {}}}}, "contains at #/$defs/a~1b"),
        ({"$defs": {"a": {"$id": "http://a"}}}, "$id at #/$defs/a"),
        ({"properties": {"a": 5}}, "has 5 at #/properties/a"),
        ({"properties": []}, "has [] at #/properties"),
        (
            {"type": "object", "required": ["a"], "properties": 3, "additionalProperties": False},
            "has 3 at #/properties",
        ),
        ({"anyOf": []}, "has [] at #/anyOf"),
        ({"oneOf": {}}, "has {} at #/oneOf"),
        ({"required": "a"}, 'required "a"'),
        ({"type": "string", "format": "idn-email"}, 'format "idn-email"'),
        ({"type": "string", "format": "unknown"}, 'format "unknown"'),
        ({"type": "integer", "format": "int32"}, 'format "int32"'),
        ({"type": "string", "pattern": "(?!a)b"}, "look-ahead"),
        ({"type": "string", "pattern": "("}, "unclosed group"),
        ({"type": "string", "pattern": "[a-z--[aeiou]]"}, "[a-z--[aeiou]"),
        ({"patternProperties": {"[[:digit:]]": True}}, "[[:digit:]"),
        ({"patternProperties": {"^a": {"type": "string"}, "b$": {"type": "null"}}}, "not disjoint"),
        ({"$ref": "#/$defs/none"}, "#/$defs/none"),
        ({"$ref": "#/properties", "properties": {"type": {}}}, "no place of a schema"),
        ({"$ref": "https://example.com/schema"}, "#/$defs/NAME"),
        ({"$ref": "#"}, "allows no answer"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "allows no answer"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum 5 above maximum 3 at #, which no value fulfils"),
        ({"type": "integer", "minimum": "3"}, 'minimum "3" at #, wanted a number'),
        ({"type": "number", "exclusiveMinimum": True}, "exclusiveMinimum true"),
        ({"type": "integer", "maximum": 2**64}, "wanted a number from -2^53 to 2^53"),
        ({"type": "integer", "multipleOf": -1}, "multipleOf -1"),
        ({"type": "integer", "multipleOf": 0}, "multipleOf 0"),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, "range less than 1 wide"),
        ({"type": "string", "minLength": 5, "maxLength": 3}, "minLength 5 above maxLength 3 at #"),
        ({"type": "string", "maxLength": -1}, "maxLength"),
        ({"items": {"type": "array", "minItems": 3, "maxItems": 2}}, "minItems 3 above maxItems 2 at #/items"),
        ({"type": "integer", "exclusiveMinimum": 3, "maximum": 3}, "allows no answer"),
        ({"type": "array", "minItems": "3"}, 'minItems "3" at #, wanted an integer >= 0'),
        ({"maxProperties": True}, "maxProperties true at #, wanted an integer >= 0"),
        ({"type": "object", "minProperties": 2}, "minProperties 2"),
        ({"minProperties": 1, "properties": {"a": {}}}, "min/maxProperties"),
        ({"enum": []}, "enum [] at #, wanted a list of values, not empty"),
        ({"properties": {"a": {"enum": "red"}}}, 'enum "red" at #/properties/a, wanted a list of values'),
        ({"const": 5, "type": "string"}, "allows no answer"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "wanted anyOf"),
        ({"required": ["a"], "properties": {"a": False}, "type": "object"}, "allows no answer"),
        (
            {"items": {"type": "object", "required": ["b"], "properties": {"a": {}}, "additionalProperties": False}},
            'required "b" at #/items, wanted it among the properties too',
        ),
    ],
)
def test_a_bad_schema_is_refused_with_place_and_reason(schema, reason):
    error = refused("bytes", json_schema=schema)
    assert (error.type, error.field) == ("invalid_schema", "json_schema")
    assert error.message.startswith("json_schema ")
    assert reason in error.message
    assert "\n" not in error.message
    assert len(error.message) < 400


@pytest.mark.parametrize(
    "schema, text",
    [
        ({"type": ["integer", "null"], "minimum": 5, "maximum": 3}, "null"),
        ({"minLength": 5, "maxLength": 3}, "7"),
        ({"type": "string", "minItems": 5, "maxItems": 3}, '"a"'),
        ({"required": ["a"], "properties": {}, "additionalProperties": False}, "[]"),
        (
            {"type": "object", "required": ["a"], "patternProperties": {"a": {}}, "additionalProperties": False},
            '{"a": 1}',
        ),
        ({"type": "object", "properties": {"schema": {"type": "null"}}, "required": ["schema"]}, '{"schema": null}'),
    ],
)
def test_what_some_value_fulfils_is_not_refused_for_others(schema, text):
    assert takes(schema, text)


def some(draw, values):
    return values[int(draw.random() * len(values))]


def random_value(draw, depth=0):
    if depth > 1 or draw.random() < 0.7:
        return some(draw, [0, 1, -1, 2.5, -0.5, 10, "a", "b", "", "é", "x y", None, True, False, 12.25])
    if draw.random() < 0.5:
        return [random_value(draw, depth + 1) for _ in range(draw.randint(0, 2))]
    return {some(draw, "abc"): random_value(draw, depth + 1) for _ in range(draw.randint(0, 2))}


def random_parts(draw, kind, depth):
    """Keywords for values of a type, each there or not."""
    number = lambda: some(draw, [-10.5, -3, -1, 0, 0.25, 1, 2.5, 7, 100, 1000.125])  # noqa: E731
    inner = lambda: random_schema(draw, depth + 1)  # noqa: E731
    names = draw.sample(["a", "b", "c", "é", "x y", "ab"], draw.randint(0, 3))
    parts = {
        "string": {
            "minLength": draw.randint(0, 3),
            "maxLength": draw.randint(1, 6),
            "pattern": some(draw, ["^a", "b$", "^[a-c]+$", "a|b", "^(x|yz)*$", "[0-9]{2}", "^.{2,3}$", "é+"]),
            "format": some(draw, ["date", "ipv4", "ipv6", "uuid", "email"]),
        },
        "number": {
            some(draw, ["minimum", "exclusiveMinimum"]): number(),
            some(draw, ["maximum", "exclusiveMaximum"]): number(),
            "multipleOf": some(draw, [1, 2, 3, 0.5, 0.25, 10]),
        },
        "array": {
            "items": inner(),
            "prefixItems": [inner() for _ in range(draw.randint(1, 2))],
            "minItems": draw.randint(0, 2),
            "maxItems": draw.randint(1, 3),
        },
        "object": {
            "properties": {name: inner() for name in names},
            "required": draw.sample(["a", "b", "c", "é"], draw.randint(0, 2)),
            "additionalProperties": some(draw, [False, inner()]),
            "patternProperties": {some(draw, ["^a", "b$", "^c[a-z]$"]): inner()},
            "minProperties": draw.randint(0, 2),
            "maxProperties": draw.randint(0, 3),
        },
    }
    odds = {"format": 0.1, "pattern": 0.3, "patternProperties": 0.2, "minProperties": 0.15, "maxProperties": 0.15}
    return {key: value for key, value in parts.get(kind, {}).items() if draw.random() < odds.get(key, 0.45)}


def random_schema(draw, depth=0):
    """A schema of any of the keywords, mixed and in any order."""
    if depth > 2:
        return {"type": some(draw, ["string", "integer", "null", "boolean", "number"])}
    if draw.random() < 0.04:
        return draw.random() < 0.5
    kinds = draw.sample(["string", "number", "integer", "array", "object", "null"], 1 + (draw.random() < 0.15))
    schema = {}
    for kind in kinds:
        schema |= random_parts(draw, "number" if kind == "integer" else kind, depth)
    if draw.random() < 0.85:
        schema["type"] = kinds[0] if len(kinds) == 1 else kinds
    if draw.random() < 0.1:
        schema = {"enum": [random_value(draw) for _ in range(draw.randint(1, 4))]}
    for keyword in ("anyOf", "oneOf", "allOf"):
        if draw.random() < 0.08:
            schema[keyword] = [random_schema(draw, depth + 1) for _ in range(draw.randint(1, 3))]
    if draw.random() < 0.08:
        schema["$ref"] = some(draw, ["#/$defs/A", "#/$defs/B"])
    return dict(draw.sample(list(schema.items()), len(schema)))


@pytest.mark.parametrize("seed", range(4))
def test_answers_to_random_schemas_that_are_accepted_are_valid(seed):
    draw = random.Random(seed)
    accepted = []
    while len(accepted) < 100:
        schema = random_schema(draw)
        if isinstance(schema, dict):
            schema["$defs"] = {"A": random_schema(draw, 1), "B": random_schema(draw, 2)}
        if refused("bytes", json_schema=schema) is None:
            accepted.append(schema)
    answers = draw_all(
        "bytes", [compiled("bytes", json_schema=schema) for schema in accepted], seed, steps=200, patience=25
    )
    for schema, answer in zip(accepted, answers, strict=True):
        assert not answer.done or is_valid(schema, answer.text.decode()), (schema, answer.text.decode())
    assert sum(answer.done for answer in answers) > 85


ENDS = (0, 1, -1, 0.25, 0.5, -0.25, 2, 9.99, 100, 0.001, -10, -1.5)


@pytest.mark.parametrize(
    "low_key, high_key", [*product(["minimum", "exclusiveMinimum"], ["maximum", "exclusiveMaximum"])]
)
def test_numbers_near_the_ends_of_a_range_are_taken_if_they_are_in_it(low_key, high_key):
    """And where a range is refused, it is one of those that the message names."""
    num_refused = num_taken = 0
    for low, high in product(ENDS, repeat=2):
        if low >= high:
            continue
        schema = {"type": "number", low_key: low, high_key: high}
        if error := refused("bytes", json_schema=schema):
            assert "less than 1 wide" in error.message
            num_refused += 1
            continue
        for end, step in product((low, high), (-1, -0.1, -0.001, 0, 0.001, 0.1, 1)):
            text = str(round(end + step, 4))
            value = Fraction(text)
            above = value > Fraction(str(low)) if low_key.startswith("ex") else value >= Fraction(str(low))
            below = value < Fraction(str(high)) if high_key.startswith("ex") else value <= Fraction(str(high))
            taken = takes(schema, text)
            assert not taken or (above and below), (schema, text)
            num_taken += taken
    assert num_refused < 20
    assert num_taken > 200


def test_days_are_those_of_the_calendar():
    day, moment = {"type": "string", "format": "date"}, {"type": "string", "format": "date-time"}
    for year, month, number in product((0, 4, 400, 1900, 2000, 2023, 2024, 2096), (2, 4, 12), (1, 28, 29, 30, 31, 32)):
        text = f"{year:04}-{month:02}-{number:02}"
        try:
            datetime.date.fromisoformat(text)
        except ValueError:
            there = False
        else:
            there = True
        assert takes(day, f'"{text}"') == there, text
        assert takes(moment, f'"{text}T12:00:00Z"') == there, text


@pytest.mark.parametrize("name", ["a", "é", "a b", "a/b", "tab\t", 'quote"'])
def test_no_other_spelling_of_a_name_escapes_its_schema(name):
    """A validator reads "\\u0061" as "a"."""
    schema = {"type": "object", "properties": {name: {"type": "integer"}}}
    assert takes(schema, json.dumps({name: 1}, ensure_ascii=False))
    spelt = "".join(f"\\u{ord(char):04x}" for char in name)
    assert not takes(schema, f'{{"{spelt}": "text"}}')
    assert not takes(schema, json.dumps({"other": 1, name: "text"}, ensure_ascii=False))


def test_one_of_schemas_that_a_constant_tells_apart_is_seen_through_references():
    shapes = {
        "Cat": {"type": "object", "properties": {"kind": {"const": "cat"}}, "required": ["kind"]},
        "Dog": {"type": "object", "properties": {"kind": {"$ref": "#/$defs/Dogs"}}, "required": ["kind"]},
        "Dogs": {"enum": ["dog", "wolf"]},
    }
    pets = {"oneOf": [{"$ref": "#/$defs/Cat", "title": "a cat"}, {"$ref": "#/$defs/Dog"}], "$defs": shapes}
    assert takes(pets, '{"kind": "wolf"}')
    assert not takes(pets, '{"kind": "cow"}')
    for change in ({"Dogs": {"enum": ["dog", "cat"]}}, {"Dog": shapes["Dog"] | {"required": []}}, {"Dogs": {}}):
        assert "oneOf" in refused("bytes", json_schema=pets | {"$defs": shapes | change}).message


@pytest.mark.parametrize("target", [5, [], {"type": [[]]}, {"required": [[1]]}, {"properties": 3}, {"enum": 4}, None])
def test_nonsense_that_a_reference_reaches_is_a_refusal_too(target):
    one_of = {"oneOf": [{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/x"}]}
    for schema in (one_of | {"$defs": {"x": target}}, one_of | {"$defs": target}, one_of | {"const": {"x": target}}):
        assert refused("bytes", json_schema=schema).type == "invalid_schema"


def test_json_is_written_in_one_way():
    pair = {"type": "array", "items": {"type": "object", "properties": {"a": {}, "b": {}}}}
    assert takes(pair, '[{"a": 1, "b": [true, null]}, {}]')
    for other in ('[{"a":1}]', '[{"a" : 1}]', '[{"a": 1,"b": 2}]', "[{},{}]", "[ {}]", "[\n{}]", "[{}] ", " [{}]"):
        assert not takes(pair, other)
