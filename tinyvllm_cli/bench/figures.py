"""From trials to figures: of each trial, then over all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tinyvllm_cli.backends.timing import Rates
from tinyvllm_cli.bench.limit import Limit
from tinyvllm_cli.bench.runner import TimedStep, Trial

EDGE = 0.1  # of the steps at either end of a trial, which are not its steady part

Figures = dict[str, float | None]


@dataclass(frozen=True, slots=True)
class Kept:
    """What stays of a trial once it is over."""

    seconds: float
    figures: Figures
    counts: dict[str, int]  # launches by the kernel's name
    whole: Trial | None  # for its trace, where one is wanted: it holds every answer and every step


def keep(trial: Trial, limit: Limit, rates: Rates, *, whole: bool) -> Kept:
    return Kept(trial.seconds, trial_figures(trial, limit, rates), trial.counts, trial if whole else None)


def trial_figures(trial: Trial, limit: Limit, rates: Rates) -> Figures:
    """Seconds and milliseconds as the names say; shares from 0 to 1. None: nothing to tell it from."""
    done = [timed.completion for timed in trial.requests]
    stats = [completion.stats for completion in done if completion.stats is not None]
    ttft = [each.ttft_s for each in stats if each.ttft_s is not None]
    # The first token comes with the prompt, the others take decode_s.
    tpot = [
        1e3 * each.decode_s / (completion.usage.completion_tokens - 1)
        for completion in done
        if (each := completion.stats) and completion.usage
        if each.decode_s is not None and completion.usage.completion_tokens > 1
    ]
    kinds = Counter(step.metered.kind for step in trial.steps)
    count = len(trial.steps)
    return {
        "seconds": trial.seconds,
        "prompt_tokens": sum(completion.usage.prompt_tokens for completion in done if completion.usage),
        "output_tokens": trial.output_tokens,
        "tokens_per_s": trial.output_tokens / trial.seconds,
        "of_limit": limit.seconds / trial.seconds,
        "of_read_rate": limit.bytes / trial.seconds / rates.read,
        "of_product_rate": limit.product_seconds / trial.seconds,
        "ttft_p50_s": _percentile(ttft, 50),
        "ttft_p99_s": _percentile(ttft, 99),
        "tpot_p50_ms": _percentile(tpot, 50),
        "tpot_p99_ms": _percentile(tpot, 99),
        "steps": count,
        **{f"{kind}_steps": kinds[kind] for kind in ("prompt", "mixed", "decode")},
        "step_ms": 1e3 * trial.seconds / count if count else None,
        "host_ms": 1e3 * (trial.engine_s - trial.waited_s) / count if count else None,
        "busy": busy(trial.steps),
        "mean_slots_busy": trial.mean_slots_busy,
        "peak_blocks": trial.peak_blocks,
        "cached_tokens": trial.cached_tokens,
        "preemptions": trial.preemptions,
    }


def busy(steps: Sequence[TimedStep]) -> float | None:
    """How much of the time the device was at a step, in the steady part of a trial; None without a step."""
    edge = int(EDGE * len(steps))
    steady = steps[edge : len(steps) - edge]
    if not steady or steady[-1].end <= steady[0].begin:
        return None
    return sum(step.end - step.begin for step in steady) / (steady[-1].end - steady[0].begin)


def over_trials(trials: Iterable[Mapping[str, float | None]]) -> dict[str, dict[str, float] | None]:
    """Median, least and most of each figure."""
    found = list(trials)
    return {name: _spread([each[name] for each in found]) for name in found[0]}


def _spread(values: Sequence[float | None]) -> dict[str, float] | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    return {"median": float(np.median(known)), "least": min(known), "most": max(known)}


def _percentile(values: Sequence[float], percent: float) -> float | None:
    return float(np.percentile(values, percent)) if values else None


def median_trial(trials: Sequence[Kept]) -> Kept:
    """The one in the middle by its seconds; of an even number the quicker of the two in the middle."""
    return sorted(trials, key=lambda trial: trial.seconds)[(len(trials) - 1) // 2]


def result_figures(trials: Sequence[Kept]) -> dict[str, Any]:
    """What the trials came to, for JSON; launches by kernel are those of the trial in the middle."""
    each = [trial.figures for trial in trials]
    counts = median_trial(trials).counts
    return {
        "trials": each,
        "figures": over_trials(each),
        "kernels": dict(sorted(counts.items(), key=lambda item: (-item[1], item[0]))),
    }
