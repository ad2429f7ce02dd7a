"""Whether the options of a oneOf exclude each other, so that it is the same as anyOf."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
# They describe, or order definitions, and allow or forbid nothing.
ANNOTATIONS = frozenset({
    "$comment", "$schema", "contentEncoding", "contentMediaType", "contentSchema", "default", "deprecated",
    "description", "discriminator", "example", "examples", "externalDocs", "readOnly", "title", "writeOnly",
})  # fmt: skip


class Options:
    """The options of any oneOf in a schema, whose root is what references begin at."""

    def __init__(self, root: Any) -> None:
        self._root = root

    def exclude_each_other(self, options: list[Any]) -> bool:
        """Whether types tell them apart, and objects a property that each requires, by the texts that it may have.

        True only where this is sure; then oneOf is anyOf. llguidance sees this too, but not through $ref. Each option
        is looked at once: in pairs, thousands of them would take minutes.
        """
        objects: list[dict[str, Any]] = []
        seen: set[str] = set()
        for option in map(self._resolve, options):
            if not isinstance(option, dict):
                return False
            types = types_of(option)
            if types == {"object"}:
                objects.append(option)
            elif types & seen:
                return False
            else:
                seen |= types
        return not objects or ("object" not in seen and (len(objects) == 1 or self._told_apart(objects)))

    def _told_apart(self, objects: list[dict[str, Any]]) -> bool:
        names = set.intersection(*(_names(schema.get("required")) for schema in objects))
        return any(self._differ(objects, name) for name in names)

    def _differ(self, objects: list[dict[str, Any]], name: str) -> bool:
        """Whether a property is limited to texts in each of them, and to no text in two."""
        seen: set[str] = set()
        for schema in objects:
            texts = self._texts(schema, name)
            if not texts or not seen.isdisjoint(texts):
                return False
            seen |= texts
        return True

    def _texts(self, schema: dict[str, Any], name: str) -> set[str]:
        """The texts that a property is limited to; empty where it is not, or not to texts."""
        properties = schema.get("properties")
        inner = self._resolve(properties.get(name)) if isinstance(properties, dict) else None
        if not isinstance(inner, dict):
            return set()
        return _names([inner["const"]] if "const" in inner else inner.get("enum"))

    def _resolve(self, schema: Any) -> Any:
        """What a schema that is a $ref alone stands for."""
        for _ in range(100):  # a ring of them ends too
            if not isinstance(schema, dict) or schema.keys() - ANNOTATIONS != {"$ref"}:
                break
            schema = _point(self._root, schema["$ref"])
        return schema


def types_of(schema: Mapping[str, Any]) -> set[str]:
    """The types that values may have; an integer is a number too."""
    given = schema.get("type")
    types = {given} if isinstance(given, str) else _names(given) or set(TYPES)
    return types | {"integer"} if "number" in types else types


def _names(value: Any) -> set[str]:
    """The texts of a list of texts; empty for all else."""
    return set(value) if isinstance(value, list) and all(isinstance(name, str) for name in value) else set()


def _point(root: Any, reference: Any) -> Any:
    """What a reference of the form #/a/b (RFC 6901) points at; None where that is nothing."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    value = root
    for part in unquote(reference[2:]).split("/"):
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(value, list) and name.isdecimal() and int(name) < len(value):
            value = value[int(name)]
        elif isinstance(value, dict) and name in value:
            value = value[name]
        else:
            return None
    return value
