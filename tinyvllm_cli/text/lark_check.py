"""Lark grammars before they are compiled: what would not be enforced, or steers the model, is refused by its name."""

from __future__ import annotations

import json
import re

from tinyvllm_cli.text.schema_check import SchemaError, prepare_schema

MOST_RULES = 10_000  # llguidance goes through them by recursion (text/deep_stack.py)
_RULE = re.compile(r"^\s*[?!]?[A-Za-z_]\w*(?:\.-?\d+)?\s*:", re.MULTILINE)
_JSON = json.JSONDecoder()
# What a grammar consists of, as far as it matters here. First what nothing counts in: texts, patterns, comments.
_PARTS = re.compile(
    r'"(?:\\.|[^"\\\n])*+"|/(?![/*])(?:\\.|[^/\\\n])++/|(?://|\#)[^\n]*'
    r"|(?P<json>%json)\b|(?P<options>%llguidance)\b|(?P<token><[^>\n]*>)|(?P<other>@[\w-]+)"
    r"|(?P<gbnf>::=)|(?P<attribute>\b(?:temperature|max_tokens|stop))\s*="
)
_REASONS = {
    "options": "which is not supported",
    "token": "which is a token: an answer is text, and ends by itself",
    "other": "which is another grammar, and there is one",
    "gbnf": 'which is GBNF, wanted a Lark grammar, like start: "yes" | "no"',
    "attribute": "which is not supported: a line has temperature, max_tokens and stop for the whole answer",
}


def prepare_grammar(source: str) -> str:
    """The grammar as llguidance is to read it: schemas in it (%json) are prepared as json_schema is.

    SchemaError for one that says what would not be enforced.
    """
    if source.lstrip().startswith("{"):
        raise SchemaError("is a JSON object, wanted a Lark grammar")
    if (count := len(_RULE.findall(source))) > MOST_RULES:
        raise SchemaError(f"has {count} rules and terminals, wanted at most {MOST_RULES}")
    pieces, at = [], 0
    while found := _PARTS.search(source, at):
        pieces.append(source[at : found.end()])
        at = found.end()
        kind = found.lastgroup
        if kind == "json":
            schema, at = _schema(source, at)
            pieces.append(f" {json.dumps(schema)}")
        elif kind is not None:
            line = source.count("\n", 0, found.start()) + 1
            raise SchemaError(f"has {found[kind]} in line {line}, {_REASONS[kind]}")
    return "".join([*pieces, source[at:]])


def _schema(source: str, at: int) -> tuple[object, int]:
    """The schema that begins behind %json, prepared, and where it ends."""
    at += len(source[at:]) - len(source[at:].lstrip())
    try:
        schema, end = _JSON.raw_decode(source, at)
    except ValueError:
        raise SchemaError(
            f"has %json in line {source.count(chr(10), 0, at) + 1}, wanted a JSON schema behind it"
        ) from None
    try:
        return prepare_schema(schema), end
    except SchemaError as error:
        raise SchemaError(f"has a schema behind %json that {error}") from None
