"""From the lines of an input to texts that are to be scored; a line that holds none becomes its error."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from tinyvllm_cli.engine.failures import as_failure
from tinyvllm_cli.errors import RequestError
from tinyvllm_cli.io.fields import FIELDS, PROMPT_KINDS, Field, read_fields
from tinyvllm_cli.io.prompts import (
    Item,
    Line,
    decode_line,
    line_id,
    number_id,
    read_items,
    refused,
    split_fields,
    take_metadata,
)
from tinyvllm_cli.types import Request

_TEXT = msgspec.json.Decoder(str)
_TEXTS = msgspec.json.Decoder(Annotated[tuple[Annotated[str, Meta(min_length=1)], ...], Meta(min_length=1)])

SCORE_FIELDS: dict[str, Field] = {
    "custom_id": FIELDS["custom_id"],
    "text": Field(_TEXT.decode, "a text"),
    "context": Field(_TEXT.decode, "a text"),
    "continuations": Field(_TEXTS.decode, "a list of texts, at least one, and none of them empty"),
    "metadata": FIELDS["metadata"],
}
WANTED = "text, or context and continuations"
# What other tools, and lines that are to be answered, have in their place.
OTHER_FIELDS = frozenset({*PROMPT_KINDS, "question", "query", "input", "choices", "options", "completion"})


def read_score_lines(
    lines: Iterator[Line],
    *,
    text_lines: bool = False,
    check_ids: bool = False,
    wanted: Callable[[int], bool] | None = None,
) -> Iterator[Item]:
    """A Request for every line, or a Completion with the error. No line makes it raise.

    The text or the context is its prompt. text_lines: a line is a text as it stands (.txt), else a JSON object.
    check_ids, wanted: as of read_items().
    """
    find_id, fields = (number_id, _text_line) if text_lines else (line_id, _json_line)

    def make(line: Line, custom_id: str | int, own: bool) -> Item:
        values: dict[str, Any] = {}
        try:
            fields(line, values)
        except Exception as error:
            return refused(line, custom_id, as_failure(error), values.get("metadata_json"))
        return Request(request_id=line.index, custom_id=custom_id, line=line.number, has_own_id=own, raw=True, **values)

    return read_items(lines, find_id=find_id, make=make, refuse=refused, check_ids=check_ids, wanted=wanted)


def _text_line(line: Line, values: dict[str, Any]) -> None:
    values["prompt"] = decode_line(line.text)


def _json_line(line: Line, values: dict[str, Any]) -> None:
    """Fields of the Request, the metadata first: an error copies them too."""
    raw_fields = split_fields(line.text)
    values["metadata_json"] = take_metadata(raw_fields)
    if other := next((name for name in raw_fields if name in OTHER_FIELDS), None):
        raise RequestError("unknown_field", f"unknown field {other}, wanted {WANTED}", other)
    fields = read_fields(raw_fields, SCORE_FIELDS)
    _refuse_mixed(fields)
    values["prompt"] = fields.get("text", fields.get("context"))
    values["continuations"] = fields.get("continuations")


def _refuse_mixed(fields: Mapping[str, Any]) -> None:
    """RequestError where a line holds neither a text nor a context with continuations, or both."""
    kinds = [name for name in ("text", "context", "continuations") if name in fields]
    if kinds in (["text"], ["context", "continuations"]):
        return
    if len(kinds) == 1:
        missing = "context" if kinds == ["continuations"] else "continuations"
        raise RequestError("invalid_value", f"{missing} is missing beside {kinds[0]}, wanted {WANTED}", missing)
    found = f"{' and '.join(kinds)} are given" if kinds else "there is nothing to score"
    raise RequestError("invalid_value", f"{found}, wanted either {WANTED}", kinds[-1] if kinds else None)
