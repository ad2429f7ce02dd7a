"""What a command does with the lines of a file: all in which such commands differ (file_work.py has the rest)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Any, Protocol

from tinyvllm_cli.engine.fingerprint import Answerer
from tinyvllm_cli.file_options import FileOptions
from tinyvllm_cli.io.input import Input
from tinyvllm_cli.io.prompts import Item
from tinyvllm_cli.io.results import Encode
from tinyvllm_cli.io.rows import Rows
from tinyvllm_cli.io.summary import Tally
from tinyvllm_cli.job import Answering

if TYPE_CHECKING:
    from tinyvllm_cli.load import LoadedModel, Prepared, TextSide


class Work(Protocol):
    """What it answers with, and how a line becomes a request, a request an answer, and an answer a line."""

    @property
    def options(self) -> FileOptions: ...

    @property
    def telling(self) -> tuple[str, ...]:
        """Names of the options on which answers depend."""
        ...

    @property
    def rows(self) -> Rows | None: ...

    @property
    def system(self) -> str | None:
        """System message for the text side of the model."""
        ...

    @property
    def seed(self) -> int:
        """Of the run."""
        ...

    @property
    def tally(self) -> Tally:
        """Counts what is finished; its own, and empty at the start."""
        ...

    def dry_run(self, input: Input) -> int:
        """Check every line without weights; the exit code."""
        ...

    def check(self, text: TextSide) -> None:
        """UsageError where the options ask for what this model's text side cannot do."""
        ...

    def answerer(self, prepared: Prepared, date: datetime) -> Answerer: ...

    def requests(
        self, input: Input, text: TextSide, answers: Answerer, wanted: Callable[[int], bool] | None = None
    ) -> Iterator[Item]:
        """Those of an input, each with its fingerprint; a line that cannot be one is a Completion. wanted: as of
        Input.requests()."""
        ...

    def encoder(self, model: str, date: datetime) -> Encode: ...

    def engine(self, loaded: LoadedModel) -> Answering: ...

    def noted(self, items: Iterator[Item], model: str, say: Callable[[str], None]) -> Iterator[Item]:
        """The same items; what there is to be said of them is said."""
        ...

    def start_lines(self, loaded: LoadedModel, input: Input, output: str) -> list[str]:
        """For people, after the line about the model."""
        ...

    def facts(self, loaded: LoadedModel) -> dict[str, Any]:
        """For the record: what is in force."""
        ...
