"""`tinyvllm bench` from its options to its table: cheap checks first, then the model, then the trials."""

from __future__ import annotations

import sys
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tinyvllm_cli import __version__
from tinyvllm_cli.backends.choose import BackendName
from tinyvllm_cli.bench.figures import median_trial, result_figures
from tinyvllm_cli.bench.measure import Measured, Say, measure, silent
from tinyvllm_cli.bench.result_file import check_result_file, write_result_file
from tinyvllm_cli.bench.runner import Hold
from tinyvllm_cli.bench.start import StartTimes, time_start
from tinyvllm_cli.bench.subject import Subject, open_model, open_random
from tinyvllm_cli.bench.table import print_result
from tinyvllm_cli.bench.trace import trace
from tinyvllm_cli.bench.workloads import NAMED, check_workload, file_requests, named_requests
from tinyvllm_cli.config import GPU_MEMORY, AskedDtype, EngineOptions
from tinyvllm_cli.errors import TinyvllmError, UsageError
from tinyvllm_cli.io.said import warn
from tinyvllm_cli.run_facts import machine_facts

MARK = "tinyvllm_bench"  # the first key of a result, with the version of its form
FORM = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """The options of `bench` by their names; None: not given."""

    workload: str
    trials: int
    model: str | None = None  # None where the weights are random
    random_weights: str | None = None
    write: str | None = None
    revision: str | None = None
    dtype: AskedDtype = "auto"
    json: str | None = None
    trace: str | None = None
    backend: BackendName = "auto"
    gpu_memory: float | int = GPU_MEMORY
    slots: int | None = None
    max_model_len: int | None = None
    no_prefix_cache: bool = False
    threads: int | None = None

    def engine_options(self) -> EngineOptions:
        return EngineOptions(
            slots=self.slots,
            dtype=self.dtype,
            max_model_len=self.max_model_len,
            threads=self.threads,
            gpu_memory=self.gpu_memory,
            prefix_cache=not self.no_prefix_cache,
        )

    def run_options(self) -> list[str]:
        """The same for `run`, on its command line."""
        memory = f"{self.gpu_memory}B" if isinstance(self.gpu_memory, int) else str(self.gpu_memory)
        given = {
            "backend": self.backend,
            "dtype": self.dtype,
            "gpu-memory": memory,
            "slots": self.slots,
            "max-model-len": self.max_model_len,
            "threads": self.threads,
        }
        words = [word for name, value in given.items() if value is not None for word in (f"--{name}", str(value))]
        return [*words, *(["--no-prefix-cache"] if self.no_prefix_cache else [])]


def run_bench(options: BenchOptions, *, command: list[str], hold: Hold = nullcontext) -> None:
    """Measure, and print the table. TinyvllmError where it cannot be measured. hold: see run_trial."""
    check_workload(options.workload)
    _check(options)
    json_path = None if options.json is None else check_result_file("--json", options.json, MARK)
    trace_path = None if options.trace is None else check_result_file("--trace", options.trace, "traceEvents")
    say: Say = warn if sys.stderr.isatty() else silent
    started = datetime.now(UTC).isoformat(timespec="seconds")
    given = None if options.workload in NAMED else file_requests(options.workload)
    say("opening the model")
    with closing(_open(options)) as subject:
        requests = named_requests(options.workload, subject.num_ids) if given is None else given
        measured = measure(subject, options.workload, requests, options.trials, hold=hold, say=say)
    start, failure = None, None
    try:
        start = _start(subject, options, say)
    except TinyvllmError as error:  # what was measured is not lost with it
        failure = error
    facts = {MARK: FORM, "tinyvllm": __version__, "command": command, "started": started, "machine": machine_facts()}
    result = facts | _result(subject, options.workload, measured, start)
    if json_path is not None:
        write_result_file(json_path, result, indent=2)
    if trace_path is not None:
        write_result_file(trace_path, trace(median_trial(measured.trials)))
    print_result(result)
    if failure is not None:
        raise failure


def _check(options: BenchOptions) -> None:
    if options.random_weights is None and options.write is not None:
        raise UsageError("--write keeps random weights: give --random-weights NAME with it")
    if options.random_weights is not None:
        if options.workload not in NAMED:
            raise UsageError(
                f"{options.workload} holds text, and random weights have no tokenizer: give a model with -m"
            )
        if options.revision is not None:
            raise UsageError("--revision is that of a Hub model, and --random-weights takes none: leave it out")
    if options.json is not None and options.trace is not None and Path(options.json) == Path(options.trace):
        raise UsageError(f"--json and --trace are both {options.json}: give each a file of its own")


def _open(options: BenchOptions) -> Subject:
    engine = options.engine_options()
    if options.random_weights is not None:
        write = None if options.write is None else Path(options.write)
        return open_random(options.random_weights, backend=options.backend, options=engine, write=write)
    assert options.model is not None
    return open_model(options.model, revision=options.revision, backend=options.backend, options=engine, report=warn)


def _start(subject: Subject, options: BenchOptions, say: Say) -> StartTimes | None:
    """Of a subject that is closed, so that its memory is free; None without files that another process could open."""
    if subject.path is None:
        return None
    say("timing two starts")
    most = min(subject.backend.limits.max_seq_len - 1, subject.num_ids)
    return time_start(subject.path, options.run_options(), most)


def _result(subject: Subject, workload: str, measured: Measured, start: StartTimes | None) -> dict[str, Any]:
    """What was measured on what, for JSON."""
    facts, lengths, limit = subject.backend.facts, measured.lengths, measured.limit
    output_tokens = sum(lengths.outputs)
    return {
        "model": {"name": subject.name, "path": None if subject.path is None else str(subject.path)},
        "config": asdict(subject.config),
        "backend": {"name": facts.name, "device": facts.device, "dtype": facts.dtype, **facts.details},
        "engine": asdict(subject.engine),
        "limits": asdict(subject.backend.limits),
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
        "memory": {"planned_bytes": facts.details.get("total_bytes"), "used_bytes": measured.memory_used},
        "start": None if start is None else asdict(start),
        **result_figures(measured.trials, limit, measured.rates),
    }
