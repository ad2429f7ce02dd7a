"""`tinyvllm bench` from its options to its table: cheap checks first, then the model, then the trials."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import combinations
from pathlib import Path
from typing import Any

from tinyvllm_cli import __version__
from tinyvllm_cli.bench.display import Display
from tinyvllm_cli.bench.figures import median_trial, result_figures
from tinyvllm_cli.bench.measure import Measured, measure
from tinyvllm_cli.bench.result_file import check_result_file, write_result_file
from tinyvllm_cli.bench.runner import Hold
from tinyvllm_cli.bench.start import StartTimes, time_start
from tinyvllm_cli.bench.subject import Subject, model_option, open_model, open_random
from tinyvllm_cli.bench.table import print_result, subject_line
from tinyvllm_cli.bench.trace import trace
from tinyvllm_cli.bench.workloads import NAMED, check_workload, file_requests, named_requests
from tinyvllm_cli.errors import TinyvllmError, UsageError
from tinyvllm_cli.machine_options import MachineOptions
from tinyvllm_cli.run_facts import backend_facts, machine_facts
from tinyvllm_cli.said import warn
from tinyvllm_cli.types import Request

# The first key of a result, and of a trace, with the version of its form.
MARK, TRACE_MARK = "tinyvllm_bench", "tinyvllm_trace"
FORM = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions(MachineOptions):
    """The options of `bench` by their names; None: not given."""

    workload: str
    trials: int
    model: str | None = None  # None where the weights are random
    random_weights: str | None = None
    write: str | None = None
    revision: str | None = None
    json: str | None = None
    trace: str | None = None

    def run_options(self) -> list[str]:
        """The same for `run`, on its command line."""
        memory = f"{self.gpu_memory}B" if isinstance(self.gpu_memory, int) else str(self.gpu_memory)
        given = {
            "backend": self.backend,
            "dtype": self.dtype,
            "gpu-memory": memory,
            "slots": self.slots,
            "max-model-len": self.max_model_len,
            "kv-dtype": self.kv_dtype,
            "threads": self.threads,
        }
        words = [word for name, value in given.items() if value is not None for word in (f"--{name}", str(value))]
        return [*words, *(["--no-prefix-cache"] if self.no_prefix_cache else [])]


def run_bench(options: BenchOptions, *, command: list[str], hold: Hold = nullcontext) -> None:
    """Measure, and print the table. TinyvllmError where it cannot be measured. hold: see run_trial."""
    check_workload(options.workload)
    _check(options)
    json_path = None if options.json is None else check_result_file("--json", options.json, MARK)
    trace_path = None if options.trace is None else check_result_file("--trace", options.trace, TRACE_MARK)
    given = _file_requests(options)
    display, facts = Display(shown=sys.stderr is not None and sys.stderr.isatty()), result_facts(MARK, command)
    display.say("opening the model")
    with closing(_open(options)) as subject:
        facts |= subject_facts(subject, facts["machine"])
        display.say(subject_line(facts))
        requests = named_requests(options.workload, subject.num_ids) if given is None else given
        whole = trace_path is not None
        measured = measure(subject, options.workload, requests, options.trials, whole=whole, hold=hold, display=display)
    start = None
    failures: list[str] = []
    with _later(failures):
        start = _start(subject, options, display)
    result = facts | _measured_facts(options.workload, measured, facts["backend"], start)
    with _later(failures):
        if json_path is not None:
            write_result_file(json_path, result, indent=2)
    with _later(failures):
        if trace_path is not None and (trial := median_trial(measured.trials).whole):
            write_result_file(trace_path, {TRACE_MARK: FORM, **trace(trial)})
    with _later(failures):
        print_result(result)
    if failures:
        raise TinyvllmError("; ".join(failures))


@contextmanager
def _later(failures: list[str]) -> Iterator[None]:
    """What was measured is not lost with what fails then: it is told at the end."""
    try:
        yield
    except TinyvllmError as error:
        failures.append(str(error))


def _check(options: BenchOptions) -> None:
    if options.random_weights is None and options.write is not None:
        raise UsageError("--write keeps random weights: give --random-weights NAME with it")
    if options.random_weights is not None and options.revision is not None:
        raise UsageError("--revision is that of a Hub model, and --random-weights takes none: leave it out")
    if options.write is not None and (model := model_option(options.write)) is not None:
        raise UsageError(
            f"--write {options.write} is not empty: give the name of a new folder, or use the model in it with {model}"
        )
    places = {"--json": options.json, "--trace": options.trace, "--write": options.write}
    paths = {option: Path(os.path.realpath(name)) for option, name in places.items() if name is not None}
    for one, other in combinations(paths, 2):
        # A file holds no folder; one in a folder that is yet to be made is refused where its own is looked for.
        if paths[one] in (paths[other], *paths[other].parents):
            raise UsageError(f"{one} {places[one]} and {other} {places[other]} are one place: give each its own")


def _file_requests(options: BenchOptions) -> list[Request] | None:
    """None: the workload is one of ours, whose ids are those of the model."""
    if options.workload in NAMED:
        return None
    return file_requests(options.workload, ids_only=options.random_weights is not None)


def _open(options: BenchOptions) -> Subject:
    engine = options.engine_options()
    if options.random_weights is not None:
        write = None if options.write is None else Path(options.write)
        return open_random(options.random_weights, backend=options.backend, options=engine, write=write)
    assert options.model is not None
    return open_model(options.model, revision=options.revision, backend=options.backend, options=engine, report=warn)


def _start(subject: Subject, options: BenchOptions, display: Display) -> StartTimes | None:
    """Of a subject that is closed, so that its memory is free; None without files that another process could open."""
    if subject.path is None:
        return None
    display.say("timing two starts")
    most = min(subject.backend.limits.max_seq_len - 1, subject.num_ids)
    return time_start(subject.path, options.run_options(), most)


def result_facts(mark: str, command: list[str]) -> dict[str, Any]:
    """What is known before the model is, for JSON. mark: the first key."""
    started = datetime.now(UTC).isoformat(timespec="seconds")
    return {mark: FORM, "tinyvllm": __version__, "command": command, "started": started, "machine": machine_facts()}


def subject_facts(subject: Subject, machine: Mapping[str, Any]) -> dict[str, Any]:
    """What is measured."""
    facts = subject.backend.facts
    threads = {"threads": subject.engine.threads or machine["available_cpus"]} if facts.name == "cpu" else {}
    return {
        "model": {"name": subject.name, "path": None if subject.path is None else str(subject.path)},
        "config": asdict(subject.config),
        "backend": backend_facts(facts) | threads,
        "engine": asdict(subject.engine),
        "limits": asdict(subject.backend.limits),
    }


def _measured_facts(
    workload: str, measured: Measured, backend: Mapping[str, Any], start: StartTimes | None
) -> dict[str, Any]:
    """What it came to."""
    lengths, limit = measured.lengths, measured.limit
    output_tokens = sum(lengths.outputs)
    return {
        "workload": {
            "name": workload,
            "requests": len(lengths.prompts),
            "prompt_tokens": sum(lengths.prompts),
            "output_tokens": output_tokens,
            "shared_tokens": lengths.shared,
            "lengths_sha256": lengths.sha256,
        },
        "rates": asdict(measured.rates),
        "limit": {**asdict(limit), "tokens_per_s": output_tokens / limit.seconds},
        "memory": {"planned_bytes": backend.get("total_bytes"), "used_bytes": measured.memory_used},
        "start": None if start is None else asdict(start),
        **result_figures(measured.trials),
    }
