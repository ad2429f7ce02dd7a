"""The answer options of the command, checked like the fields of a line: what holds where a line says nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from tinyvllm_cli.errors import RequestError, UsageError
from tinyvllm_cli.io.fields import ANSWER_FIELDS, FIELDS, PROMPT_FIELDS, read_field, unknown_field
from tinyvllm_cli.io.prompts import Defaults
from tinyvllm_cli.io.strict import refuse_deep, refuse_equal_keys
from tinyvllm_cli.types import SamplingParams


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
    return {name: value for name, value in values.items() if FIELDS[name].neutral is None}


def _read_option(name: str, value: Any) -> Any:
    try:
        return read_field(name, json.dumps(value).encode())
    except RequestError as error:
        option = f"--{name.replace('_', '-')}" if len(name) > 1 else f"-{name}"
        raise UsageError(option + error.message.removeprefix(name)) from None


def _read_assignment(name: str, text: str) -> Any:
    """VALUE is JSON, else a string."""
    try:
        if name not in FIELDS:
            raise unknown_field(name, FIELDS)
        if FIELDS[name].neutral is None and name not in ANSWER_FIELDS | PROMPT_FIELDS:
            raise RequestError("invalid_value", f"{name} belongs to one line and cannot be set for all", name)
        return read_field(name, _as_json(name, text))
    except RequestError as error:
        raise UsageError(f"--set: {error.message}") from None


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
    answer = {name: value for name, value in merged.items() if name in ANSWER_FIELDS}
    others = {name: value for name, value in merged.items() if name not in ANSWER_FIELDS}
    return Defaults(params=SamplingParams(**answer), raw=raw, truncate_left=truncate_left, **others)


@dataclass(frozen=True, slots=True)
class TextOption:
    """An option TEXT|@FILE; the line end that closes a file is not part of the text."""

    text: str
    name: str = ""  # of the file
    status: os.stat_result | None = None  # of the file; None: there is none

    @property
    def is_json(self) -> bool:
        return self.name.lower().endswith(".json")


def read_text_option(option: str, value: str | None) -> TextOption | None:
    """The text that an option gives; UsageError where its file cannot be read."""
    if value is None or not value.startswith("@"):
        return None if value is None else TextOption(value)
    name = value[1:]
    try:
        with Path(name).open("rb") as file:
            text = file.read().decode("utf-8-sig").removesuffix("\n").removesuffix("\r")
            return TextOption(text, name, os.fstat(file.fileno()))
    except OSError as error:
        raise UsageError(f"{option}: cannot read {name}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{option}: {name} is not UTF-8 text") from None
