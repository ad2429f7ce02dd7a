"""What a chat keeps in the user's state folder: what was typed, and a conversation that an error ends."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import platformdirs
from prompt_toolkit.history import FileHistory

from tinyvllm_cli.io.conversations import write_conversation
from tinyvllm_cli.types import Message

HISTORY = "chat_history"


def keep(messages: Iterable[Message]) -> Path:
    """Where they are kept. OSError, UsageError."""
    path = _make_folder() / f"chat-{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}.jsonl"
    write_conversation(path, tuple(messages))
    return path


def _folder() -> Path:
    return Path(platformdirs.user_state_dir("tinyvllm"))


def _make_folder() -> Path:
    folder = _folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


class History(FileHistory):
    """What was typed, in a file that only the user reads. Where that cannot be, the session has a history of its own,
    and the user is told once."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say: Callable[[str], None] | None = say
        super().__init__(str(_folder() / HISTORY))
        with self._told():
            _make_folder()
            self._check()

    def load_history_strings(self) -> Iterable[str]:
        with self._told():
            self._check()
            return list(super().load_history_strings())
        return []

    def store_string(self, string: str) -> None:
        with self._told():
            self._check()
            super().store_string(string)

    def _check(self) -> None:
        """OSError where it is no regular file: to open a pipe would wait for its other end, for ever."""
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        fd = os.open(self.filename, flags, 0o600)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise OSError(0, "it is no regular file")
        finally:
            os.close(fd)

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if self._say is not None:
                self._say(f"note: what you type is not kept for later: cannot use {self.filename!s}: {error.strerror}")
            self._say = None
