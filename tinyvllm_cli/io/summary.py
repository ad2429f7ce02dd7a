"""What a run has done so far, and what it came to at its end."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from tinyvllm_cli.engine.stats import EngineStats
from tinyvllm_cli.io.fields import shown
from tinyvllm_cli.types import Completion, Request


def place(item: Request | Completion) -> str:
    """A line of the input as messages call it, with its id where it has one of its own."""
    own = "" if item.custom_id == f"line-{item.line}" else f" ({shown(item.custom_id)})"
    return f"line {item.line}{own}"


@dataclass(slots=True)
class Tally:
    """Counts over the completions of a run. Sixteen bytes a request are held, for the percentiles."""

    ok: int = 0
    failed: int = 0
    cut: int = 0  # answers that ended by length
    prompt_tokens: int = 0
    completion_tokens: int = 0
    ttft_s: array[float] = field(default_factory=lambda: array("d"))
    e2e_s: array[float] = field(default_factory=lambda: array("d"))
    failures: Counter[str] = field(default_factory=Counter)  # by type
    first_failure: str | None = None

    @property
    def done(self) -> int:
        return self.ok + self.failed

    def add(self, completion: Completion) -> None:
        if completion.error is not None:
            self.failed += 1
            self.failures[completion.error.type] += 1
            if self.first_failure is None:
                self.first_failure = f"{place(completion)}: {completion.error.message}"
            return
        self.ok += 1
        self.cut += any(choice.finish_reason == "length" for choice in completion.choices)
        if completion.usage is not None:
            self.prompt_tokens += completion.usage.prompt_tokens
            self.completion_tokens += completion.usage.completion_tokens
        if completion.stats is not None and completion.stats.ttft_s is not None:
            self.ttft_s.append(completion.stats.ttft_s)
            self.e2e_s.append(completion.stats.e2e_s)

    def summary(self, progress: Progress, stats: EngineStats, *, load_s: float, num_blocks: int) -> Summary:
        """What the run has come to; block 0 of num_blocks belongs to nobody."""
        return Summary(
            ok=self.ok,
            failed=self.failed,
            cut=self.cut,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            tokens_per_s=progress.tokens_per_s,
            ttft_p50_s=percentile(self.ttft_s, 50),
            ttft_p99_s=percentile(self.ttft_s, 99),
            e2e_p50_s=percentile(self.e2e_s, 50),
            e2e_p99_s=percentile(self.e2e_s, 99),
            mean_slots_busy=stats.mean_slots_busy,
            num_blocks=num_blocks - 1,
            peak_blocks=stats.peak_blocks,
            mean_blocks=stats.mean_blocks,
            peak_shared_blocks=stats.peak_shared_blocks,
            unwritten_share=stats.unwritten_share,
            cached_tokens=stats.cached_tokens,
            hit_rate=stats.hit_rate,
            preemptions=stats.preemptions,
            evictions=stats.evictions,
            load_s=load_s,
            wall_s=progress.elapsed_s,
            failures=dict(self.failures),
            first_failure=self.first_failure,
        )


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is."""

    done: int
    failed: int
    total: int | None  # None: the input is a pipe
    prompt_tokens: int  # of the answered requests, as completion_tokens
    completion_tokens: int
    made_tokens: int  # completion tokens with those of unfinished answers
    elapsed_s: float  # since the first request could start

    @property
    def tokens_per_s(self) -> float:
        return self.made_tokens / self.elapsed_s if self.elapsed_s > 0 else 0.0

    @property
    def seconds_left(self) -> float | None:
        """By tokens, as if all answers were as long as the finished ones. None where that tells nothing (yet)."""
        if self.total is None or not self.done:
            return None
        if self.done == self.total:
            return 0.0
        # Many answers finish together after a long time without any, so that requests a second would mislead.
        expected = self.completion_tokens / self.done * self.total - self.made_tokens
        return expected / self.tokens_per_s if expected > 0 and self.tokens_per_s > 0 else None

    def as_json(self) -> dict[str, float | int | None]:
        left = self.seconds_left
        return {
            "done": self.done,
            "failed": self.failed,
            "total": self.total,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "tokens_per_s": round(self.tokens_per_s, 3),
            "seconds_left": None if left is None else round(left, 1),
        }


@dataclass(frozen=True, slots=True)
class Summary:
    """What a run came to. Times in seconds; a percentile is None where no request made a token."""

    ok: int
    failed: int
    cut: int
    prompt_tokens: int
    completion_tokens: int
    tokens_per_s: float
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    e2e_p50_s: float | None
    e2e_p99_s: float | None
    mean_slots_busy: float
    num_blocks: int  # KV blocks that there are
    peak_blocks: int  # held at once; a shared one counts once
    mean_blocks: float  # held, over the steps
    peak_shared_blocks: int  # held at once by several requests
    unwritten_share: float  # of the positions in held blocks, those that nothing was written to
    cached_tokens: int  # of the prompts, whose KV was found instead of computed
    hit_rate: float  # the same as a share of the prompts' tokens
    preemptions: int  # requests that gave their blocks back before their end, to be computed again
    evictions: int  # cached blocks that were given away
    load_s: float
    wall_s: float  # from the loaded model to the last answer
    failures: dict[str, int]  # by type
    first_failure: str | None

    def as_json(self) -> dict[str, Any]:
        return {name: round(value, 6) if isinstance(value, float) else value for name, value in asdict(self).items()}

    def lines(self) -> list[str]:
        """For people."""
        counts = ", ".join(f"{count} {kind}" for kind, count in self.failures.items())
        return [
            self.requests_line(),
            *([f"failed:   {counts}; the first in {self.first_failure}"] if self.failed else []),
            *(self.measures() if self.ok else []),
            f"machine:  {self.mean_slots_busy:.1f} slots busy on average, {self.load_s:.1f} s to load,"
            f" {self.wall_s:.1f} s to answer",
        ]

    def requests_line(self) -> str:
        return f"requests: {self.ok} ok, {self.failed} failed, {self.cut} cut at max_tokens or the context"

    def measures(self) -> list[str]:
        """Lines about what was answered."""
        return [
            f"tokens:   {self.prompt_tokens} in, {self.completion_tokens} out, {self.tokens_per_s:.1f} out a second",
            f"latency:  TTFT p50 {shown_seconds(self.ttft_p50_s)}, p99 {shown_seconds(self.ttft_p99_s)};"
            f" end to end p50 {shown_seconds(self.e2e_p50_s)}, p99 {shown_seconds(self.e2e_p99_s)}",
            self.memory_line(),
        ]

    def memory_line(self) -> str:
        return (
            f"memory:   {self.peak_blocks} of {self.num_blocks} KV blocks at the peak,"
            f" {self.peak_shared_blocks} shared, {self.mean_blocks:.1f} on average,"
            f" {self.unwritten_share:.1%} of these unwritten; {self.hit_rate:.1%} of the prompts cached,"
            f" {self.preemptions} preempted, {self.evictions} evicted"
        )


def percentile(values: array[float], percent: float) -> float | None:
    """Linear between the two nearest ranks; None of no values."""
    return float(np.percentile(np.frombuffer(values), percent)) if values else None


def shown_seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"
