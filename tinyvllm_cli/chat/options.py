"""The options of `tinyvllm chat` by their names, and the prompt that the command line gives."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tinyvllm_cli.chat.notes import note
from tinyvllm_cli.chat.settings import read_chat_settings
from tinyvllm_cli.config import EngineOptions
from tinyvllm_cli.errors import UsageError
from tinyvllm_cli.io.settings import TextOption, check_form, read_schema, read_settings
from tinyvllm_cli.io.source import STDIN, open_stdin, read_whole
from tinyvllm_cli.machine_options import MachineOptions

if TYPE_CHECKING:
    from tinyvllm_cli.text.codec import TextCodec


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions(MachineOptions):
    """None: not given. words: the prompt, and - for standard input."""

    model: str
    words: tuple[str, ...] = ()
    revision: str | None = None
    system: str | None = None
    load: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    stop: tuple[str, ...] = ()
    choice: tuple[str, ...] = ()
    json_schema: str | None = None
    seed: int = 0
    set: tuple[str, ...] = ()
    plain: bool = False

    def check(self) -> None:
        """UsageError where two of them exclude each other, or the words are no prompt."""
        if self.words[:1] == ("",):
            raise UsageError("the prompt is empty")
        if len(self.words) > 2 or (len(self.words) == 2 and self.words[1] != "-"):
            prompt = shlex.quote(" ".join(word for word in self.words if word != "-"))
            last = " -" * ("-" in self.words)
            raise UsageError(f"found {len(self.words)} words, wanted the prompt as one: tinyvllm chat {prompt}{last}")

    @property
    def takes_input(self) -> bool:
        """Standard input is read."""
        return not self.words or "-" in self.words

    def prompt(self) -> str | None:
        """What the words ask, with what stands on standard input where they say so; None: they ask nothing."""
        if not self.words:
            return None
        texts = [word for word in self.words if word != "-"]
        return "\n\n".join(texts if texts == [*self.words] else [*texts, _read_input()])

    def engine_options(self, *, seed: int = 0) -> EngineOptions:
        """For one answer at a time."""
        return replace(MachineOptions.engine_options(self, seed=seed), slots=1)

    def settings(self, schema: TextOption | None) -> dict[str, Any]:
        """The fields of a line that the command sets. schema: the file of json_schema. UsageError for a bad one."""
        read_settings({"seed": self.seed}, ())  # only to check it: it is the run's, and no field of a line
        named = {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "stop": self.stop or None,
            "choice": self.choice or None,
            "json_schema": None if schema is None else read_schema(schema),
        }
        return read_chat_settings(named, self.set)

    def check_form(self, settings: Mapping[str, Any], codec: TextCodec) -> None:
        """As of io.settings.check_form()."""
        check_form(settings, codec, schema_file=self.json_schema, by_choice=bool(self.choice))


def _read_input() -> str:
    """All of standard input. UsageError where there is nothing, no text, or too much of it."""
    if os.isatty(STDIN):
        note("standard input is read for the prompt: ^D on an empty line ends it")
    try:
        raw = read_whole(open_stdin("text").stream, "standard input")
        text = raw.decode("utf-8-sig").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        wrong = error.object[error.start]
        raise UsageError(
            f"byte {error.start + 1} of standard input is not UTF-8 (0x{wrong:02x}), wanted UTF-8 text"
        ) from None
    if not text:
        raise UsageError("standard input is empty, wanted text for the prompt")
    return text
