"""`tinyvllm run` from its options to its exit code: cheap checks first, then the model, then the job."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator, Mapping
from contextlib import closing, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinyvllm_cli.errors import EXIT_OK, EXIT_SOME_FAILED, DeviceError, OutputClosedError, TinyvllmError, UsageError
from tinyvllm_cli.io.feed import FileFeed, PipeFeed
from tinyvllm_cli.io.progress import Display, make_display
from tinyvllm_cli.io.prompts import Defaults, Item, read_lines, read_requests
from tinyvllm_cli.io.record import RunRecord, State, check_record_path
from tinyvllm_cli.io.results import ResultWriter, open_output
from tinyvllm_cli.io.rows import Rows, read_rows
from tinyvllm_cli.io.said import warn
from tinyvllm_cli.io.scan import Scan, scan_file
from tinyvllm_cli.io.settings import line_defaults, read_settings, read_text_option
from tinyvllm_cli.io.source import Source, open_source
from tinyvllm_cli.io.summary import Progress
from tinyvllm_cli.job import Hold, Job
from tinyvllm_cli.machine_options import MachineOptions
from tinyvllm_cli.run_facts import answers_line, model_facts, model_line, prompts_line, run_facts
from tinyvllm_cli.text.truncate import TokenCutter

if TYPE_CHECKING:
    from tinyvllm_cli.load import LoadedModel
    from tinyvllm_cli.model.checkpoint import Checkpoint
    from tinyvllm_cli.text.codec import TextCodec


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions(MachineOptions):
    """The options of `run` by their names; None: not given."""

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
    overwrite: bool = False
    limit: int | None = None
    dry_run: bool = False
    record: str | None = None
    quiet: bool = False

    def settings(self) -> dict[str, Any]:
        """The fields of a line that the command sets. UsageError for a bad one."""
        read_settings({"seed": self.seed}, ())  # only to check it: the run's seed is no field of a line
        named = {"n": self.n, "max_tokens": self.max_tokens, "temperature": self.temperature}
        return read_settings({**named, "stop": self.stop or None}, self.set)


@dataclass(frozen=True, slots=True)
class _Checked:
    """A run whose cheap checks have passed: all that is known before there is a model."""

    options: RunOptions
    settings: dict[str, Any]
    source: Source
    scan: Scan | None  # None: the input can be read only once
    rows: Rows | None
    writer: ResultWriter
    record_path: Path | None
    facts: dict[str, Any]  # for the record
    display: Display


def run_file(options: RunOptions, *, origins: Mapping[str, str], command: list[str], hold: Hold = nullcontext) -> int:
    """Answer every line of a file; the exit code. TinyvllmError where the run cannot start or finish.

    origins: where each option came from; command: the command line. Both are for the record. hold: see Job.
    """
    if options.raw and options.system is not None:
        raise UsageError("--system needs the chat template that --raw turns off: give one of them")
    settings = options.settings()
    texts = {"--system": read_text_option("--system", options.system)}
    texts["--template"] = read_text_option("--template", options.template)
    system = None if texts["--system"] is None else texts["--system"].text
    source = open_source(options.input)
    files = {f"{name} file": text.status for name, text in texts.items() if text is not None and text.status}
    used = {"input": source.status, **files}
    # A pipe stays open: closing it would wait for the thread that reads it.
    with closing(source.stream) if source.regular else nullcontext():
        rows = read_rows(source, texts["--template"], options.id, options.keep, raw=options.raw)
        scan = _scan(source, options.limit, rows)
        if options.dry_run:
            return _dry_run(options, settings, source, rows, system)
        with open_output(options.output, overwrite=options.overwrite, used=used) as writer:
            _refuse_model_file(writer, Path(options.model))
            record_path = _record_path(options, writer, used)
            facts = run_facts(command, asdict(options), origins, source, scan)
            display = make_display(quiet=options.quiet, answers_on_terminal=writer.is_terminal)
            run = _Checked(options, settings, source, scan, rows, writer, record_path, facts, display)
            if scan is not None and scan.requests == 0:
                return _nothing_to_do(run)
            with closing(_load(run, system)) as loaded:
                _refuse_model_file(writer, loaded.files.path)
                return _answer(run, loaded, hold)


def _nothing_to_do(run: _Checked) -> int:
    run.writer.begin()
    nothing = Progress(done=0, failed=0, total=0, prompt_tokens=0, completion_tokens=0, made_tokens=0, elapsed_s=0.0)
    RunRecord(run.record_path, run.facts, warn=warn).write("finished", nothing.as_json())
    run.display.say(f"{run.source.name} holds no requests: nothing to do")
    return EXIT_OK


def _refuse_model_file(writer: ResultWriter, model: Path) -> None:
    """The weights are read where they lie on disk: to write over them would end this process, and the model."""
    with suppress(OSError):  # what cannot be looked at is not loaded either
        for file in model.iterdir() if (model / "config.json").is_file() else [model]:
            if file.is_file() and os.path.samestat(file.stat(), writer.status):
                raise UsageError(f"the output {writer.name} is a file of the model {model}: give a place outside of it")


def _answer(run: _Checked, loaded: LoadedModel, hold: Hold) -> int:
    options, source, writer, display = run.options, run.source, run.writer, run.display
    defaults = _defaults(options, run.settings, loaded.checkpoint)
    display.say(model_line(loaded))
    display.say(prompts_line(loaded, source, run.scan, raw=options.raw))
    display.say(
        answers_line(loaded, writer.name, defaults.params, seed=options.seed, model_sampling=options.model_sampling)
    )
    record = RunRecord(run.record_path, run.facts | model_facts(loaded, defaults), warn=warn)
    total = None if run.scan is None else run.scan.requests
    items = _items(source, defaults, options.limit, run.rows, loaded.codec)
    feed = FileFeed(items) if source.regular else PipeFeed(items)
    job = Job(loaded.engine, feed, writer, display=display, record=record, total=total, hold=hold)
    writer.begin()
    try:
        _run_recorded(job, loaded, record, display)
    except DeviceError as error:
        raise DeviceError(
            f"the GPU failed under way: {error}; every finished answer was written to {writer.name}, and docs/lines.md "
            "(After an interruption) shows how to run the rest"
        ) from error
    if source.twice and source.changed():
        read = f"{job.tally.done} of the {total} requests that it held were read"
        warn(f"warning: {source.name} has changed since the run began; {read}")
    if not job.tally.failed:
        return EXIT_OK
    if options.quiet:  # else the summary has said it
        warn(f"error: {job.tally.failed} of {job.tally.done} requests failed, the first in {job.tally.first_failure}")
    return EXIT_SOME_FAILED


def _scan(source: Source, limit: int | None, rows: Rows | None) -> Scan | None:
    if not source.twice:
        return None
    return scan_file(source.stream, source.name, text_lines=source.text_lines, limit=limit, rows=rows)


def _record_path(options: RunOptions, writer: ResultWriter, used: Mapping[str, os.stat_result]) -> Path | None:
    """--record, else beside an output that is a file."""
    if options.record is None and not writer.is_file:
        return None
    name = f"{options.output}.run.json" if options.record is None else options.record
    return check_record_path(Path(name), {**used, "output": writer.status})


def _load(run: _Checked, system: str | None) -> LoadedModel:
    from tinyvllm_cli.load import open_engine

    options, report = run.options, run.display.say
    return open_engine(
        options.model,
        revision=options.revision,
        backend=options.backend,
        config=options.engine_options(seed=options.seed),
        system=system,
        report=report,
        progress=not options.quiet,
    )


def _dry_run(
    options: RunOptions, settings: dict[str, Any], source: Source, rows: Rows | None, system: str | None
) -> int:
    """Nothing is written, and no device is asked for."""
    from tinyvllm_cli.dry_run import dry_run
    from tinyvllm_cli.load import open_text_side

    display = make_display(quiet=options.quiet, answers_on_terminal=False)
    model = open_text_side(
        options.model, revision=options.revision, system=system, report=display.say, progress=not options.quiet
    )
    with closing(model):
        context = model.checkpoint.config.max_position
        if options.max_model_len is not None:
            context = min(context, options.max_model_len)
        defaults = _defaults(options, settings, model.checkpoint)
        return dry_run(
            _items(source, defaults, options.limit, rows, model.codec), model.codec, context, say=display.say
        )


def _defaults(options: RunOptions, settings: dict[str, Any], checkpoint: Checkpoint) -> Defaults:
    sampling = checkpoint.generation.sampling if options.model_sampling else {}
    return line_defaults(settings, sampling, raw=options.raw, truncate_left=options.truncate is not None)


def _items(
    source: Source, defaults: Defaults, limit: int | None, rows: Rows | None, codec: TextCodec
) -> Iterator[Item]:
    if rows is not None:
        rows = rows.with_truncate(TokenCutter(codec.tokenizer))
    return read_requests(
        read_lines(source.stream, limit) if rows is None else rows.lines(source.stream, limit),
        defaults,
        text_lines=source.text_lines,
        check_ids=not source.twice,  # those of a regular file were checked as a whole
        rows=rows,
    )


def _run_recorded(job: Job, loaded: LoadedModel, record: RunRecord, display: Display) -> None:
    """Run the job; whatever ends it, the record and the summary say how far it came."""

    def end(state: State, *, say: bool = True) -> None:
        display.close()
        progress, summary = job.result(load_s=loaded.load_s, num_blocks=loaded.backend.limits.num_blocks)
        record.write(state, progress.as_json(), summary.as_json())
        if say and state != "finished":
            display.say(f"{state} before the end; the finished answers are kept")
        for line in summary.lines() if say else ():
            display.say(line)

    record.write("running", job.progress().as_json())
    try:
        job.run()
    except OutputClosedError:
        end("stopped", say=False)
        raise
    except TinyvllmError:
        end("failed")
        raise
    except Exception:
        record.add_traceback(traceback.format_exc())
        end("failed")
        raise
    except BaseException:  # a signal
        end("stopped")
        raise
    end("finished")
