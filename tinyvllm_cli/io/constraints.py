"""What a request demands of the form of its answer: a json_schema, regex, grammar or choice, as a line has it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from tinyvllm_cli.errors import RequestError
from tinyvllm_cli.io.fields import ANSWER_FIELDS, FORM_FIELDS, invalid, shown
from tinyvllm_cli.types import Constraint, ConstraintKind

ANY_OBJECT = {"type": "object"}  # what response_format json_object asks for
FORMAT_KEYS = frozenset({"name", "description", "schema", "strict"})  # of response_format's json_schema
PARAMS = ANSWER_FIELDS - set(FORM_FIELDS)  # fields that are SamplingParams as they are


def read_params(values: Mapping[str, Any]) -> dict[str, Any]:
    """The SamplingParams that the fields of a line set, by their names: those of FORM_FIELDS are one constraint, which
    replaces another one wholly. RequestError as of read_constraint().
    """
    params = {name: value for name, value in values.items() if name in PARAMS}
    if any(name in values for name in FORM_FIELDS):
        params["constraint"] = read_constraint(values)
    return params


def read_constraint(values: Mapping[str, Any]) -> Constraint | None:
    """The constraint among the fields of a line, which are decoded JSON; None where it has none.

    RequestError invalid_value: several of them, or one of a wrong type.
    """
    given = [name for name in FORM_FIELDS if values.get(name) is not None]
    found = {name: constraint for name in given if (constraint := READERS[name](values[name])) is not None}
    if len(found) > 1:
        *names, last = found
        raise invalid(last, f"given beside {' and '.join(names)}", "one of " + ", ".join(FORM_FIELDS))
    return next(iter(found.values()), None)


def as_field(constraint: Constraint) -> tuple[str, Any]:
    """The field of a line that says the same, and its value."""
    is_json = constraint.kind in {"json_schema", "choice"}
    return constraint.kind, json.loads(constraint.source) if is_json else constraint.source


def _json_schema(value: Any) -> Constraint:
    return Constraint("json_schema", _schema_source("json_schema", value), "json_schema")


def _text(kind: ConstraintKind, wanted: str, value: Any) -> Constraint:
    if not isinstance(value, str) or not value:
        raise invalid(kind, shown(value), wanted)
    return Constraint(kind, value, kind)


def _regex(value: Any) -> Constraint:
    return _text("regex", "a regular expression", value)


def _grammar(value: Any) -> Constraint:
    return _text("grammar", "a Lark grammar", value)


def _choice(value: Any) -> Constraint:
    if not isinstance(value, list) or not value or not all(isinstance(text, str) for text in value):
        raise invalid("choice", shown(value), "a list of texts, not empty")
    seen: set[str] = set()
    for text in value:
        if text in seen:
            raise invalid("choice", f"a list with {shown(text)} twice", "texts that differ")
        seen.add(text)
    return Constraint("choice", _json(value), "choice")


def _response_format(value: Any) -> Constraint | None:
    """OpenAI's field. `strict` changes nothing: a schema holds in any case. Null is absent, as in a line."""
    name = "response_format"
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in ("text", "json_object", "json_schema"):
        found = f"of type {shown(kind)}" if isinstance(value, dict) else shown(value)
        raise invalid(name, found, 'an object with type "text", "json_object" or "json_schema"')
    known = {"type", "json_schema"} if kind == "json_schema" else {"type"}
    if extra := sorted(key for key in value.keys() - known if value[key] is not None):
        inside = '{"type": "json_schema", "json_schema": {"schema": ...}}'
        wanted = inside if extra[0] == "schema" else "it without"
        raise invalid(name, f"of type {kind} with {shown(extra[0])}", wanted)
    if kind == "text":
        return None
    return Constraint("json_schema", _format_schema(value) if kind == "json_schema" else _json(ANY_OBJECT), name)


def _format_schema(value: dict[str, Any]) -> str:
    name = "response_format.json_schema"
    inner = value.get("json_schema")
    if not isinstance(inner, dict) or inner.get("schema") is None:
        raise _inside(
            name, "missing" if inner is None else shown(inner), "an object with name and schema, the schema in schema"
        )
    if extra := sorted(key for key in inner.keys() - FORMAT_KEYS if inner[key] is not None):
        raise _inside(name, f"an object with {shown(extra[0])}", "name, description, schema and strict alone")
    return _schema_source(f"{name}.schema", inner["schema"])


def _schema_source(name: str, value: Any) -> str:
    if not isinstance(value, dict | bool):
        raise _inside(name, shown(value), "a JSON schema: an object")
    return _json(value)


def _inside(name: str, found: str, wanted: str) -> RequestError:
    """The error of a part of a field, which is the field's."""
    return RequestError("invalid_value", invalid(name, found, wanted).message, name.partition(".")[0])


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


READERS: dict[str, Callable[[Any], Constraint | None]] = {
    "json_schema": _json_schema,
    "regex": _regex,
    "grammar": _grammar,
    "choice": _choice,
    "response_format": _response_format,
}
