"""Conversations in files: one line {"messages": [...]}, which `tinyvllm run` reads as it stands."""

from __future__ import annotations

import os
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

from tinyvllm_cli.errors import RequestError, UsageError
from tinyvllm_cli.io.fields import read_fields
from tinyvllm_cli.io.messages import read_messages
from tinyvllm_cli.io.prompts import read_lines, split_fields
from tinyvllm_cli.io.results import json_line
from tinyvllm_cli.types import Message

WANTED = 'wanted one line {"messages": [...]}'


def read_conversation(path: Path) -> tuple[Message, ...]:
    """The messages in a file, checked like those of a line. UsageError that names the file and the place in it."""
    try:
        lines = list(read_lines(BytesIO(path.read_bytes())))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    if len(lines) != 1:
        raise UsageError(f"{path} has {len(lines) or 'no'} lines, {WANTED}")
    try:
        values = read_fields(split_fields(lines[0].text))
        messages = read_messages(values.pop("messages", ()))
    except RequestError as error:
        raise UsageError(f"{path}, line {lines[0].number}: {error.message}") from None
    if not messages or values:
        found = f"{', '.join(values)} beside the messages" if messages else "no messages"
        raise UsageError(f"{path}, line {lines[0].number}: found {found}, {WANTED}")
    return messages


def write_conversation(path: Path, messages: Sequence[Message]) -> None:
    """All of it or nothing, in the place of what is there. UsageError where that cannot be."""
    line = json_line({"messages": [{"role": message.role, "content": message.content} for message in messages]})
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        try:
            temporary.write_bytes(line)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None
