"""Conversations in files: one line {"messages": [...]}, which `tinyvllm run` reads as it stands."""

from __future__ import annotations

import os
import shlex
import stat
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

import msgspec

from tinyvllm_cli.errors import RequestError, UsageError
from tinyvllm_cli.io.fields import read_fields
from tinyvllm_cli.io.messages import read_messages
from tinyvllm_cli.io.prompts import read_lines, split_fields
from tinyvllm_cli.io.results import json_line
from tinyvllm_cli.io.source import read_whole
from tinyvllm_cli.types import Message

WANTED = 'wanted one line {"messages": [...]}'
OWNER_ONLY = 0o600  # of a new file: what is said to a model may be private


class Stamp(NamedTuple):
    """Another one where somebody has written to a file, or put another one in its place."""

    inode: int
    mtime_ns: int
    size: int


def read_conversation(path: Path) -> tuple[tuple[Message, ...], Stamp | None]:
    """The messages in a file, checked like those of a line, and its stamp, None where it is no regular file.

    UsageError that names the file and the place in it.
    """
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            text = read_whole(file, str(path))
    except UsageError:
        raise
    except (OSError, ValueError) as error:
        raise _failed("read", path, error) from None
    return _messages(path, text), _stamp(status) if stat.S_ISREG(status.st_mode) else None


def _messages(path: Path, text: bytes) -> tuple[Message, ...]:
    lines = list(read_lines(BytesIO(text)))
    if len(lines) != 1:
        hint = f": `jq -c . {shlex.quote(str(path))}` makes one of it" if lines and _is_json(text) else ""
        raise UsageError(f"{path} has {len(lines) or 'no'} lines, {WANTED}{hint}")
    try:
        values = read_fields(split_fields(lines[0].text))
        messages = read_messages(values.pop("messages", ()))
    except RequestError as error:
        raise UsageError(f"{path}, line {lines[0].number}: {error.message}") from None
    if not messages or values:
        found = f"{', '.join(values)} beside the messages" if messages else "no messages"
        raise UsageError(f"{path}, line {lines[0].number}: found {found}, {WANTED}")
    return messages


def _is_json(text: bytes) -> bool:
    with suppress(msgspec.DecodeError, RecursionError):
        msgspec.json.decode(text)
        return True
    return False


def write_conversation(path: Path, messages: Sequence[Message], over: Stamp | None = None) -> Stamp:
    """All of it or nothing; the stamp of the file. over: of the file that it may take the place of, whose mode it gets.

    UsageError where that cannot be, or another file is there.
    """
    line = json_line({"messages": [{"role": message.role, "content": message.content} for message in messages]})
    try:
        mode = _mode_of(path, over)
        fd, name = tempfile.mkstemp(prefix=".tinyvllm-", dir=path.parent)  # its own name may have no room for more
        temporary = Path(name)
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(line)
                file.flush()
                os.fchmod(fd, mode)
                stamp = _stamp(os.fstat(fd))
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except UsageError:
        raise
    except (OSError, ValueError) as error:
        raise _failed("write", path, error) from None
    return stamp


def _mode_of(path: Path, over: Stamp | None) -> int:
    """That a file in this place is to have. UsageError where a file is there that is not `over`."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return OWNER_ONLY
    if not stat.S_ISREG(status.st_mode):
        raise UsageError(f"{path} exists, and is no regular file: give another name")
    if over is None:
        raise UsageError(f"{path} exists, and is not of this session: give another name")
    if over != _stamp(status):
        raise UsageError(f"{path} was changed since: give another name")
    return stat.S_IMODE(status.st_mode)


def _stamp(status: os.stat_result) -> Stamp:
    return Stamp(status.st_ino, status.st_mtime_ns, status.st_size)


def _failed(what: str, path: Path, error: OSError | ValueError) -> UsageError:
    """ValueError: no file can have such a name."""
    return UsageError(f"cannot {what} {path}: {getattr(error, 'strerror', None) or error}")
