"""Conversations of tests: a tiny chat model in this process, and sessions with it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny import CHAT_TEMPLATE, make_tiny_model

from tinyvllm_cli.chat.answering import answer
from tinyvllm_cli.chat.commands import run_command
from tinyvllm_cli.chat.session import Session
from tinyvllm_cli.chat.settings import Settings
from tinyvllm_cli.config import EngineOptions
from tinyvllm_cli.errors import UsageError
from tinyvllm_cli.io.conversations import Stamp
from tinyvllm_cli.load import LoadedModel, open_engine
from tinyvllm_cli.types import Completion, Message, Request


def chat_model(folder: Path, **config: Any) -> Path:
    return make_tiny_model(folder, chat_template=CHAT_TEMPLATE, **config)


def load(model: Path, **options: Any) -> LoadedModel:
    return open_engine(str(model), backend="cpu", config=EngineOptions(slots=1, **options), report=print)


def session(loaded: LoadedModel, *messages: Message, run_seed: int = 0, **fields: Any) -> Session:
    """fields: of Settings, over a short answer."""
    settings = Settings({"max_tokens": 8, "ignore_eos": True, **fields}, {}, loaded.codec)
    return Session(settings, run_seed=run_seed, messages=messages)


def talk(loaded: LoadedModel, session: Session, texts: Iterable[str]) -> list[str]:
    """The answers to these turns."""
    answers = []
    for text in texts:
        session.ask(text)
        answers.append(answered(loaded, session))
    return answers


def answered(loaded: LoadedModel, session: Session) -> str:
    """The text of the answer that the session waits for."""
    completion = complete(loaded, session.request())
    text = completion.choices[0].text
    session.answered(text)
    return text


def complete(loaded: LoadedModel, request: Request) -> Completion:
    completion = answer(loaded.engine, request, Nowhere).completion
    assert completion is not None
    return completion


def samples(loaded: LoadedModel, request: Request, n: int) -> list[str]:
    """The texts of n answers to it."""
    found = complete(loaded, replace(request, request_id=10**6, params=replace(request.params, n=n)))
    return [choice.text for choice in found.choices]


def do(session: Session, line: str) -> tuple[str, list[str]]:
    """What comes after a command, and what it says."""
    said: list[str] = []
    return run_command(line, session, said.append), said


def stamp(path: str | Path) -> Stamp:
    status = Path(path).stat()
    return Stamp(status.st_ino, status.st_mtime_ns, status.st_size)


def refused(session: Session, line: str) -> str:
    """Why; the session stays as it was."""
    before, settings = session.messages, session.settings.describe()
    with pytest.raises(UsageError) as caught:
        do(session, line)
    assert (session.messages, session.settings.describe()) == (before, settings)
    return str(caught.value)


class Nowhere:
    """A display that shows nothing."""

    def push(self, text: str) -> None: ...

    def working(self, made: int) -> None: ...

    def moved(self) -> None: ...

    def close(self) -> None: ...
