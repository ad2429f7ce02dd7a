"""The loop between texts to be scored and a backend: enqueues steps ahead, and gathers the logprobs they bring."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tinyvllm_cli.engine.failures import as_failure, failed
from tinyvllm_cli.engine.score_batcher import ScoreBatcher, ScoredSequence
from tinyvllm_cli.engine.score_parts import take_parts
from tinyvllm_cli.engine.stats import EngineStats, Timeline
from tinyvllm_cli.errors import RequestError
from tinyvllm_cli.types import Completion, Failure, Request, Score, SlotOptions, Stats, Usage

if TYPE_CHECKING:
    from tinyvllm_cli.backends.base import Backend, Pending
    from tinyvllm_cli.text.codec import TextCodec
    from tinyvllm_cli.types import Event


@dataclass(slots=True)
class _Live:
    """A request that is queued or running."""

    request: Request
    sequences: list[ScoredSequence]  # one for each score
    left: int  # of them, not scored yet
    times: Timeline


class ScoringEngine:
    """Scores texts with the slots and blocks of a backend. To a loop it is an Engine: add() and step() until idle.

    A request is scored as a whole or, where it cannot be, gets an error; what the backend raises leaves step(), and the
    engine is of no use afterwards but for fail_running(). In its stats completion tokens are those that were scored.
    """

    def __init__(
        self,
        backend: Backend,
        codec: TextCodec,
        *,
        prefix_cache: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """clock, prefix_cache: as of Engine."""
        self.stats = EngineStats()
        self._backend = backend
        self._limits = backend.limits
        self._codec = codec
        self._clock = clock
        self._batcher = ScoreBatcher(self._limits, prefix_cache=prefix_cache)
        self._live: dict[int, _Live] = {}
        self._in_flight: deque[tuple[Pending, list[tuple[ScoredSequence, int]]]] = deque()
        self._done: list[Completion] = []  # ended without a step: events of the next one

    @property
    def idle(self) -> bool:
        """Nothing is waiting, running, in flight or still to be told."""
        return not (self._live or self._in_flight or self._done)

    @property
    def wants_more(self) -> bool:
        """The queue could run short within a step: add more, if there is more."""
        return len(self._batcher.waiting) + len(self._done) < self._limits.max_slots

    def add(self, request: Request) -> None:
        """Tokenize a request and queue it. One that cannot be scored becomes a Completion of the next step.

        ValueError where the request_id is still under way.
        """
        if request.request_id in self._live:
            raise ValueError(f"request_id {request.request_id} is under way already")
        try:
            live = self._accept(request)
        except Exception as error:
            self._done.append(failed(request, as_failure(error)))
            return
        if not live.left:
            self._done.append(_scored(live, live.times.arrival))
            return
        self._live[request.request_id] = live
        for sequence in live.sequences:
            if len(sequence.targets):
                self._batcher.add(sequence)

    def abort(self, request_id: int) -> None:
        """As of Engine."""
        live = self._live.pop(request_id, None)
        if live is not None:
            self._drop(live)
        self._done = [completion for completion in self._done if completion.request_id != request_id]

    def step(self) -> list[Event]:
        """Enqueue as many steps as the backend takes ahead, then wait for the oldest and read its logprobs.

        Requests that ended without a step are told at once, before the backend is asked for anything.
        """
        if self._done:
            done, self._done = self._done, []
            return list(done)
        while len(self._in_flight) < self._limits.max_in_flight and self._enqueue():
            pass
        assert self._in_flight or not self._live, "sequences wait and nothing runs that could make room for them"
        if not self._in_flight:
            return []
        pending, spans = self._in_flight.popleft()
        output = pending.result()
        rows = np.cumsum([count for _, count in spans])[:-1]
        token_ids, logprobs = np.split(output.token_ids[0], rows), np.split(output.logprobs[0], rows)
        events: list[Event] = []
        for (sequence, _), ids, values in zip(spans, token_ids, logprobs, strict=True):
            if not sequence.finished and (completion := self._land(sequence, ids.tolist(), values.tolist())):
                events.append(completion)
        return events

    def fail_running(self, message: str) -> list[Completion]:
        """End the requests that were begun, after a backend that failed under way; of the others nothing is told."""
        self._in_flight.clear()
        begun = [live for live in self._live.values() if live.times.first_slot is not None]
        return [self._fail(live, Failure("internal", message)) for live in begun]

    def check(self) -> None:
        """Assert the invariants of engine and batcher."""
        self._batcher.check()
        of_live = {sequence for live in self._live.values() for sequence in live.sequences}
        assert {*self._batcher.running, *self._batcher.waiting} <= of_live
        for live in self._live.values():
            assert live.left == sum(len(s.logprobs) < len(s.targets) for s in live.sequences) > 0
        assert len(self._in_flight) < max(self._limits.max_in_flight, 1)

    def _accept(self, request: Request) -> _Live:
        """Tokens of a request, and room for them. RequestError where it cannot be scored."""
        sequences = []
        for index, (ids, num_scored) in enumerate(take_parts(self._codec, request, self._limits.max_seq_len)):
            needed, held = self._batcher.memory.needed(len(ids) - 1), self._limits.num_blocks - 1
            if needed > held:
                field = "text" if request.continuations is None else "continuations"
                raise RequestError(
                    "prompt_too_long",
                    f"{field}: found {len(ids)} tokens, which need {needed} KV blocks of {self._limits.block_size} "
                    f"tokens, and memory holds {held}: shorten it",
                    field,
                )
            targets = np.array(ids[len(ids) - num_scored :], np.int32)
            options = SlotOptions(logprobs=True)
            sequences.append(ScoredSequence(request, ids[:-1], len(ids) - 1, len(ids), options, index, targets=targets))
        left = sum(len(sequence.targets) > 0 for sequence in sequences)
        return _Live(request, sequences, left, Timeline(self._clock()))

    def _enqueue(self) -> bool:
        """Hand the next step to the backend, if there is anything to compute."""
        batcher = self._batcher
        plan = batcher.plan()
        if plan is None:
            return False
        now = self._clock()
        for sequence in plan.admitted:
            assert sequence.slot is not None
            self._live[sequence.request.request_id].times.enter_slot(now)
            self._backend.bind(sequence.slot, sequence.token_ids, sequence.options)
        self._in_flight.append((self._backend.step(plan.batch), plan.spans))
        self.stats.count_step(len(batcher.running), 0, batcher.memory)
        batcher.release_computed()
        return True

    def _land(self, sequence: ScoredSequence, token_ids: list[int], logprobs: list[float]) -> Completion | None:
        """The greedy tokens and the logprobs of the next targets of a sequence; its request, where that ends it."""
        live = self._live[sequence.request.request_id]
        first = len(sequence.logprobs)
        for token_id, logprob in zip(token_ids, logprobs, strict=True):
            if token_id < 0 or not math.isfinite(logprob):
                message = "found NaN or infinity in the logits of the model"  # where first, depends on the steps
                return self._fail(live, Failure("nan_logits", message), spoilt=True)
        sequence.logprobs += logprobs
        sequence.greedy &= token_ids == sequence.targets[first : len(sequence.logprobs)].tolist()
        stats = self.stats
        stats.completion_tokens += len(logprobs)
        if len(sequence.logprobs) < len(sequence.targets):
            return None
        stats.prompt_tokens += sequence.max_len
        stats.cached_tokens += sequence.num_cached
        live.left -= 1
        if live.left:
            return None
        del self._live[sequence.request.request_id]
        return _scored(live, self._clock())

    def _fail(self, live: _Live, failure: Failure, *, spoilt: bool = False) -> Completion:
        """End a request; spoilt: what was computed for it may be what went wrong."""
        del self._live[live.request.request_id]
        self._drop(live, spoilt=spoilt)
        return failed(live.request, failure)

    def _drop(self, live: _Live, *, spoilt: bool = False) -> None:
        for sequence in live.sequences:
            self._batcher.drop(sequence, spoilt=spoilt)


def _scored(live: _Live, now: float) -> Completion:
    """A request all of whose texts have their scores, with the stats that have a meaning where no token is made."""
    request, times = live.request, live.times
    queue_s = 0.0 if times.first_slot is None else times.first_slot - times.arrival
    e2e_s = now - times.arrival
    num_scored = sum(len(sequence.targets) for sequence in live.sequences)
    return Completion(
        request_id=request.request_id,
        custom_id=request.custom_id,
        line=request.line,
        scores=tuple(Score(tuple(s.logprobs), s.greedy, request.continuations is None) for s in live.sequences),
        usage=Usage(sum(sequence.max_len for sequence in live.sequences), num_scored),
        stats=Stats(
            queue_s=queue_s,
            ttft_s=None,
            decode_s=None,
            e2e_s=e2e_s,
            tokens_per_s=num_scored / (e2e_s - queue_s) if e2e_s > queue_s else 0.0,
            cached_tokens=sum(sequence.num_cached for sequence in live.sequences),
        ),
        metadata_json=request.metadata_json,
        fingerprint=request.fingerprint,
    )
