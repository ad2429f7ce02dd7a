"""`tinyvllm run`: what it does with the lines of a file (file_work.py is the way there)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

from tinyvllm_cli.engine.fingerprint import Answerer, Fingerprints
from tinyvllm_cli.file_work import work_through
from tinyvllm_cli.io.input import Input
from tinyvllm_cli.io.openai_answers import Stamp
from tinyvllm_cli.io.openai_lines import note_model
from tinyvllm_cli.io.prompts import Defaults, Item
from tinyvllm_cli.io.results import Encode, encoder
from tinyvllm_cli.io.resume import stamped
from tinyvllm_cli.io.rows import Rows, read_rows
from tinyvllm_cli.io.settings import TextOption, read_text_option
from tinyvllm_cli.io.source import open_source
from tinyvllm_cli.io.summary import Tally
from tinyvllm_cli.io.text_answers import encode_text
from tinyvllm_cli.job import Answering, Hold
from tinyvllm_cli.run_facts import answer_facts, answers_line, model_facts, prompts_line
from tinyvllm_cli.run_options import RunOptions
from tinyvllm_cli.run_resume import answerer

if TYPE_CHECKING:
    from tinyvllm_cli.load import LoadedModel, Prepared, TextSide
    from tinyvllm_cli.model.checkpoint import Checkpoint

# Options on which answers depend.
TELLING = (
    "model", "revision", "dtype", "kv_dtype", "max_model_len", "template", "raw", "truncate", "n", "max_tokens",
    "temperature", "stop", "choice", "json_schema", "seed", "set", "model_sampling",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class RunWork:
    """Every line gets an answer (work.Work)."""

    options: RunOptions
    settings: Mapping[str, Any]  # of RunOptions.settings()
    system: str | None
    rows: Rows | None
    tally: Tally = field(default_factory=Tally)
    telling: tuple[str, ...] = TELLING

    @property
    def seed(self) -> int:
        return self.options.seed

    def dry_run(self, input: Input) -> int:
        from tinyvllm_cli.dry_run import dry_run

        return dry_run(self.options, self.settings, input, self.system)

    def check(self, text: TextSide) -> None:
        self.options.check_form(self.settings, text.codec)

    def answerer(self, prepared: Prepared, date: datetime) -> Answerer:
        template = prepared.text.codec.template
        asked = date.isoformat() if template is not None and template.asks_date else None
        return answerer(prepared, system=self.system, seed=self.seed, date=asked)

    def requests(
        self, input: Input, text: TextSide, answers: Answerer, wanted: Callable[[int], bool] | None = None
    ) -> Iterator[Item]:
        items = input.requests(self._defaults(text.checkpoint), text.codec, wanted)
        return stamped(items, Fingerprints(answers))

    def encoder(self, model: str, date: datetime) -> Encode:
        return encode_text if self.options.format == "text" else encoder(Stamp(model, int(date.timestamp())))

    def engine(self, loaded: LoadedModel) -> Answering:
        return loaded.engine

    def noted(self, items: Iterator[Item], model: str, say: Callable[[str], None]) -> Iterator[Item]:
        return note_model(items, model, say)

    def start_lines(self, loaded: LoadedModel, input: Input, output: str) -> list[str]:
        options, params = self.options, self._defaults(loaded.checkpoint).params
        return [
            prompts_line(loaded, input.source, input.scan, raw=options.raw),
            answers_line(loaded, output, params, seed=options.seed, model_sampling=options.model_sampling),
        ]

    def facts(self, loaded: LoadedModel) -> dict[str, Any]:
        return model_facts(loaded) | answer_facts(loaded, self._defaults(loaded.checkpoint))

    def _defaults(self, checkpoint: Checkpoint) -> Defaults:
        return self.options.defaults(self.settings, checkpoint)


def run_file(options: RunOptions, *, origins: Mapping[str, str], command: list[str], hold: Hold = nullcontext) -> int:
    """Answer every line of a file; the exit code. TinyvllmError where the run cannot start or finish.

    Arguments as of work_through().
    """
    options.check()
    texts = _read_texts(options)
    settings = options.settings(texts["--json-schema"])
    used = {f"{name} file": text.status for name, text in texts.items() if text is not None and text.status}
    system = None if texts["--system"] is None else texts["--system"].text
    source = open_source(options.input)
    # A pipe stays open: closing it would wait for the thread that reads it.
    with closing(source.stream) if source.regular else nullcontext():
        rows = read_rows(source, texts["--template"], options.id, options.keep, raw=options.raw)
        if rows is not None or source.text_lines:
            options.check_alone(settings)
        work = RunWork(options, settings, system, rows)
        return work_through(work, source, used=used, origins=origins, command=command, hold=hold)


def _read_texts(options: RunOptions) -> dict[str, TextOption | None]:
    """By the options that give them."""
    schema = options.json_schema
    values = {
        "--system": options.system,
        "--template": options.template,
        "--json-schema": None if schema is None else f"@{schema}",
    }
    takes_input = options.input == "-"
    return {name: read_text_option(name, value, takes_input=takes_input) for name, value in values.items()}
