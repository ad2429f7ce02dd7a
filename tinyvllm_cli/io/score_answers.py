"""From scored texts to output lines, and to what they come to together."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from tinyvllm_cli.engine.stats import EngineStats
from tinyvllm_cli.io.results import json_line, own_line, rounded_stats
from tinyvllm_cli.io.summary import Progress, Summary, Tally, shown_seconds
from tinyvllm_cli.types import Completion, Score

STATS = ("queue_s", "e2e_s", "tokens_per_s", "cached_tokens")  # those that mean something where no token is made
OF_ANSWERS = {"cut", "ttft_p50_s", "ttft_p99_s"}  # what a Summary has that does not


def encode_scores(completion: Completion, *, tokens: bool = False) -> bytes:
    """The output line of a completion, line end included. Keys in the order of docs/scoring.md.

    tokens: with the logprob of each token.
    """
    scores = [_score(score, tokens=tokens) for score in completion.scores]
    stats = None
    if completion.stats is not None:
        rounded = rounded_stats(completion.stats)
        stats = {name: rounded[name] for name in STATS}
    return json_line(own_line(completion, {"scores": scores}, stats))


def _score(score: Score, *, tokens: bool) -> dict[str, Any]:
    each = {"token_logprobs": score.token_logprobs} if tokens else {}
    return {"logprob": score.logprob, "tokens": len(score.token_logprobs), "greedy": score.greedy, **each}


@dataclass(slots=True)
class ScoreTally(Tally):
    """Counts over scored requests, and adds up the texts among them, not the continuations, for the perplexity."""

    text_logprob: float = 0.0
    text_tokens: int = 0

    def add(self, completion: Completion) -> None:
        Tally.add(self, completion)
        if completion.stats is not None and any(score.token_logprobs for score in completion.scores):
            self.e2e_s.append(completion.stats.e2e_s)
        for score in completion.scores:
            if score.of_text:
                self.text_logprob += score.logprob
                self.text_tokens += len(score.token_logprobs)

    def summary(self, progress: Progress, stats: EngineStats, *, load_s: float, num_blocks: int) -> Summary:
        summary = Tally.summary(self, progress, stats, load_s=load_s, num_blocks=num_blocks)
        perplexity = perplexity_of(self.text_logprob, self.text_tokens)
        return ScoreSummary(**asdict(summary), perplexity=perplexity, text_tokens=self.text_tokens)


def perplexity_of(logprob: float, tokens: int) -> float | None:
    """exp(-logprob / tokens); None of no tokens, and where it is past the range of a float."""
    try:
        return math.exp(-logprob / tokens) if tokens else None
    except OverflowError:
        return None


@dataclass(frozen=True, slots=True)
class ScoreSummary(Summary):
    """What a run of scores came to; completion tokens are those that were scored."""

    perplexity: float | None  # of all texts together
    text_tokens: int  # that were scored of them

    def as_json(self) -> dict[str, Any]:
        return {name: value for name, value in Summary.as_json(self).items() if name not in OF_ANSWERS}

    def requests_line(self) -> str:
        return f"requests: {self.ok} ok, {self.failed} failed"

    def measures(self) -> list[str]:
        if self.perplexity is None:
            texts = []
        else:
            texts = [f"texts:    perplexity {self.perplexity:.6g} over {self.text_tokens} scored tokens"]
        return [
            *texts,
            f"tokens:   {self.prompt_tokens} in, {self.completion_tokens} scored, {self.tokens_per_s:.1f} a second",
            f"latency:  end to end p50 {shown_seconds(self.e2e_p50_s)}, p99 {shown_seconds(self.e2e_p99_s)}",
            self.memory_line(),
        ]
