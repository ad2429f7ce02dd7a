"""JSON schemas (draft 2020-12) before they are compiled: what would not be enforced is refused by its name.

What llguidance 1.9 does not know as a keyword it ignores, and a few things it reads otherwise than a validator does;
so here stands a list of what it is known to enforce (tests/test_schema_check.py holds it against `jsonschema`).
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote

from tinyvllm_cli.text.patterns import EXACT_FORMATS, refuse_pattern
from tinyvllm_cli.text.schema_options import ANNOTATIONS, TYPES, Options, types_of
from tinyvllm_cli.text.schema_values import MOST_IN_ALL, MOST_REMAINDERS, common_multiple, refuse_value

# How JSON is written. An escape \\uXXXX could spell the name of a property in a way that its schema is not looked at.
JSON_STYLE = {
    "item_separator": ", ",
    "key_separator": ": ",
    "whitespace_flexible": False,
    "json_allowed_escapes": 'nrbtf\\"',
}
FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
TYPES_OF_PYTHON = {"bool": "boolean", "int": "integer", "float": "number", "list": "array", "dict": "object"}
# Bounds of one thing, and the types of the values that have it.
BOUNDS = (
    ("minimum", "maximum", {"integer", "number"}),
    ("minLength", "maxLength", {"string"}),
    ("minItems", "maxItems", {"array"}),
    ("minProperties", "maxProperties", {"object"}),
)
WRAPPER = frozenset({"name", "description", "strict", "schema"})  # what OpenAI has around a schema
EXACT = 2**53  # bounds are compared as float64

PLAIN = frozenset({
    "$anchor", "$ref", "const", "enum", "maxItems", "maxLength", "maxProperties", "minItems", "minLength", "pattern",
    "required", "type", "exclusiveMaximum", "exclusiveMinimum", "format", "maximum", "minProperties", "minimum",
    "multipleOf",
})  # fmt: skip
WITH_SCHEMA = frozenset({"additionalProperties", "items"})
MOST_REFERENCES = 5_000  # places; llguidance goes through them by recursion (text/deep_stack.py)
WITH_LIST = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
COMBINING = frozenset({"$ref", "allOf", "anyOf", "oneOf", "patternProperties"})
COMBINED = ", ".join(sorted(COMBINING)[:-1]) + " or " + max(COMBINING)
WITH_NAMES = frozenset({"$defs", "definitions", "patternProperties", "properties"})
KNOWN = ANNOTATIONS | PLAIN | WITH_SCHEMA | WITH_LIST | WITH_NAMES
# Keywords of the drafts, so that a wrong guess of a misspelt one is not made for them.
UNENFORCED = frozenset({
    "$dynamicAnchor", "$dynamicRef", "$id", "$recursiveAnchor", "$recursiveRef", "$vocabulary", "additionalItems",
    "contains", "dependencies", "dependentRequired", "dependentSchemas", "else", "if", "maxContains", "minContains",
    "not", "nullable", "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties", "uniqueItems",
})  # fmt: skip
INSTEAD = {
    "additionalItems": "prefixItems with items",
    "nullable": 'a type like ["string", "null"]',
    "dependencies": "anyOf",
    "dependentRequired": "anyOf",
}


class SchemaError(Exception):
    """Why a constraint cannot be had, as the rest of a sentence that begins with the name of the field."""


def prepare_schema(schema: Any) -> dict[str, Any]:
    """The schema as llguidance is to read it, with the way its JSON is written.

    Annotations are left out, and what it does not take although it could is put otherwise. SchemaError for a schema
    that says what would not be enforced.
    """
    if schema is False:
        raise SchemaError("is false, which no value fulfils")
    root = {} if schema is True else schema
    if isinstance(root, dict):
        if root.get("type") == "json_schema" or {"schema"} <= root.keys() <= WRAPPER:
            raise SchemaError('has the wrapper of OpenAI\'s response_format, wanted what stands in its "schema" alone')
        root = {key: value for key, value in root.items() if key != "$id"}  # a name for a whole, which nothing needs
    walk = _Walk(root)
    read = walk.schema(root, "#")
    walk.refuse_lost()
    walk.refuse_multiples()
    return {"x-guidance": JSON_STYLE, **read}


class _Walk:
    """One pass over a schema; `at` is where in it, as a JSON pointer."""

    def __init__(self, root: Any) -> None:
        self._options = Options(root)
        self._multiples: dict[str, list[str]] = {}  # each multipleOf in digits, and where it stands
        self._is_combined = False  # several schemas may be those of one value
        self._places: set[str] = set()
        self._references: dict[str, str] = {}  # each, and where it stands

    def refuse_lost(self) -> None:
        """SchemaError for a reference to what is no schema, of which llguidance would make one that allows all."""
        for reference, at in self._references.items():
            if reference.startswith("#/") and unquote(reference) not in self._places:
                raise SchemaError(f"has $ref {_shown(reference)} at {at}, which is no place of a schema in it")

    def refuse_multiples(self) -> None:
        """SchemaError for multiples that may be asked of one value, or in one schema, and have too many remainders."""
        each = [common_multiple([digits]) for digits in self._multiples]
        if self._is_combined and self._multiples:
            common = common_multiple(self._multiples)
            if common > MOST_REMAINDERS:
                at = self._multiples[max(self._multiples, key=lambda digits: common_multiple([digits]))][0]
                raise SchemaError(
                    f"has multipleOf at {at} and at other places, and {COMBINED} too, wanted their least common "
                    f"multiple, in units of the last digit, at most {MOST_REMAINDERS}"
                )
            each = [common] * len(each)
        total = sum(one * len(places) for one, places in zip(each, self._multiples.values(), strict=True))
        if total > MOST_IN_ALL:
            raise SchemaError(
                f"has multipleOf that come to {total} remainders in all, wanted at most {MOST_IN_ALL}: fewer or less"
            )

    def schema(self, value: Any, at: str) -> Any:
        if isinstance(value, bool):
            self._places.add(at)
            return value
        if not isinstance(value, dict):
            hint = " (a list of schemas is prefixItems)" if isinstance(value, list) else ""
            raise SchemaError(f"has {_shown(value)} at {at}, wanted a schema{hint}")
        for key in value:
            _refuse_unknown(key, value[key], at)
        for check in CHECKS:
            check(value, at)
        self._places.add(at)
        self._is_combined |= not COMBINING.isdisjoint(value)
        if "multipleOf" in value:
            self._multiples.setdefault(str(value["multipleOf"]), []).append(at)
        if "$ref" in value:
            self._references.setdefault(value["$ref"], at)
            if len(self._references) > MOST_REFERENCES:
                raise SchemaError(f"has $ref to more than {MOST_REFERENCES} places, wanted fewer")
        read = {key: self._read(key, value[key], f"{at}/{key}") for key in value if key in KNOWN - ANNOTATIONS}
        if "oneOf" in read and self._options.exclude_each_other(value["oneOf"]):
            read = {"anyOf" if key == "oneOf" and "anyOf" not in read else key: read[key] for key in read}
        if pattern := EXACT_FORMATS.get(read.get("format", "")):
            read["allOf"] = [*read.get("allOf", []), {"pattern": pattern}]
        return read

    def _read(self, key: str, value: Any, at: str) -> Any:
        if key in WITH_SCHEMA:
            return self.schema(value, at)
        if key in WITH_LIST:
            if not isinstance(value, list) or not value:
                raise SchemaError(f"has {_shown(value)} at {at}, wanted a list of schemas, not empty")
            return [self.schema(item, f"{at}/{i}") for i, item in enumerate(value)]
        if key in WITH_NAMES:
            if not isinstance(value, dict):
                raise SchemaError(f"has {_shown(value)} at {at}, wanted an object of schemas")
            return {name: self.schema(item, f"{at}/{_escaped(name)}") for name, item in value.items()}
        return value


def _escaped(name: str) -> str:
    """As a part of a JSON pointer (RFC 6901)."""
    return name.replace("~", "~0").replace("/", "~1")


def _refuse_unknown(key: str, value: Any, at: str) -> None:
    if key in KNOWN or (key == "uniqueItems" and value is False):
        return
    if key in UNENFORCED:
        raise SchemaError(
            f"has {key} at {at}, which is not supported, wanted {INSTEAD.get(key, 'a schema without it')}"
        )
    nearest = next(iter(difflib.get_close_matches(key, KNOWN, 1)), None)
    raise SchemaError(
        f"has the unknown keyword {_shown(key)} at {at}" + (f", did you mean {nearest}?" if nearest else "")
    )


def _check_reference(schema: Mapping[str, Any], at: str) -> None:
    reference = schema.get("$ref", "#")
    if not isinstance(reference, str) or not reference.startswith("#"):
        raise SchemaError(f"has $ref {_shown(reference)} at {at}, wanted one into the schema itself, like #/$defs/NAME")


def _check_types(schema: Mapping[str, Any], at: str) -> None:
    given = schema.get("type", TYPES[0])
    for name in (given if isinstance(given, list) else [given]) or [given]:
        if name not in TYPES:
            word = str(name).lower()
            near = TYPES_OF_PYTHON.get(word) or next(iter(difflib.get_close_matches(word, TYPES, 1)), None)
            wanted = f"did you mean {near}?" if near else f"wanted {', '.join(TYPES)}"
            raise SchemaError(f"has type {_shown(name)} at {at}, {wanted}")


def _check_values(schema: Mapping[str, Any], at: str) -> None:
    values = schema.get("enum", [None])
    if not isinstance(values, list) or not values:
        raise SchemaError(f"has enum {_shown(values)} at {at}, wanted a list of values, not empty")
    for key in ("const", "enum"):
        if reason := refuse_value(schema.get(key)):
            raise SchemaError(f"has {key} at {at} {reason}")


def _check_counts(schema: Mapping[str, Any], at: str) -> None:
    for low, high, _ in BOUNDS[1:]:
        for key in (low, high):
            value = schema.get(key, 0)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise SchemaError(f"has {key} {_shown(value)} at {at}, wanted an integer >= 0")


def _check_numbers(schema: Mapping[str, Any], at: str) -> None:
    for key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"):
        value = schema.get(key, 1)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise SchemaError(f"has {key} {_shown(value)} at {at}, wanted a number")
        if abs(value) > EXACT:
            raise SchemaError(f"has {key} {_shown(value)} at {at}, wanted a number from -2^53 to 2^53")
    if schema.get("multipleOf", 1) <= 0:
        raise SchemaError(f"has multipleOf {_shown(schema['multipleOf'])} at {at}, wanted a number above 0")
    if "multipleOf" in schema and common_multiple([str(schema["multipleOf"])]) > MOST_REMAINDERS:
        wanted = f"wanted one whose digits, read as an integer, are at most {MOST_REMAINDERS}"
        raise SchemaError(f"has multipleOf {_shown(schema['multipleOf'])} at {at}, {wanted}")
    _check_open_end(schema, at)


def _check_bounds(schema: Mapping[str, Any], at: str) -> None:
    for low, high, types in BOUNDS:
        if low in schema and high in schema and schema[low] > schema[high] and types_of(schema) <= types:
            raise SchemaError(f"has {low} {schema[low]} above {high} {schema[high]} at {at}, which no value fulfils")


def _check_open_end(schema: Mapping[str, Any], at: str) -> None:
    """Of a range between a whole number and a neighbour's fractions llguidance 1.9 lets the open end in."""
    if "number" not in types_of(schema):
        return
    low = [schema[key] for key in ("minimum", "exclusiveMinimum") if key in schema]
    high = [schema[key] for key in ("maximum", "exclusiveMaximum") if key in schema]
    open_ends = [schema[key] for key in ("exclusiveMinimum", "exclusiveMaximum") if key in schema]
    if low and high and 0 < min(high) - max(low) < 1 and any(end == int(end) for end in open_ends):
        raise SchemaError(f"has a range less than 1 wide without its whole end at {at}, which is not supported")


