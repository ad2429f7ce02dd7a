"""`tinyvllm run` from its options to its exit code: cheap checks first, then the model, then the job."""

from __future__ import annotations

import os
import traceback
from collections.abc import Mapping
from contextlib import closing, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinyvllm_cli.errors import EXIT_OK, EXIT_SOME_FAILED, DeviceError, OutputClosedError, TinyvllmError, UsageError
from tinyvllm_cli.io.feed import Feed, FileFeed, PipeFeed
from tinyvllm_cli.io.progress import Display, make_display
from tinyvllm_cli.io.prompts import Defaults, read_lines, read_requests
from tinyvllm_cli.io.record import RunRecord, State, check_record_path
from tinyvllm_cli.io.results import ResultWriter, open_output
from tinyvllm_cli.io.said import warn
from tinyvllm_cli.io.scan import Scan, scan_file
from tinyvllm_cli.io.settings import line_defaults, read_settings, read_system
from tinyvllm_cli.io.source import Source, open_source
from tinyvllm_cli.io.summary import Progress
from tinyvllm_cli.job import Hold, Job
from tinyvllm_cli.machine_options import MachineOptions
from tinyvllm_cli.run_facts import answers_line, model_facts, model_line, prompts_line, run_facts

if TYPE_CHECKING:
    from tinyvllm_cli.load import LoadedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions(MachineOptions):
    """The options of `run` by their names; None: not given."""

    input: str
    model: str
    revision: str | None = None
    system: str | None = None
    raw: bool = False
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
    settings, (system, system_file) = options.settings(), read_system(options.system)
    source = open_source(options.input)
    used = {"input": source.status} | ({} if system_file is None else {"--system file": system_file})
    # A pipe stays open: closing it would wait for the thread that reads it.
    with closing(source.stream) if source.regular else nullcontext():
        scan = _scan(source, options.limit)
        with open_output(options.output, overwrite=options.overwrite, used=used) as writer:
            _refuse_model_file(writer, Path(options.model))
            record_path = _record_path(options, writer, used)
            facts = run_facts(command, asdict(options), origins, source, scan)
            display = make_display(quiet=options.quiet, answers_on_terminal=writer.is_terminal)
            run = _Checked(options, settings, source, scan, writer, record_path, facts, display)
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
    sampling = loaded.checkpoint.generation.sampling if options.model_sampling else {}
    defaults = line_defaults(run.settings, sampling, raw=options.raw)
    display.say(model_line(loaded))
    display.say(prompts_line(loaded, source, run.scan, raw=options.raw))
    display.say(
        answers_line(loaded, writer.name, defaults.params, seed=options.seed, model_sampling=options.model_sampling)
    )
    record = RunRecord(run.record_path, run.facts | model_facts(loaded, defaults), warn=warn)
    total = None if run.scan is None else run.scan.requests
    feed = _feed(source, defaults, options.limit)
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


def _scan(source: Source, limit: int | None) -> Scan | None:
    if not source.twice:
        return None
    return scan_file(source.stream, source.name, text_lines=source.text_lines, limit=limit)


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


def _feed(source: Source, defaults: Defaults, limit: int | None) -> Feed:
    # Ids of a regular file were checked as a whole; standard input is read only once.
    items = read_requests(
        read_lines(source.stream, limit),
        defaults,
        text_lines=source.text_lines,
        check_ids=not source.twice,
    )
    return FileFeed(items) if source.regular else PipeFeed(items)


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
