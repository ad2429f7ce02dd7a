"""A command that goes through a file, from its options to its exit code: cheap checks, then the model, then the job."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinyvllm_cli.errors import (
    EXIT_OK,
    EXIT_SOME_FAILED,
    DeviceError,
    InputError,
    OutputClosedError,
    TinyvllmError,
    UsageError,
)
from tinyvllm_cli.file_options import FileOptions
from tinyvllm_cli.io.feed import FileFeed, PipeFeed
from tinyvllm_cli.io.input import Input, look_at
from tinyvllm_cli.io.ordered import Order
from tinyvllm_cli.io.progress import Display, make_display
from tinyvllm_cli.io.prompts import Item
from tinyvllm_cli.io.record import RunRecord, State, check_record_path, read_record
from tinyvllm_cli.io.results import Encode, ResultWriter, open_output
from tinyvllm_cli.io.resume import Earlier, Resume, read_earlier
from tinyvllm_cli.io.shard import read_shard
from tinyvllm_cli.io.source import Source
from tinyvllm_cli.io.summary import Progress, Tally
from tinyvllm_cli.job import Hold, Job
from tinyvllm_cli.run_facts import model_line, run_facts
from tinyvllm_cli.run_resume import differences, frozen_date, resume_command
from tinyvllm_cli.said import warn
from tinyvllm_cli.steady import steady
from tinyvllm_cli.types import Request
from tinyvllm_cli.work import Work

if TYPE_CHECKING:
    from tinyvllm_cli.load import LoadedModel, Prepared


TABLES = {".csv", ".tsv", ".txt", ".parquet"}  # what an output is not


@dataclass(frozen=True, slots=True)
class _Checked:
    """Work whose cheap checks have passed: all that is known before there is a model."""

    work: Work
    input: Input
    writer: ResultWriter
    earlier: Earlier | None  # what is there to be resumed
    record_path: Path | None
    record: dict[str, Any] | None  # of the earlier run
    facts: dict[str, Any]  # for the record
    command: list[str]
    display: Display

    @property
    def options(self) -> FileOptions:
        return self.work.options

    @property
    def how_to_go_on(self) -> str:
        """The end of a message about a run that did not finish."""
        resumable = self.writer.is_file and self.options.names_requests
        return f"; go on with: {resume_command(self.command)}" if resumable else ""


@dataclass(frozen=True, slots=True)
class _Ready:
    """Work whose model is known but for its weights: which requests are to be answered, and how."""

    items: Iterator[Item]
    resume: Resume | None
    encode: Encode
    facts: dict[str, Any]  # for the record
    total: int | None  # requests to answer; None: the input is a pipe


def work_through(
    work: Work,
    source: Source,
    *,
    used: Mapping[str, os.stat_result],
    origins: Mapping[str, str],
    command: list[str],
    hold: Hold,
) -> int:
    """Answer every line of a source; the exit code. TinyvllmError where that cannot start or finish.

    used: files that were read, by what they are called; origins: where each option came from; command: the command
    line. Both are for the record. hold: see Job.
    """
    options = work.options
    used = {"input": source.status, **used}
    input = look_at(source, work.rows, limit=options.limit, shard=read_shard(options.shard))
    if options.dry_run:
        return work.dry_run(input)
    with open_output(options.output, existing=options.existing, used=used) as writer:
        _refuse_model_file(writer, Path(options.model))
        record_path = _record_path(options, writer, used)
        run = _Checked(
            work=work,
            input=input,
            writer=writer,
            earlier=_read_earlier(options, writer),
            record_path=record_path,
            record=read_record(record_path) if options.resume else None,
            facts=run_facts(command, asdict(options), origins, source, input.scan),
            command=command,
            display=make_display(quiet=options.quiet, answers_on_terminal=writer.is_terminal),
        )
        return _run(run, hold)


def _run(run: _Checked, hold: Hold) -> int:
    if Path(run.options.output).suffix.lower() in TABLES and run.options.names_requests:
        run.display.say(f"note: {run.writer.name} will hold JSON lines; docs/batch-files.md makes a table of them")
    if run.input.scan is not None and run.input.scan.requests == 0:
        return _no_requests(run)
    date = frozen_date(run.record)
    with closing(_prepare(run, date)) as prepared:
        _refuse_model_file(run.writer, prepared.text.files.path)
        run.work.check(prepared.text)
        ready = _compare(run, prepared, date)
        resume = ready.resume
        if resume is not None and run.input.scan is not None and not resume.requests:
            return _nothing_to_answer(run, ready)
        from tinyvllm_cli.load import load

        with closing(load(prepared, deltas=False)) as loaded, steady():
            return _answer(run, ready, loaded, hold)


def _no_requests(run: _Checked) -> int:
    if run.earlier is None:
        run.writer.begin()
        nothing = Progress(
            done=0, failed=0, total=0, prompt_tokens=0, completion_tokens=0, made_tokens=0, elapsed_s=0.0
        )
        RunRecord(run.record_path, run.facts, warn=warn).write("finished", nothing.as_json())
    scope = run.options.scope.removeprefix("this input")
    run.display.say(f"{run.input.source.name}{scope} holds no requests: nothing to do")
    return EXIT_OK


def _nothing_to_answer(run: _Checked, ready: _Ready) -> int:
    """Every request that can be read has its answer: no model is needed, and the record of the run that did it stays.

    Lines that cannot be read get their error again.
    """
    tally = Tally()
    _begin(run.writer, ready)
    for item in ready.items:
        assert not isinstance(item, Request), "what can be read has been answered"
        run.writer.write(item)
        tally.add(item)
    kept = 0 if ready.resume is None else ready.resume.kept
    run.display.say(f"nothing to do: {kept} requests of {run.input.source.name} are answered in {run.writer.name}")
    return _exit_code(tally, quiet=False)


def _read_earlier(options: FileOptions, writer: ResultWriter) -> Earlier | None:
    if not options.resume or not writer.status.st_size:
        return None
    with writer.read() as stream:
        return read_earlier(stream, writer.name)


def _refuse_model_file(writer: ResultWriter, model: Path) -> None:
    """The weights are read where they lie on disk: to write over them would end this process, and the model."""
    with suppress(OSError):  # what cannot be looked at is not loaded either
        for file in model.iterdir() if (model / "config.json").is_file() else [model]:
            if file.is_file() and os.path.samestat(file.stat(), writer.status):
                raise UsageError(f"the output {writer.name} is a file of the model {model}: give a place outside of it")


def _compare(run: _Checked, prepared: Prepared, date: datetime) -> _Ready:
    """Which requests have no answer yet. UsageError where one has been answered as another."""
    work, input, text = run.work, run.input, prepared.text
    answers = work.answerer(prepared, date)
    total = None if input.scan is None else input.scan.requests
    resume = None
    items = work.requests(input, text, answers)
    if run.earlier is not None:
        differs = differences(run.record, asdict(run.options), answers, work.telling, path=run.record_path)
        resume = Resume(run.earlier, differs, run.options.scope)
        if input.scan is None:
            items = filter(resume.wants, items)
        else:
            wanted = resume.compare(items, input.scan.lines)
            total = int(wanted.sum())
            items = work.requests(input, text, answers, lambda index: bool(wanted[index]))
        run.display.say(resume.line())
    return _Ready(
        items=items,
        resume=resume,
        encode=work.encoder(text.files.name, date),
        facts={
            "answerer": asdict(answers),
            "frozen_date": date.isoformat(),
            "kept": 0 if resume is None else resume.kept,
        },
        total=total,
    )


def _begin(writer: ResultWriter, ready: _Ready) -> None:
    """Make the output ready for the lines to come; failed lines that come again go, all others stay."""
    resume = ready.resume
    if resume is None:
        writer.begin(ready.encode)
        return
    dropped, end = resume.dropped(), resume.earlier.end
    if dropped.any():
        with writer.read() as stream:
            end = writer.replace(resume.earlier.without(stream, dropped))
    writer.resume(end, ready.encode)


def _answer(run: _Checked, ready: _Ready, loaded: LoadedModel, hold: Hold) -> int:
    work, options, source, writer, display = run.work, run.options, run.input.source, run.writer, run.display
    for line in (model_line(loaded), *work.start_lines(loaded, run.input, writer.name)):
        display.say(line)
    record = RunRecord(run.record_path, run.facts | work.facts(loaded) | ready.facts, warn=warn)
    items = work.noted(ready.items, loaded.files.name, display.say)
    job = Job(
        work.engine(loaded),
        FileFeed(items) if source.regular else PipeFeed(items),
        writer,
        display=display,
        record=record,
        tally=work.tally,
        total=ready.total,
        order=Order() if options.in_order else None,
        tell_failures=not options.names_requests,
        hold=hold,
    )
    _begin(writer, ready)
    try:
        _run_recorded(job, loaded, record, run)
    except DeviceError as error:
        kept = f"; every finished answer was written to {writer.name}{run.how_to_go_on}"
        raise DeviceError(f"the GPU failed under way: {error}{kept}") from error
    except (OutputClosedError, UsageError):
        raise
    except TinyvllmError as error:
        raise TinyvllmError(f"{error}{run.how_to_go_on}") from error
    if source.twice and source.changed():
        read = f"as many requests as it held then were read ({ready.total}), and nothing that was added"
        warn(f"warning: {source.name} has changed since the run began: {read}{run.how_to_go_on}")
    return _exit_code(job.tally, quiet=not options.quiet)  # the summary has said it


def _check_read(source: Source, progress: Progress) -> None:
    """InputError where other requests were read than were there when the run began."""
    if source.twice and progress.done != progress.total:
        raise InputError(
            f"{source.name} was rewritten by another program: it held {progress.total} requests when the run began, "
            f"and {progress.done} when it was read; restore it"
        )


def _exit_code(tally: Tally, *, quiet: bool) -> int:
    if not tally.failed:
        return EXIT_OK
    if not quiet:
        warn(f"error: {tally.failed} of {tally.done} requests failed, the first in {tally.first_failure}")
    return EXIT_SOME_FAILED


def _record_path(options: FileOptions, writer: ResultWriter, used: Mapping[str, os.stat_result]) -> Path | None:
    """--record, else beside an output that is a file."""
    if options.record is None and not writer.is_file:
        return None
    name = f"{options.output}.run.json" if options.record is None else options.record
    return check_record_path(Path(name), {**used, "output": writer.status})


def _prepare(run: _Checked, date: datetime) -> Prepared:
    from tinyvllm_cli.load import prepare

    options = run.options
    return prepare(
        options.model,
        revision=options.revision,
        backend=options.backend,
        config=options.engine_options(seed=run.work.seed),
        system=run.work.system,
        now=date.replace(tzinfo=None),
        report=run.display.say,
        progress=not options.quiet,
    )


def _run_recorded(job: Job, loaded: LoadedModel, record: RunRecord, run: _Checked) -> None:
    """Run the job; whatever ends it, the record and the summary say how far it came."""
    display = run.display

    def end(state: State, go_on: str = "", *, say: bool = True) -> None:
        display.close()
        progress, summary = job.result(load_s=loaded.load_s, num_blocks=loaded.backend.limits.num_blocks)
        record.write(state, progress.as_json(), summary.as_json())
        if say and state != "finished":
            left = "" if progress.total is None else f", {progress.total - progress.done} requests are left"
            display.say(f"{state} before the end; the finished answers are kept{left}{go_on}")
        for line in summary.lines() if say else ():
            display.say(line)

    record.write("running", job.progress().as_json())
    try:
        job.run()
        run.writer.check()
        _check_read(run.input.source, job.progress())
    except OutputClosedError:
        end("stopped", say=False)
        raise
    except TinyvllmError:  # its own message says how to go on
        end("failed")
        raise
    except Exception:
        record.add_traceback(traceback.format_exc())
        end("failed", run.how_to_go_on)
        raise
    except BaseException:  # a signal
        with suppress(TinyvllmError):
            job.write_rest()
        end("stopped", run.how_to_go_on)
        raise
    end("finished")
