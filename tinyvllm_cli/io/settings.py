"""The answer options of the command, checked like the fields of a line: what holds where a line says nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tinyvllm_cli.errors import RequestError, UsageError
from tinyvllm_cli.io.constraints import read_constraint, read_params
from tinyvllm_cli.io.fields import (
    ANSWER_FIELDS,
    FIELDS,
    FORM_FIELDS,
    PROMPT_FIELDS,
    read_field,
    refuse_equal_answers,
    unknown_field,
)
from tinyvllm_cli.io.prompts import Defaults
from tinyvllm_cli.io.source import STDIN, read_whole
from tinyvllm_cli.io.strict import refuse_deep, refuse_equal_keys
from tinyvllm_cli.types import SamplingParams

if TYPE_CHECKING:
    from tinyvllm_cli.text.codec import TextCodec


def read_settings(options: Mapping[str, Any], assignments: Iterable[str]) -> dict[str, Any]:
    """The fields that the command sets: `options` by their names in a line (None: not given), then --set NAME=VALUE.

    UsageError, in the words of a line's error.
    """
    values: dict[str, Any] = {}
    for name, value in options.items():
        if value is not None:
            values[name] = _read_option(name, value)
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals:
            raise UsageError(f"--set {assignment}: wanted NAME=VALUE, for example --set top_p=0.9")
        if name in values:
            raise UsageError(f"--set {assignment}: {name} is given twice")
        values[name] = _read_assignment(name, text)
    _refuse_several_forms(values, options)
    return {name: value for name, value in values.items() if FIELDS[name].neutral is None}


def _read_option(name: str, value: Any) -> Any:
    try:
        return _read(name, json.dumps(value).encode())
    except RequestError as error:
        raise UsageError(_option(name) + error.message.removeprefix(name)) from None


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}" if len(name) > 1 else f"-{name}"


def _read_assignment(name: str, text: str) -> Any:
    """VALUE is JSON, else a string."""
    try:
        if name not in FIELDS:
            raise unknown_field(name, FIELDS)
        if FIELDS[name].neutral is None and name not in ANSWER_FIELDS | PROMPT_FIELDS:
            raise RequestError("invalid_value", f"{name} belongs to one line and cannot be set for all", name)
        return _read(name, _as_json(name, text))
    except RequestError as error:
        raise UsageError(f"--set: {error.message}") from None


def _read(name: str, raw: bytes) -> Any:
    value = read_field(name, raw)
    if name in FORM_FIELDS:
        read_constraint({name: value})  # only to check it
    return value


def _refuse_several_forms(values: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    given = [name for name in FORM_FIELDS if name in values and read_constraint({name: values[name]}) is not None]
    if len(given) > 1:
        *names, last = [_option(name) if options.get(name) is not None else f"--set {name}" for name in given]
        raise UsageError(f"{last} is given beside {' and '.join(names)}, wanted one of them: an answer has one form")


def check_form(settings: Mapping[str, Any], codec: TextCodec, *, schema_file: str | None, by_choice: bool) -> None:
    """UsageError where the form that the command gives cannot be had, in the words of a line's error.

    settings: of read_settings(). schema_file: of --json-schema; by_choice: --choice is given. Else it is of --set.
    """
    constraint = read_constraint(settings)
    if constraint is None:
        return
    try:
        codec.grammars.check(constraint)
    except RequestError as error:
        reason = error.message.removeprefix(constraint.field)
        if schema_file is not None:
            raise UsageError(f"--json-schema: {schema_file}{reason}") from None
        raise UsageError(f"--choice{reason}" if by_choice else f"--set: {error.message}") from None


def check_equal_answers(settings: Mapping[str, Any], *, by_n: bool) -> None:
    """UsageError where a line that says nothing else would get several answers that are all the same.

    settings: of read_settings(). by_n: n is given by -n, else by --set.
    """
    try:
        refuse_equal_answers(line_defaults(settings, {}, raw=False).params)
    except RequestError as error:
        raise UsageError(f"{'-' if by_n else '--set: '}{error.message}: for example --temperature 0.8") from None


def _as_json(name: str, text: str) -> bytes:
    raw = text.encode()
    refuse_deep(raw, name)
    try:
        msgspec.json.decode(raw)
    except msgspec.DecodeError:
        return msgspec.json.encode(text)
    refuse_equal_keys(text)
    return raw


def line_defaults(
    settings: Mapping[str, Any], suggested: Mapping[str, Any], *, raw: bool, truncate_left: bool = False
) -> Defaults:
    """What holds for every line: `settings` of the command over what the model's generation_config.json suggests."""
    merged = {**suggested, **settings}
    others = {name: value for name, value in merged.items() if name not in ANSWER_FIELDS}
    return Defaults(params=SamplingParams(**read_params(merged)), raw=raw, truncate_left=truncate_left, **others)


@dataclass(frozen=True, slots=True)
class TextOption:
    """An option TEXT|@FILE; the line end that closes a file is not part of the text."""

    text: str
    name: str = ""  # of the file
    status: os.stat_result | None = None  # of the file; None: there is none

    @property
    def is_json(self) -> bool:
        return self.name.lower().endswith(".json")


def read_text_option(option: str, value: str | None, *, takes_input: bool = False) -> TextOption | None:
    """The text that an option gives; UsageError where its file cannot be read, or is too long. takes_input: lines
    are read from standard input, which is then no file for this."""
    if value is None or not value.startswith("@"):
        return None if value is None else TextOption(value)
    name = value[1:]
    if takes_input and _is_stdin(name):
        raise UsageError(f"{option}: {name} is standard input, from which the lines are read: give another file")
    try:
        with Path(name).open("rb") as file:
            text = read_whole(file, f"{option}: {name}").decode("utf-8-sig").removesuffix("\n").removesuffix("\r")
            return TextOption(text, name, os.fstat(file.fileno()))
    except OSError as error:
        if option == "--json-schema" and name.lstrip().startswith("{"):
            raise UsageError(f"{option} is {name[:60]}, wanted a file; inline: --set json_schema='{{...}}'") from None
        raise UsageError(f"{option}: cannot read {name}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{option}: {name} is not UTF-8 text") from None


def _is_stdin(name: str) -> bool:
    with suppress(OSError):  # what cannot be looked at is not read either
        return os.path.samestat(Path(name).stat(), os.fstat(STDIN))
    return False


def read_schema(file: TextOption) -> Any:
    """The schema in the file of --json-schema. UsageError where there is none."""
    raw = file.text.encode()
    try:
        refuse_deep(raw, "the schema")
        msgspec.json.decode(raw)
        refuse_equal_keys(file.text)
        return _read("json_schema", raw)
    except msgspec.DecodeError as error:
        raise UsageError(f"--json-schema: {file.name} is no JSON ({error})") from None
    except RequestError as error:
        raise UsageError(f"--json-schema: {file.name}: {error.message}") from None
