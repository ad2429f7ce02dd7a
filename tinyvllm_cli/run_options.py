"""The options of `tinyvllm run` by their names, and which of them do not go together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from tinyvllm_cli.errors import UsageError
from tinyvllm_cli.io.prompts import Defaults
from tinyvllm_cli.io.results import Existing
from tinyvllm_cli.io.settings import line_defaults, read_settings
from tinyvllm_cli.machine_options import MachineOptions

if TYPE_CHECKING:
    from tinyvllm_cli.model.checkpoint import Checkpoint

Format = Literal["jsonl", "text"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions(MachineOptions):
    """None: not given."""

    input: str
    model: str
    revision: str | None = None
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
    seed: int = 0
    set: tuple[str, ...] = ()
    model_sampling: bool = False
    output: str = "-"
    resume: bool = False
    overwrite: bool = False
    ordered: bool = False
    format: Format = "jsonl"
    record: str | None = None
    quiet: bool = False
    limit: int | None = None
    shard: str | None = None
    dry_run: bool = False

    def check(self) -> None:
        """UsageError where two of them exclude each other."""
        if self.raw and self.system is not None:
            raise UsageError("--system needs the chat template that --raw turns off: give one of them")
        if self.resume and self.overwrite:
            raise UsageError("--resume keeps the answers that are there and --overwrite does not: give one of them")
        if self.resume and self.format == "text":
            raise UsageError("--resume needs JSON lines, which name their requests: leave out --format text")
        if self.resume and self.output == "-":
            raise UsageError("--resume goes on with a file, and the output is standard output: give -o FILE")

    def settings(self) -> dict[str, Any]:
        """The fields of a line that the command sets. UsageError for a bad one."""
        read_settings({"seed": self.seed}, ())  # only to check it: the run's seed is no field of a line
        named = {"n": self.n, "max_tokens": self.max_tokens, "temperature": self.temperature}
        return read_settings({**named, "stop": self.stop or None}, self.set)

    def defaults(self, settings: Mapping[str, Any], checkpoint: Checkpoint) -> Defaults:
        """What holds for a line that says nothing else. settings: of settings()."""
        sampling = checkpoint.generation.sampling if self.model_sampling else {}
        return line_defaults(settings, sampling, raw=self.raw, truncate_left=self.truncate is not None)

    @property
    def existing(self) -> Existing:
        """What becomes of an output that holds something."""
        return "resume" if self.resume else "overwrite" if self.overwrite else "refuse"

    @property
    def scope(self) -> str:
        """What the requests of this run are called beside those of other runs."""
        parts = [f"--{name}" for name in ("limit", "shard") if getattr(self, name) is not None]
        return f"this input with {' and '.join(parts)}" if parts else "this input"

    @property
    def in_order(self) -> bool:
        """Lines of text do not say which request they belong to: their place does."""
        return self.ordered or self.format == "text"
