"""Rows of columns as prompts: the options -t, --id and --keep, and what they make of a row."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, BinaryIO

import msgspec

from tinyvllm_cli.errors import RequestError, UsageError
from tinyvllm_cli.io.csv_lines import read_csv_lines, read_header
from tinyvllm_cli.io.fields import shown
from tinyvllm_cli.io.messages import read_messages
from tinyvllm_cli.io.prompts import Line, read_lines
from tinyvllm_cli.io.settings import TextOption
from tinyvllm_cli.io.source import Source
from tinyvllm_cli.io.strict import refuse_deep, refuse_equal_keys
from tinyvllm_cli.text.depth import too_deep
from tinyvllm_cli.text.row_template import RowTemplate, Truncate, no_column
from tinyvllm_cli.types import Message

DEFAULT_ID = "custom_id"
ALL = "*"  # of --keep

_ID: msgspec.json.Decoder[str | int | None] = msgspec.json.Decoder(str | int | None)


@dataclass(frozen=True)
class Rows:
    """How rows become requests. Their columns are data: none of them is an option of the line."""

    csv: bool  # else JSON objects
    templates: tuple[RowTemplate, ...]  # of the prompt, or of each message
    roles: tuple[Message, ...] | None = None  # messages whose contents `templates` give; None: one prompt
    id_column: str | None = None  # None: custom_id where a row has it
    keep: tuple[str, ...] = ()  # columns for the metadata

    def lines(self, stream: BinaryIO, limit: int | None = None) -> Iterator[Line]:
        return read_csv_lines(stream, limit) if self.csv else read_lines(stream, limit)

    def with_truncate(self, truncate: Truncate) -> Rows:
        return dataclasses.replace(self, templates=tuple(t.with_truncate(truncate) for t in self.templates))

    def line_id(self, line: Line) -> tuple[str | int, bool]:
        """As io.prompts.line_id(), from the column of --id. A row without one is called by its number, as is one whose
        cell is empty, for CSV has no null."""
        if not too_deep(line.text):
            with suppress(msgspec.DecodeError):
                raw = self._id_type.decode(line.text).custom_id
                custom_id = _ID.decode(raw) if raw else None
                if custom_id is not None and not (self.csv and custom_id == ""):
                    return custom_id, True
        return f"line-{line.number}", False

    def metadata(self, raw_fields: Mapping[str, bytes]) -> bytes | None:
        """The JSON object of the columns to keep, values as they stand; None where none is wanted."""
        if not self.keep:
            return None
        names = list(raw_fields) if ALL in self.keep else list(dict.fromkeys(self.keep))
        for name in names:
            if name not in raw_fields:
                raise RequestError("invalid_value", no_column("--keep", name, list(raw_fields)), name)
            _value(name, raw_fields[name])
        text = msgspec.json.encode({name: msgspec.Raw(raw_fields[name]) for name in names})
        return msgspec.json.format(text, indent=-1) if b"\r" in text else text

    def prompt(self, raw_fields: Mapping[str, bytes]) -> dict[str, Any]:
        """The field of a request that these columns make. RequestError where the template or the id cannot be had."""
        columns = {name: _value(name, raw) for name, raw in raw_fields.items()}
        name = self.id_column or DEFAULT_ID
        if self.id_column is not None and name not in columns:
            raise RequestError("invalid_value", no_column("--id", name, list(columns)), name)
        custom_id = columns.get(name)
        if isinstance(custom_id, bool) or not isinstance(custom_id, str | int | None):
            raise RequestError("invalid_value", f"{name} is {shown(custom_id)}, wanted a text or an integer", name)
        texts = [template.render(columns) for template in self.templates]
        if self.roles is None:
            return {"prompt": texts[0]}
        turns = (Message(message.role, text) for message, text in zip(self.roles, texts, strict=True))
        return {"messages": tuple(turns)}

    @cached_property
    def _id_type(self) -> msgspec.json.Decoder[Any]:
        """Reads the one column and skips the others, which is several times as fast."""
        fields = [("custom_id", msgspec.Raw, msgspec.field(name=self.id_column or DEFAULT_ID, default=msgspec.Raw()))]
        return msgspec.json.Decoder(msgspec.defstruct("Id", fields))


def read_rows(
    source: Source, template: TextOption | None, id_column: str | None, keep: Sequence[str], *, raw: bool
) -> Rows | None:
    """What the options make of the rows of a source; None where its lines are no rows. UsageError where they do not
    go together, or a .csv file lacks a column that they name; the source stands at its start afterwards."""
    if template is None:
        for option, value in (("--id", id_column), ("--keep", keep)):
            if value:
                raise UsageError(f"{option} names a column of a row: it needs --template")
        if source.suffix == ".csv":
            raise UsageError(f"the input {source.name} needs --template, for example -t '{{{{ question }}}}'")
        return None
    if source.suffix == ".txt":
        raise UsageError("--template needs columns, which a .txt file has not: give a .csv or .jsonl file")
    roles = _read_turns(template) if template.is_json else None
    if roles is not None and raw:
        raise UsageError("--raw gives one prompt as it is, and --template is a list of messages: give one of them")
    texts = [template.text] if roles is None else [message.content for message in roles]
    rows = Rows(source.suffix == ".csv", tuple(map(RowTemplate, texts)), roles, id_column, tuple(keep))
    if not any(part.reads_row for part in rows.templates):
        raise UsageError(
            "--template uses no column, so that all prompts would be the same: {{ review }} stands for the column "
            "review, and a template in a file is given as @FILE"
        )
    if rows.csv:
        if not source.twice:
            raise UsageError(f"the input {source.name} is no regular file, which a .csv file must be")
        header = read_header(source.stream, source.name)
        source.stream.seek(0)
        _refuse_missing(rows, header)
    return rows


def _refuse_missing(rows: Rows, header: Sequence[str]) -> None:
    if not header:  # an empty file: nothing asks for its columns
        return
    asked = [("--id", rows.id_column)] if rows.id_column is not None else []
    asked += [("--keep", name) for name in rows.keep if name != ALL]
    asked += [("--template", name) for template in rows.templates for name in sorted(template.names)]
    for option, name in asked:
        if name not in header:
            raise UsageError(no_column(option, name or "", header))


def _read_turns(template: TextOption) -> tuple[Message, ...]:
    """The messages of a .json file; their contents are templates."""
    raw = template.text.encode()
    try:
        refuse_deep(raw, template.name)
        turns = msgspec.json.decode(raw, type=list[dict[str, Any]])
        refuse_equal_keys(template.text)
        messages = read_messages(turns)
    except (msgspec.DecodeError, ValueError) as error:
        raise UsageError(f"--template: {template.name} is no JSON list of messages ({error})") from None
    except RequestError as error:
        raise UsageError(f"--template: {template.name}: {error.message}") from None
    if not messages:
        raise UsageError(f"--template: {template.name} holds no messages, wanted at least one")
    return messages


def _value(name: str, raw: bytes) -> Any:
    try:
        return msgspec.json.decode(raw)
    except msgspec.DecodeError:
        message = f"{name} is a number out of range or half a surrogate pair, wanted a JSON value"
        raise RequestError("invalid_value", message, name) from None
