"""The answer options of the command, checked like the fields of a line: what holds where a line says nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from tinyvllm_cli.errors import RequestError, UsageError
from tinyvllm_cli.io.fields import ANSWER_FIELDS, FIELDS, read_field, read_setting
from tinyvllm_cli.io.prompts import Defaults
from tinyvllm_cli.types import SamplingParams

T = TypeVar("T")


def read_settings(options: Mapping[str, Any], assignments: Iterable[str]) -> dict[str, Any]:
    """The fields that the command sets: `options` by their names in a line (None: not given), then --set NAME=VALUE.

    UsageError, in the words of a line's error.
    """
    values: dict[str, Any] = {}
    for name, value in options.items():
        if value is not None:
            values[name] = _checked(f"--{name.replace('_', '-')}", read_field, name, json.dumps(value).encode())
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals:
            raise UsageError(f"--set {assignment}: wanted NAME=VALUE, for example --set top_p=0.9")
        if name in values:
            raise UsageError(f"--set {assignment}: {name} is given twice")
        values[name] = _checked("--set", read_setting, name, text)
    return {name: value for name, value in values.items() if FIELDS[name].neutral is None}


def _checked(option: str, read: Callable[[str, T], Any], name: str, value: T) -> Any:
    try:
        return read(name, value)
    except RequestError as error:
        raise UsageError(f"{option}: {error.message}") from None


def line_defaults(settings: Mapping[str, Any], suggested: Mapping[str, Any], *, raw: bool) -> Defaults:
    """What holds for every line: `settings` of the command over what the model's generation_config.json suggests."""
    merged = {**suggested, **settings}
    answer = {name: value for name, value in merged.items() if name in ANSWER_FIELDS}
    others = {name: value for name, value in merged.items() if name not in ANSWER_FIELDS}
    return Defaults(params=SamplingParams(**answer), raw=raw, **others)


def read_system(value: str | None) -> str | None:
    """The text of --system TEXT|@FILE; the line end that closes a file is not part of it."""
    if value is None or not value.startswith("@"):
        return value
    try:
        return Path(value[1:]).read_bytes().decode().removesuffix("\n").removesuffix("\r")
    except OSError as error:
        raise UsageError(f"--system: cannot read {value[1:]}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"--system: {value[1:]} is not UTF-8 text") from None