def _check_properties(schema: Mapping[str, Any], at: str) -> None:
    """Free names may repeat, and a reader of the JSON keeps one of them."""
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise SchemaError(f"has required {_shown(required)} at {at}, wanted a list of names")
    closed = schema.get("additionalProperties") is False and "patternProperties" not in schema
    properties = schema.get("properties", {})
    if closed and types_of(schema) == {"object"} and isinstance(properties, dict):
        for name in required:
            if name not in properties:
                wanted = "wanted it among the properties too: additionalProperties false allows no other"
                raise SchemaError(f"has required {_shown(name)} at {at}, {wanted}")
    least = schema.get("minProperties", 0)
    if least > len(set(required)) + 1:
        raise SchemaError(f"has minProperties {least} at {at}, which is supported up to 1 above those required")


def _check_text(schema: Mapping[str, Any], at: str) -> None:
    name = schema.get("format", FORMATS[0])
    if name not in FORMATS:
        raise SchemaError(f"has format {_shown(name)} at {at}, which is not supported, wanted {', '.join(FORMATS)}")
    patterns = list(schema.get("patternProperties", {})) + [schema[key] for key in ("pattern",) if key in schema]
    for pattern in patterns:
        if isinstance(pattern, str) and (reason := refuse_pattern(pattern)):
            raise SchemaError(f"has the pattern {_shown(pattern)} at {at}, {reason}")


CHECKS: tuple[Callable[[Mapping[str, Any], str], None], ...] = (
    _check_reference,
    _check_types,
    _check_values,
    _check_counts,
    _check_numbers,
    _check_bounds,
    _check_properties,
    _check_text,
)


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
