"""Tokens that a constraint forces on an answer: taken without being drawn, several of them in one step."""

from __future__ import annotations

from tinyvllm_cli.engine.batcher import Batcher
from tinyvllm_cli.engine.live import End, Live
from tinyvllm_cli.engine.stats import EngineStats
from tinyvllm_cli.types import Sequence

LONGEST = 64  # tokens: few constraints force more in a row


class Forcing:
    """What is forced on the answers of an engine."""

    def __init__(self, batcher: Batcher, stats: EngineStats) -> None:
        self._batcher = batcher
        self._stats = stats

    def is_worth_a_look(self) -> bool:
        """Whether a step for forced tokens may save an answer more than it costs all that run, or some that waited for
        such a step are to go on without."""
        return self._cost < LONGEST or self._batcher.has_paused

    @property
    def _cost(self) -> int:
        """Of a step for forced tokens, in tokens of one answer."""
        return self._batcher.limits.chunk_cost * len(self._batcher.running)

    def force(self, live: Live, sequence: Sequence, made: list[int]) -> tuple[str, End | None]:
        """Tokens that are forced on an answer are taken without being drawn, where a step that computes them together
        is worth it, and once no step is in flight that draws one of them. They join those that were `made`; their text,
        and the end that they bring."""
        in_flight = sequence.num_known - len(sequence.token_ids)
        forced = self._forced(live, sequence, least=1 + in_flight + self._cost)
        if forced and in_flight:
            self._batcher.pause(sequence)
            return "", None
        text = ""
        for token_id in forced:
            made.append(token_id)
            self._stats.completion_tokens += 1
            more, ended = live.take(sequence, token_id)
            text += more
            if ended is not None:
                return text, ended
        self._batcher.go_on(sequence, len(forced))
        return text, None

    def _forced(self, live: Live, sequence: Sequence, least: int) -> list[int]:
        """The ids that are forced on an answer; none where they are fewer than `least`."""
        if live.logprobs or sequence.matcher is None:  # logprobs come with draws, as does the error of an id held back
            return []
        forced = _free(sequence.matcher.forced(), sequence)
        return forced if len(forced) >= least else []


def _free(forced: list[int], sequence: Sequence) -> list[int]:
    """Those before the first that min_tokens hold back."""
    options, position = sequence.options, len(sequence.token_ids)
    held_back = (i for i, id in enumerate(forced) if id in options.stop_ids and position + i < options.min_position)
    return forced[: next(held_back, len(forced))]
