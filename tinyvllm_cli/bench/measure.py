"""The trials of one workload on one model: rates of the machine, a warm-up, then what counts."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

from tinyvllm_cli.backends.timing import Rates, open_timing
from tinyvllm_cli.bench.display import SILENT, Display
from tinyvllm_cli.bench.figures import Kept, keep
from tinyvllm_cli.bench.limit import Limit, compute_limit
from tinyvllm_cli.bench.meter import Meter
from tinyvllm_cli.bench.runner import Hold, Trial, run_trial
from tinyvllm_cli.bench.subject import Subject
from tinyvllm_cli.bench.workloads import NAMED, Lengths, shared_tokens
from tinyvllm_cli.errors import UsageError
from tinyvllm_cli.steady import steady
from tinyvllm_cli.types import Request

ELEM_BYTES = {"cpu": 4, "gpu": 2}  # of a weight


@dataclass(frozen=True, slots=True)
class Measured:
    rates: Rates
    lengths: Lengths
    limit: Limit
    trials: list[Kept]
    memory_used: int  # bytes, after the trials


def measure(
    subject: Subject,
    workload: str,
    requests: Sequence[Request],
    num_trials: int,
    *,
    hold: Hold,
    display: Display = SILENT,
    whole: bool = False,
) -> Measured:
    """One trial that does not count, in which graphs and libraries come to be, then num_trials of them.

    whole: whether all of a trial is kept. Errors as of run_trial; UsageError where the workload does not fit the
    context, or makes no token.
    """
    if workload in NAMED:  # what is too long in a file, the engine says
        _check_context(workload, requests, subject.backend.limits.max_seq_len)
    with closing(open_timing(subject.backend, subject.engine.threads)) as timing, steady():  # as in a run
        display.say("measuring the rates of the machine")
        rates = timing.rates()
        meter = Meter(subject.backend, timing)

        def run(name: str, total: int | None) -> Trial:
            with display.bar(name, total) as watch:
                trial = run_trial(
                    meter,
                    timing,
                    subject.codec,
                    requests,
                    eos_token_ids=subject.eos_token_ids,
                    prefix_cache=subject.engine.prefix_cache,
                    hold=hold,
                    watch=watch,
                )
            if not trial.output_tokens:
                raise UsageError(f"{workload} asks for no token: there is nothing to measure")
            display.say(f"{workload}, {name}: {trial.output_tokens / trial.seconds:,.1f} tokens/s")
            return trial

        # An answer to a line of a file may end early.
        total = sum(request.params.max_tokens for request in requests) if workload in NAMED else None
        lengths = _lengths(subject, requests, run("warm-up", total))
        limit = _limit(subject, lengths, rates)
        total = sum(lengths.outputs)
        names = [f"trial {number} of {num_trials}" for number in range(1, num_trials + 1)]
        trials = [keep(run(name, total), limit, rates, whole=whole) for name in names]
        return Measured(rates, lengths, limit, trials, timing.memory_used())


def _limit(subject: Subject, lengths: Lengths, rates: Rates) -> Limit:
    facts = subject.backend.facts
    return compute_limit(
        subject.config,
        list(zip(lengths.prompts, lengths.outputs, strict=True)),
        elem_bytes=ELEM_BYTES[facts.name],
        layer_bytes=1 if (facts.name, facts.dtype) == ("gpu", "fp8") else None,
        token_bytes=facts.kv_bytes_per_token,
        slots=subject.backend.limits.max_slots,
        rates=rates,
        shared=lengths.shared,
    )


def _check_context(workload: str, requests: Sequence[Request], context: int) -> None:
    """Each request is to run to its last token: a shorter answer would be another workload."""
    longest = max(len(request.prompt_token_ids or ()) + request.params.max_tokens for request in requests)
    if longest > context:
        raise UsageError(
            f"the workload {workload} has a request of {longest} tokens, prompt and answer together, and the context "
            f"holds {context}: raise --max-model-len where model and memory allow it, or give another model"
        )


def _lengths(subject: Subject, requests: Sequence[Request], trial: Trial) -> Lengths:
    usages = [timed.completion.usage for timed in trial.requests]
    return Lengths(
        prompts=tuple(usage.prompt_tokens for usage in usages if usage),
        outputs=tuple(usage.completion_tokens for usage in usages if usage),
        shared=shared_tokens(map(subject.codec.encode, requests)),
    )
