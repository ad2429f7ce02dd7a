"""Laws of what constraints cost and keep: hostile ones are answered at once, and accepted values come out as given."""

import json
from collections.abc import Iterator

import pytest
from clock import units
from constraint_tools import EOS, compiled, mask, refused, tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from tinyvllm_cli import dry_run
from tinyvllm_cli.text.schema_check import SchemaError, prepare_schema
from tinyvllm_cli.text.schema_values import refuse_value
from tinyvllm_cli.types import Request, SamplingParams

SIZE = 200_000  # characters, about


def tagged(i):
    return {"type": "object", "properties": {"kind": {"const": f"k{i}"}}, "required": ["kind"]}


def multiples(*values):
    return [{"type": "integer", "multipleOf": value} for value in values]


LARGE = multiples(9973, 9967)
HOSTILE = {
    "classes": {"regex": "[" * SIZE},
    "classes of a pattern": {"json_schema": {"type": "string", "pattern": "[" * SIZE}},
    "tokens": {"grammar": 'start: "a"\n' + "<" * SIZE},
    "text": {"grammar": 'start: "a" "' + '\\"' * (SIZE // 2)},
    "pattern": {"grammar": 'start: "a" /' + "\\/" * (SIZE // 2)},
    "empty lines": {"grammar": 'start: "a"' + "\n" * SIZE},
    "blanks": {"grammar": 'start: "a"\n' + " " * SIZE},
    "schemas": {"grammar": "start: " + "%json {}\n" * 20_000 + "<"},
    "deep list": {"grammar": "start: %json " + "[" * SIZE},
    "deep object": {"grammar": "start: %json " + '{"items":' * (SIZE // 9)},
    "choices": {"choice": [*map(str, range(SIZE // 9)), str(SIZE // 9 - 1)]},
    "one of": {"json_schema": {"oneOf": [tagged(i) for i in range(2500)]}},
    "one of, twice": {"json_schema": {"oneOf": [tagged(i % 2499) for i in range(2500)]}},
    "one of references": {"json_schema": {"$defs": {"a": tagged(1)}, "oneOf": [{"$ref": "#/$defs/a"}] * 9000}},
    "a multiple": {"json_schema": multiples(9999991)[0]},
    "all of": {"json_schema": {"allOf": LARGE}},
    "any of": {"json_schema": {"anyOf": LARGE}},
    "beside": {"json_schema": LARGE[0] | {"$ref": "#/$defs/a", "$defs": {"a": LARGE[1]}}},
    "one pattern": {"json_schema": {"properties": {"ab": LARGE[0]}, "patternProperties": {"^a": LARGE[1]}}},
    "many": {"json_schema": {"properties": {str(i): LARGE[0] | {"minimum": i} for i in range(3000)}}},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_constraint_is_answered_at_once(name):
    compiled("bytes", choice=["warm"])
    assert units(lambda: refused("bytes", **HOSTILE[name]), rounds=1) < 100


@pytest.mark.parametrize(("multiple", "fits"), [(10000, True), (10001, False), (0.01, True), (1000.1, False)])
def test_a_multiple_counts_by_its_digits(multiple, fits):
    schema = {"type": "number", "multipleOf": multiple}
    error = refused("bytes", json_schema={"type": "array", "items": schema, "minItems": 1})
    assert (error is None) == fits
    assert fits or f"multipleOf {multiple} at #/items, wanted" in error.message


def test_multiples_of_one_value_count_by_their_common_multiple():
    assert prepare_schema({"allOf": multiples(100, 75, 16)}), "1200"
    assert prepare_schema({"properties": dict(zip("ab", LARGE, strict=True))}), "of two values"
    with pytest.raises(SchemaError, match=r"multipleOf at #/allOf/0 and at other places.* at most 10000"):
        prepare_schema({"allOf": LARGE})
    with pytest.raises(SchemaError, match="at most 10000"):
        prepare_schema({"allOf": [{"multipleOf": 1000}, {"multipleOf": 0.01}]})


@pytest.mark.parametrize("schema", ["[" * 5000, '{"items":' * 5000, '{"items":' * 120 + "{}" + "}" * 120])
def test_a_schema_in_a_grammar_is_nested_as_deep_as_in_a_line(schema):
    message = refused("bytes", grammar=f"\nstart: %json {schema}").message
    assert "nested too deeply in line 2, wanted at most 100 levels" in message


def test_nothing_hides_behind_a_pattern_of_several_lines():
    assert "<|end|>" in refused("bytes", grammar="start: /a\nb/ <|end|> /c/").message


def forced(schema):
    """The one answer that a schema allows."""
    matcher, text = compiled("bytes", json_schema=schema), b""
    while ids := [id for id in mask("bytes", matcher) if id not in EOS["bytes"]]:
        starts = {tokenizer("bytes").token_bytes(id)[:1] for id in ids}
        assert len(starts) == 1, (schema, text, starts)
        id = min(ids, key=lambda id: len(tokenizer("bytes").token_bytes(id)))
        text += tokenizer("bytes").token_bytes(id)
        matcher.advance(id)
    return json.loads(text)


def same(one, other):
    """Equal as JSON has it: 1.0 is 1, and true is not."""
    return one == other and isinstance(one, bool) == isinstance(other, bool)


CONTROLS = [f"a{chr(code)}b" for code in [*range(32), 127, 128]]
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**54), 2**54)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.builds(lambda digits, places: float(f"{digits}e{places}"), st.integers(-(10**15), 10**15), st.integers(-23, 2))
    | st.text(max_size=8)
    | st.sampled_from(CONTROLS)
)


@given(SCALARS)
@settings(max_examples=400, deadline=None, derandomize=True)
def test_the_answer_to_an_accepted_constant_is_that_value(value):
    if refuse_value(value):
        return
    assert same(forced({"const": value}), value)
    assert same(forced({"enum": [value]}), value)


@given(st.lists(SCALARS, min_size=1, max_size=2), st.text(max_size=3) | st.sampled_from(CONTROLS))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_at_any_depth_and_under_any_name(values, name):
    if not refuse_value(values):
        (answer,) = forced({"const": [{name: values}]})
        assert list(answer) == [name]
        assert all(same(*pair) for pair in zip(answer[name], values, strict=True))


LOST = [2**53 + 1, -(2**63), 1e300, 5e-324, 123456789.12345679, "\0", "a\x7f", "\x1f"]


@pytest.mark.parametrize("value", LOST)
@pytest.mark.parametrize("put", [lambda value: value, lambda value: [1, value], lambda value: {"a": [{"b": value}]}])
def test_a_value_that_would_be_lost_is_refused_by_its_place(value, put):
    for schema in ({"const": put(value)}, {"enum": ["a", put(value)]}):
        (key,) = schema
        message = refused("bytes", json_schema={"properties": {"x": schema}}).message
        assert message.startswith(f"json_schema has {key} at #/properties/x with the ") and "wanted" in message


@pytest.mark.parametrize("value", [2**53, -(2**53), 0.1, 1.0, -12.5, 1e-7, 99999999999999.9, 'é\t\n\r\b\f"\\', "\x80"])
def test_a_value_that_would_not_be_lost_is_taken(value):
    assert same(forced({"const": value}), value)


def test_a_fault_in_one_line_leaves_the_others_of_a_dry_run(capsys: pytest.CaptureFixture[str]):
    def request(line: int) -> Request:
        return Request(request_id=line, custom_id=f"line-{line}", line=line, prompt="a", params=SamplingParams())

    def take(request: Request) -> int:
        if request.line == 2:
            raise ZeroDivisionError("odd")
        return request.line

    taken: Iterator[int | None] = dry_run._taken([request(1), request(2), request(3)], take)
    assert list(taken) == [1, None, 3]
    err = capsys.readouterr().err
    assert "line 2: internal: " in err and "ZeroDivisionError: odd" in err and "Traceback" not in err
