"""A conversation: its messages, how they change, and the request that asks for the next answer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tinyvllm_cli.chat.settings import Settings
from tinyvllm_cli.engine.sampling import canonical_request, request_seed, sample_seed
from tinyvllm_cli.errors import UsageError
from tinyvllm_cli.io.conversations import Stamp
from tinyvllm_cli.types import GREEDY_BELOW, Message, Request


class Session:
    """Messages, of which the first may be the system's. What cannot be done is a UsageError, and changes nothing.

    A turn begins with ask() or retry() and ends with answered() or take_back(). Answer number k of a turn, counted
    from 0, is answer number k of `n` to the same messages: /retry draws with the seed of the next one.
    """

    def __init__(self, settings: Settings, *, run_seed: int = 0, messages: Iterable[Message] = ()) -> None:
        self.settings = settings
        self.messages = tuple(messages)
        self.file: Path | None = None  # that was loaded, or written last, and holds this conversation
        self.files: dict[Path, Stamp] = {}  # that may be written over, as long as nobody else has
        self._run_seed = run_seed
        self._number = 0  # of requests
        self._retries: dict[int, int] = {}  # of each turn, by the number of messages before its answer
        self._complete: dict[str, Any] | None = None  # to what the last message is a whole answer
        self._before = (self.messages[:-1] if self.waits else self.messages, self._retries)

    @property
    def system(self) -> str | None:
        return self.messages[0].content if self._has_system else None

    @system.setter
    def system(self, text: str | None) -> None:
        head = () if text is None else (Message("system", text),)
        self.messages = (*head, *self.messages[self._has_system :])
        self._retries = {}  # places have moved, and other messages have answers of their own

    @property
    def _has_system(self) -> bool:
        return bool(self.messages) and self.messages[0].role == "system"

    @property
    def waits(self) -> bool:
        """The last message is the user's, and wants an answer."""
        return bool(self.messages) and self.messages[-1].role == "user"

    def ask(self, text: str) -> None:
        self._begin((*self.messages, Message("user", text)), retries=0)

    def retry(self) -> None:
        """Have the last turn answered again."""
        asked = self.messages[: self._last_user() + 1]
        if len(asked) == len(self.messages):
            raise UsageError("there is no answer that could be drawn again")
        greedy = self.settings.defaults.params.temperature < GREEDY_BELOW
        if greedy and canonical_request(self._request(asked)) == self._complete:
            raise UsageError("at temperature 0 the answer would be the same: /set temperature 0.7 and the like vary it")
        self._begin(asked, retries=self._retries.get(len(asked), 0) + 1)

    def _begin(self, messages: tuple[Message, ...], *, retries: int) -> None:
        self._before = (self.messages, self._retries)
        self.messages, self._retries = messages, {**self._retries, len(messages): retries}

    def request(self) -> Request:
        """For the answer to the messages as they stand."""
        self._number += 1
        request = self._request(self.messages)
        seed = sample_seed(request_seed(request, self._run_seed), self._retries.get(len(self.messages), 0))
        return replace(request, params=replace(request.params, seed=seed))

    def _request(self, messages: tuple[Message, ...]) -> Request:
        defaults = self.settings.defaults
        return Request(
            request_id=self._number,
            custom_id=f"turn-{self._number}",
            has_own_id=False,
            messages=messages,
            chat_template_kwargs=defaults.chat_template_kwargs,
            params=defaults.params,
        )

    def answered(self, text: str, *, whole: bool = True) -> None:
        """whole: not stopped before its end."""
        self._complete = canonical_request(self._request(self.messages)) if whole else None
        self.messages = (*self.messages, Message("assistant", text))

    def take_back(self) -> None:
        """There is no answer: all is as it was before ask() or retry()."""
        self.messages, self._retries = self._before

    def undo(self) -> str:
        """Take back the last turn with its answer; what the user said."""
        place = self._last_user()
        said = self.messages[place].content
        self.messages = self.messages[:place]
        return said

    def keep_in(self, file: Path, stamp: Stamp) -> None:
        """A file that holds the messages as they stand, and may be written over."""
        self.file = file
        self.files[file] = stamp

    def clear(self) -> None:
        """A new conversation with the same system message."""
        self.messages = self.messages[: self._has_system]
        self._retries = {}
        self.file = None

    def _last_user(self) -> int:
        for place in range(len(self.messages) - 1, -1, -1):
            if self.messages[place].role == "user":
                return place
        raise UsageError("there is no turn yet")

    @property
    def turns(self) -> int:
        return len(_starts(self.messages))

    def without(self, count: int) -> tuple[Message, ...]:
        """The messages without so many of the oldest turns; the system's stays."""
        return _without(self.messages, count)

    def drop(self, count: int) -> None:
        """Leave out so many of the oldest turns, which are not the last, and stay in the file."""
        self.file = None
        self._before = (_without(self._before[0], count), {})
        self.messages, self._retries = self.without(count), {}


def _starts(messages: tuple[Message, ...]) -> list[int]:
    """The places at which the turns begin, each with the user's messages that stand together."""
    roles = ["", *(message.role for message in messages)]
    return [i for i in range(len(messages)) if roles[i + 1] == "user" != roles[i]]


def _without(messages: tuple[Message, ...], count: int) -> tuple[Message, ...]:
    head = messages[: bool(messages) and messages[0].role == "system"]
    return (*head, *messages[[*_starts(messages), len(messages)][count] :])
