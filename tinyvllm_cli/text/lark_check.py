"""Lark grammars before they are compiled: what would not be enforced, or steers the model, is refused by its name."""

from __future__ import annotations

import json
import re

from tinyvllm_cli.text.depth import MAX_DEPTH, too_deep
from tinyvllm_cli.text.schema_check import SchemaError, prepare_schema

MOST_RULES = 10_000  # llguidance goes through them by recursion (text/deep_stack.py)
_RULE = re.compile(r"^[^\S\n]*+[?!]?[A-Za-z_]\w*+(?:\.-?\d+)?\s*+:", re.MULTILINE)
_JSON = json.JSONDecoder()
_NO_BLANK = re.compile(r"\S|\Z")
# What a grammar consists of, as far as it matters here. First what nothing counts in: texts, patterns, comments. Where
# one begins it is found in any case, with or without its end, so that nothing is gone through twice.
_PARTS = re.compile(
    r'"(?:\\.|[^"\\\n])*+"|/(?!/)(?:\\[\s\S]|[^/\\])++/|(?://|\#)[^\n]*|(?P<open>["/])'
    r"|(?P<json>%json)\b|(?P<options>%llguidance)\b|(?P<token><[^<>\n]*+>)|(?P<other>@[\w-]+)"
    r"|(?P<gbnf>::=)|(?P<attribute>\b(?:temperature|max_tokens|stop))\s*+="
)
_REASONS = {
    "open": "with which a text or pattern begins that has no end",
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
    start = _NO_BLANK.search(source, at)
    at = start.start() if start else at
    try:
        schema, end = _JSON.raw_decode(source, at)
        if too_deep(source[at:end].encode("utf-8", "surrogatepass")):
            raise RecursionError
        return prepare_schema(schema), end
    except RecursionError:
        found, wanted = "a schema behind %json that is nested too deeply", f"at most {MAX_DEPTH} levels"
    except ValueError:
        found, wanted = "%json", "a JSON schema behind it"
    except SchemaError as error:
        raise SchemaError(f"has a schema behind %json that {error}") from None
    line = source.count("\n", 0, at) + 1
    raise SchemaError(f"has {found} in line {line}, wanted {wanted}")
