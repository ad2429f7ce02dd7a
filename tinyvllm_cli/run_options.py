"""The options of `tinyvllm run` by their names, and which of them do not go together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from tinyvllm_cli.errors import UsageError
from tinyvllm_cli.file_options import FileOptions
from tinyvllm_cli.io.prompts import Defaults
from tinyvllm_cli.io.settings import (
    TextOption,
    check_equal_answers,
    check_form,
    line_defaults,
    read_schema,
    read_settings,
)

if TYPE_CHECKING:
    from tinyvllm_cli.model.checkpoint import Checkpoint
    from tinyvllm_cli.text.codec import TextCodec

Format = Literal["jsonl", "text"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions(FileOptions):
    """None: not given."""

    template: str | None = None
    system: str | None = None
    raw: bool = False
    truncate: str | None = None
    id: str | None = None
    keep: tuple[str, ...] = ()
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    stop: tuple[str, ...] = ()
    choice: tuple[str, ...] = ()
    json_schema: str | None = None
    seed: int = 0
    set: tuple[str, ...] = ()
    model_sampling: bool = False
    format: Format = "jsonl"

    def check(self) -> None:
        """UsageError where two of them exclude each other."""
        if self.raw and self.system is not None:
            raise UsageError("--system needs the chat template that --raw turns off: give one of them")
        if self.resume and self.format == "text":
            raise UsageError("--resume needs JSON lines, which name their requests: leave out --format text")
        FileOptions.check(self)

    def settings(self, schema: TextOption | None) -> dict[str, Any]:
        """The fields of a line that the command sets. schema: the file of json_schema. UsageError for a bad one."""
        read_settings({"seed": self.seed}, ())  # only to check it: the run's seed is no field of a line
        named = {
            "n": self.n,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "stop": self.stop or None,
            "choice": self.choice or None,
            "json_schema": None if schema is None else read_schema(schema),
        }
        return read_settings(named, self.set)

    def check_alone(self, settings: Mapping[str, Any]) -> None:
        """UsageError where no line can be answered that has no answer fields. settings: of settings()."""
        if "temperature" in settings or not self.model_sampling:  # else it is the model's, which is not known yet
            check_equal_answers(settings, by_n=self.n is not None)

    def check_form(self, settings: Mapping[str, Any], codec: TextCodec) -> None:
        """As of io.settings.check_form(). settings: of settings()."""
        check_form(settings, codec, schema_file=self.json_schema, by_choice=bool(self.choice))

    def defaults(self, settings: Mapping[str, Any], checkpoint: Checkpoint) -> Defaults:
        """What holds for a line that says nothing else. settings: of settings()."""
        sampling = checkpoint.generation.sampling if self.model_sampling else {}
        return line_defaults(settings, sampling, raw=self.raw, truncate_left=self.truncate is not None)

    @property
    def in_order(self) -> bool:
        """Lines of text do not say which request they belong to: their place does."""
        return self.ordered or not self.names_requests

    @property
    def names_requests(self) -> bool:
        return self.format != "text"
