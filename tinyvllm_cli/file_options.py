"""The options of the commands that go through the lines of a file, and which of them do not go together."""

from __future__ import annotations

from dataclasses import dataclass

from tinyvllm_cli.errors import UsageError
from tinyvllm_cli.io.results import Existing
from tinyvllm_cli.machine_options import MachineOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class FileOptions(MachineOptions):
    """By their names; None: not given."""

    input: str
    model: str
    revision: str | None = None
    output: str = "-"
    resume: bool = False
    overwrite: bool = False
    ordered: bool = False
    record: str | None = None
    quiet: bool = False
    limit: int | None = None
    shard: str | None = None
    dry_run: bool = False

    def check(self) -> None:
        """UsageError where two of them exclude each other."""
        if self.resume and self.overwrite:
            raise UsageError("--resume keeps the answers that are there and --overwrite does not: give one of them")
        if self.resume and self.output == "-":
            raise UsageError("--resume goes on with a file, and the output is standard output: give -o FILE")

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
        """Whether the lines leave in the order of the input."""
        return self.ordered

    @property
    def names_requests(self) -> bool:
        """Whether an output line says which request it belongs to, and what went wrong with it."""
        return True
