"""What a request demands of the form of its answer: a json_schema, regex, grammar or choice, as a line has it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from tinyvllm_cli.errors import RequestError

Kind: TypeAlias = Literal["json_schema", "regex", "grammar", "choice"]

ANY_OBJECT = {"type": "object"}  # what response_format json_object asks for
FORMAT_KEYS = frozenset({"name", "description", "schema", "strict"})  # of response_format's json_schema
SHOWN_CHARS = 60  # of a value in a message


@dataclass(frozen=True, slots=True)
class Constraint:
    """The form of an answer. Whether it can be had is not known before it is compiled (text/grammars.py).

    source: a JSON schema or a list of choices as JSON text (keys in their own order, which is that of the answer), a
    regular expression or a Lark grammar as it is. field: what a line calls it, for messages; no part of the value.
    """

    kind: Kind
    source: str
    field: str = field(compare=False)


def read_constraint(values: Mapping[str, Any]) -> Constraint | None:
    """The constraint among the fields of a line, which are decoded JSON; None where it has none.

    RequestError invalid_value: several of them, or one of a wrong type.
    """
    given = [name for name in READERS if values.get(name) is not None]
    found = {name: constraint for name in given if (constraint := READERS[name](values[name])) is not None}
    if len(found) > 1:
        *names, last = found
        raise _invalid(last, f"given beside {' and '.join(names)}", "one of " + ", ".join(READERS))
    return next(iter(found.values()), None)


def _json_schema(value: Any) -> Constraint:
    return _constraint("json_schema", _schema_source("json_schema", value), "json_schema")


def _text(kind: Kind, wanted: str, value: Any) -> Constraint:
    if not isinstance(value, str) or not value:
        raise _invalid(kind, _shown(value), wanted)
    return _constraint(kind, value, kind)


def _regex(value: Any) -> Constraint:
    return _text("regex", "a regular expression", value)


def _grammar(value: Any) -> Constraint:
    return _text("grammar", "a Lark grammar", value)


def _choice(value: Any) -> Constraint:
    if not isinstance(value, list | tuple) or not value or not all(isinstance(text, str) for text in value):
        raise _invalid("choice", _shown(value), "a list of texts, not empty")
    if len(set(value)) < len(value):
        twice = next(text for i, text in enumerate(value) if text in value[:i])
        raise _invalid("choice", f"a list with {_shown(twice)} twice", "texts that differ")
    return _constraint("choice", _json(value), "choice")


def _response_format(value: Any) -> Constraint | None:
    """OpenAI's field. `strict` changes nothing: a schema holds in any case."""
    name = "response_format"
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(value, dict) or kind not in ("text", "json_object", "json_schema"):
        found = f"of type {_shown(kind)}" if isinstance(value, dict) else _shown(value)
        raise _invalid(name, found, 'an object with type "text", "json_object" or "json_schema"')
    if extra := sorted(value.keys() - {"type"} - ({"json_schema"} if kind == "json_schema" else set())):
        raise _invalid(name, f"of type {kind} with {_shown(extra[0])}", "it without")
    if kind == "text":
        return None
    return _constraint("json_schema", _format_schema(value) if kind == "json_schema" else _json(ANY_OBJECT), name)


def _format_schema(value: dict[str, Any]) -> str:
    name = "response_format.json_schema"
    inner = value.get("json_schema")
    if not isinstance(inner, dict) or "schema" not in inner:
        found = _shown(inner) if isinstance(inner, dict) or inner is not None else "missing"
        raise _invalid(name, found, "an object with name and schema")
    if extra := sorted(inner.keys() - FORMAT_KEYS):
        raise _invalid(name, f"an object with {_shown(extra[0])}", "name, description, schema and strict alone")
    return _schema_source(f"{name}.schema", inner["schema"])


def _schema_source(name: str, value: Any) -> str:
    if not isinstance(value, dict | bool):
        raise _invalid(name, _shown(value), "a JSON schema: an object")
    try:
        return _json(value)
    except ValueError:
        raise _invalid(name, "a schema with NaN or Infinity", "numbers") from None


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def _constraint(kind: Kind, source: str, name: str) -> Constraint:
    try:
        source.encode()
    except UnicodeEncodeError:
        raise _invalid(name, "a text with half of a surrogate pair", "Unicode text") from None
    return Constraint(kind, source, name)


READERS: dict[str, Callable[[Any], Constraint | None]] = {
    "json_schema": _json_schema,
    "regex": _regex,
    "grammar": _grammar,
    "choice": _choice,
    "response_format": _response_format,
}


def _invalid(name: str, found: str, wanted: str) -> RequestError:
    return RequestError("invalid_value", f"{name} is {found}, wanted {wanted}", name.partition(".")[0])


def _shown(value: Any) -> str:
    """A value for a message: on one line, and short."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= SHOWN_CHARS else text[: SHOWN_CHARS - 3] + "..."
