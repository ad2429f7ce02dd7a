"""`tinyvllm score`: what it does with the lines of a file (file_work.py is the way there)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from tinyvllm_cli.engine.fingerprint import Answerer, ScoreFingerprints
from tinyvllm_cli.engine.scoring import ScoringEngine
from tinyvllm_cli.errors import UsageError
from tinyvllm_cli.file_options import FileOptions
from tinyvllm_cli.file_work import work_through
from tinyvllm_cli.io.input import Input
from tinyvllm_cli.io.prompts import Item
from tinyvllm_cli.io.results import Encode
from tinyvllm_cli.io.resume import stamped
from tinyvllm_cli.io.score_answers import ScoreTally, encode_scores
from tinyvllm_cli.io.source import open_source
from tinyvllm_cli.job import Answering, Hold
from tinyvllm_cli.run_facts import input_name, model_facts
from tinyvllm_cli.run_resume import answerer

if TYPE_CHECKING:
    from tinyvllm_cli.load import LoadedModel, Prepared, TextSide


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreOptions(FileOptions):
    """Those of `tinyvllm score` by their names."""

    tokens: bool = False


@dataclass(frozen=True, slots=True)
class ScoreWork:
    """Every line gets its scores (work.Work)."""

    options: ScoreOptions
    tally: ScoreTally = field(default_factory=ScoreTally)
    telling: tuple[str, ...] = ("model", "revision", "dtype", "kv_dtype", "max_model_len", "tokens")
    rows: None = None
    system: None = None
    seed: int = 0  # nothing is drawn

    def dry_run(self, input: Input) -> int:
        from tinyvllm_cli.dry_run import dry_run_scores

        return dry_run_scores(self.options, input)

    def check(self, text: TextSide) -> None:
        """No option of theirs can be wrong."""

    def answerer(self, prepared: Prepared, date: datetime) -> Answerer:  # noqa: ARG002
        return answerer(prepared, system=None, seed=self.seed, date=None)

    def requests(
        self,
        input: Input,
        text: TextSide,  # noqa: ARG002
        answers: Answerer,
        wanted: Callable[[int], bool] | None = None,
    ) -> Iterator[Item]:
        return stamped(input.texts(wanted), ScoreFingerprints(answers, tokens=self.options.tokens))

    def encoder(self, model: str, date: datetime) -> Encode:  # noqa: ARG002
        return partial(encode_scores, tokens=self.options.tokens)

    def engine(self, loaded: LoadedModel) -> Answering:
        return ScoringEngine(loaded.backend, loaded.codec, prefix_cache=loaded.config.prefix_cache)

    def noted(self, items: Iterator[Item], model: str, say: Callable[[str], None]) -> Iterator[Item]:  # noqa: ARG002
        return items

    def start_lines(self, loaded: LoadedModel, input: Input, output: str) -> list[str]:
        tokenizer = loaded.codec.tokenizer
        first = (
            f"{tokenizer.bos_token} is put in front" if tokenizer.adds_bos else "no BOS, so no score for a first token"
        )
        more = "; with each token's logprob" if self.options.tokens else ""
        return [f"texts:   {input_name(input.source, input.scan)}; {first}", f"scores:  {output}{more}"]

    def facts(self, loaded: LoadedModel) -> dict[str, Any]:
        return model_facts(loaded)


def score_file(
    options: ScoreOptions, *, origins: Mapping[str, str], command: list[str], hold: Hold = nullcontext
) -> int:
    """Score every line of a file; the exit code. TinyvllmError where the run cannot start or finish.

    Arguments as of work_through().
    """
    options.check()
    source = open_source(options.input)
    with closing(source.stream) if source.regular else nullcontext():  # closing a pipe would wait for its reader
        if source.suffix == ".csv":
            raise UsageError(f"the input {source.name} is a .csv file, wanted .jsonl, or .txt with one text a line")
        return work_through(ScoreWork(options), source, used={}, origins=origins, command=command, hold=hold)
