"""How the turns of a conversation are answered: what the model suggests, the options of the command, and /set."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from tinyvllm_cli.errors import RequestError, UsageError
from tinyvllm_cli.io.fields import FIELDS, FORM_FIELDS, shown
from tinyvllm_cli.io.prompts import Defaults
from tinyvllm_cli.io.settings import line_defaults, read_settings
from tinyvllm_cli.types import DEFAULT_MAX_TOKENS

if TYPE_CHECKING:
    from tinyvllm_cli.text.codec import TextCodec

TEMPERATURE = 0.7  # where the model suggests none: a conversation is no measurement
UNFIT = {
    "n": "n is not for a chat, where a turn has one answer: `tinyvllm run -n` draws several",
    "logprobs": "logprobs is not for a chat, which shows none: `tinyvllm run` writes them",
    "continue_final_message": "continue_final_message is not for a chat, where the last message is always yours",
}


def read_chat_settings(options: Mapping[str, Any], assignments: Iterable[str]) -> dict[str, Any]:
    """As read_settings(). UsageError also for what would change nothing in a chat, or leave it without answers."""
    try:
        values = read_settings(options, assignments)
    except UsageError as error:
        raise UsageError(re.sub(r"(max.tokens is .*, wanted an integer >= )0$", r"\g<1>1", str(error))) from None
    for name in values:
        if name in UNFIT:
            raise UsageError(UNFIT[name])
    if values.get("max_tokens") == 0:
        raise UsageError("max_tokens is 0, wanted an integer >= 1: a chat is there for its answers")
    return values


class Settings:
    """The fields in force, by their names in a line."""

    def __init__(self, values: Mapping[str, Any], suggested: Mapping[str, Any], codec: TextCodec) -> None:
        """values: of read_settings(); suggested: by the model, whose codec is asked whether a form can be had."""
        self._values = dict(values)
        self._start = {"temperature": TEMPERATURE, "max_tokens": DEFAULT_MAX_TOKENS, **suggested}
        self._codec = codec
        self.defaults = self._read(self._values)

    def assign(self, name: str, text: str) -> None:
        """VALUE as of --set; null takes back what was set. UsageError in the words of --set, and nothing is changed."""
        values = {other: value for other, value in self._values.items() if other != name}
        if text != "null" or name not in FIELDS:
            try:
                given = read_chat_settings({}, [f"{name}={text}"])
            except UsageError as error:
                raise UsageError(str(error).removeprefix("--set: ")) from None
            if name in FORM_FIELDS:  # an answer has one form: the new one
                values = {other: value for other, value in values.items() if other not in FORM_FIELDS}
            values |= given
        self.defaults = self._read(values)
        self._values = values

    def describe(self) -> str:
        """What is in force, on one line."""
        merged = self._start | self._values
        return ", ".join(f"{name} {shown(merged[name])}" for name in FIELDS if name in merged)

    def _read(self, values: Mapping[str, Any]) -> Defaults:
        defaults = line_defaults(values, self._start, raw=False)
        if defaults.params.constraint is not None:
            try:
                self._codec.grammars.check(defaults.params.constraint)
            except RequestError as error:
                raise UsageError(error.message) from None
        return defaults
