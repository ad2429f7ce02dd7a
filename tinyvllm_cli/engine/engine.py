"""The loop between requests and a backend: enqueues steps ahead and turns the tokens they bring into events."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TYPE_CHECKING

from tinyvllm_cli.engine.batcher import Batcher
from tinyvllm_cli.engine.failures import NAN_LOGITS, as_failure, failed, no_token
from tinyvllm_cli.engine.forcing import Forcing
from tinyvllm_cli.engine.intake import Intake
from tinyvllm_cli.engine.live import End, Live, answered
from tinyvllm_cli.engine.obeying import BESIDE_FROM, Obeying, follow
from tinyvllm_cli.engine.plan import Plan, Step
from tinyvllm_cli.engine.stats import EngineStats
from tinyvllm_cli.errors import RequestError
from tinyvllm_cli.types import U32, Completion, Delta, Event, Failure, Request, Sequence

if TYPE_CHECKING:
    from tinyvllm_cli.backends.base import Backend
    from tinyvllm_cli.text.codec import TextCodec
    from tinyvllm_cli.text.grammars import Matcher


# Requests that a step takes in while the backend computes, though the queue has enough for the next one: more than end
# in most steps, and few enough to be done by its end.
TAKEN_IN_AHEAD = 16


class Engine:
    """Answers requests in fixed slots. Every loop (a run, a chat) is add() and step() until idle.

    One bad request never stops the others: its completion carries the error, also where only one of its answers went
    wrong. What the backend raises is no request's fault and leaves step(); the engine is of no use afterwards but for
    fail_running().
    """

    def __init__(
        self,
        backend: Backend,
        codec: TextCodec,
        *,
        eos_token_ids: tuple[int, ...],
        run_seed: int = 0,
        prefix_cache: bool = True,
        deltas: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock` gives seconds and never goes back; `run_seed` seeds the requests that bring no seed; prefix_cache:
        whether what was computed for one request is used for others; deltas: whether step() tells of unfinished
        answers, which takes the host about as long as all else. It may be set later: of requests that were added while
        it was off, the text is told at their end."""
        self.stats = EngineStats()
        self.deltas = deltas
        self._backend = backend
        self._limits = backend.limits
        self._codec = codec
        self._intake = Intake(codec, self._limits, eos_token_ids=eos_token_ids, run_seed=run_seed, clock=clock)
        self._clock = clock
        self._batcher = Batcher(self._limits, prefix_cache=prefix_cache)
        self._forcing = Forcing(self._batcher, self.stats)
        self._live: dict[int, Live] = {}
        self._in_flight: deque[Step] = deque()
        self._beside = ThreadPoolExecutor(1)  # starts no thread before it has work
        self._obeying: Obeying | None = None
        self._added: dict[int, Request] = {}  # to be tokenized, by request_id
        self._done: list[Completion] = []  # ended without a step: events of the next one

    @property
    def idle(self) -> bool:
        """Nothing is waiting, running, in flight or still to be told."""
        return not (self._live or self._in_flight or self._added or self._done)

    @property
    def wants_more(self) -> bool:
        """The queue could run short within a step: add more, if there is more."""
        return len(self._batcher.waiting) + len(self._added) + len(self._done) < self._limits.max_slots

    def add(self, request: Request) -> None:
        """Queue a request, which a step tokenizes with others that were added: the next one, or, where many wait before
        it, a later one, while the backend computes. One that cannot be answered becomes a Completion then.

        ValueError where the request_id is still under way.
        """
        if request.request_id in self._live or request.request_id in self._added:
            raise ValueError(f"request_id {request.request_id} is under way already")
        self._added[request.request_id] = request

    def abort(self, request_id: int) -> None:
        """Forget a request, wherever it stands, without a Completion; one that is unknown or told is no error."""
        self._added.pop(request_id, None)
        live = self._live.pop(request_id, None)
        if live is not None:
            self._finish(live)
        self._done = [completion for completion in self._done if completion.request_id != request_id]

    def step(self) -> list[Event]:
        """Enqueue as many steps as the backend takes ahead, then wait for the oldest and read its tokens.

        Requests that ended without a step are told at once, before the backend is asked for anything.
        """
        self._take_in(0)
        if self._done:
            done, self._done = self._done, []
            return list(done)
        events: list[Event] = []
        while len(self._in_flight) < self._limits.max_in_flight:
            if len(self._in_flight) > 1 and self._in_flight[-1].masked:
                break
            if self._obeying is None:
                events += self._mask_oldest()
            plan = self._batcher.plan()  # while masks are made, where they are made beside
            if self._obeying is not None:
                events += self._mask_oldest()
            if plan is None:
                break
            self._enqueue(plan)
            self._take_in(TAKEN_IN_AHEAD)
        events += self._mask_oldest()
        assert self._in_flight or not self._live, "sequences wait and nothing runs that could make room for them"
        if not self._in_flight:
            return events
        step = self._in_flight.popleft()
        output = step.pending.result()
        token_ids = output.token_ids[0].tolist()
        for row in step.told:
            sequence = step.sampled[row]
            if token_ids[row] >= 0 and not sequence.finished:
                self._live[sequence.request.request_id].logprobs[sequence.index].push(output, row)
        events += self._land(step.sampled, token_ids)
        return events if self._obeying is not None else events + self._mask_oldest()

    def fail_running(self, message: str) -> list[Completion]:
        """End the requests that were begun, after a backend that failed under way; of the others nothing is told."""
        self.close()
        self._in_flight.clear()
        failure = Failure("internal", message)
        preempted = [sequence for sequence in self._batcher.waiting if sequence.num_preempted]
        begun = dict.fromkeys(sequence.request.request_id for sequence in (*self._batcher.running, *preempted))
        return [self._close(failed(self._live[request_id].request, failure)) for request_id in begun]

    def close(self) -> None:
        """Let go of what is under way beside: no memory of the backend is written to any more."""
        self._beside.shutdown()  # which waits
        self._obeying = None

    def check(self) -> None:
        """Assert the invariants of engine and batcher."""
        self._batcher.check()
        under_way = {*self._batcher.running, *self._batcher.waiting}
        assert under_way == {s for live in self._live.values() for s in live.sequences if not s.finished}
        for request_id, live in self._live.items():
            assert live.request.request_id == request_id
            assert [s.index for s in live.sequences] == list(range(live.request.params.n))
            assert {s.index for s in live.sequences if s.finished} == {choice.index for choice in live.choices}
            assert len(live.choices) < len(live.sequences)
        assert len(self._in_flight) < max(self._limits.max_in_flight, 1)

    def _take_in(self, ahead: int) -> None:
        """What was added joins the queue, or has ended: as many as the next step may admit, or `ahead` more, so that
        neither the first step waits for what is not its own nor a later one for many at once."""
        count = max(self._limits.admit_slots - len(self._batcher.waiting), ahead)
        added = list(islice(self._added.values(), count))
        if not added:
            return
        for request in added:
            del self._added[request.request_id]
        for request, live in zip(added, self._intake.accept(added, deltas=self.deltas), strict=True):
            if isinstance(live, Exception):
                self._done.append(failed(request, as_failure(live)))
            elif request.params.max_tokens == 0:
                self._done.append(answered(live))
            else:
                self._live[request.request_id] = live
                for sequence in live.sequences:
                    self._batcher.add(sequence)

    def _enqueue(self, plan: Plan) -> None:
        """Hand the next step to the backend."""
        now = self._clock()
        for sequence, slot in zip(plan.admitted, plan.slots, strict=True):
            if not sequence.finished:
                self._live[sequence.request.request_id].times.enter_slot(now)
            self._backend.bind(slot, sequence.known_ids, sequence.options)
        if plan.copies:
            self._backend.copy_blocks(plan.copies)
        self._in_flight.append(Step(self._backend.step(plan.batch), plan.sampled, plan.told, plan.masked))
        batcher = self._batcher
        self.stats.count_step(batcher.num_slots_busy, batcher.preemptions, batcher.memory)

    def _land(self, sampled: list[Sequence], token_ids: list[int]) -> list[Event]:
        """What the tokens of a step bring. The loop runs for every token of every answer: it calls little."""
        events: list[Event] = []
        obeying: list[tuple[Live, Sequence, str]] = []  # those under a constraint that go on
        now = self._clock()
        for sequence, token_id in zip(sampled, token_ids, strict=True):
            if sequence.finished:  # it ended, or was aborted, after this step was enqueued
                continue
            live = self._live[sequence.request.request_id]
            if token_id < 0:
                failure = no_token(token_id, sequence.num_output)
                events.append(self._close(failed(live.request, failure), spoilt=token_id == NAN_LOGITS))
                continue
            self.stats.completion_tokens += 1
            if live.times.first_token is None:
                live.times.first_token = now
                self.stats.prompt_tokens += sequence.prompt_len
                self.stats.cached_tokens += sequence.num_cached
            sequence.token_ids.append(token_id)
            text = ""
            ended: End | None = None
            if token_id in live.ends:
                ended = "stop"
            elif not live.late:
                answer = live.answers[sequence.index]
                try:
                    text = answer.push(token_id)
                    ended = None if answer.stopped_by is None else "stop"
                except Exception as error:
                    events.append(self._close(failed(live.request, as_failure(error))))
                    continue
            if ended is None and sequence.matcher is not None:
                obeying.append((live, sequence, text))
                continue
            if ended is None and len(sequence.token_ids) == sequence.max_len:
                ended = "length"
            if ended is not None:
                events += self._tell(live, sequence, (token_id,), text, ended, now)
            elif self.deltas:
                events.append(Delta(live.request.request_id, sequence.index, (token_id,), text))
        return events + self._obey(obeying, now) if obeying else events

    def _obey(self, obeying: list[tuple[Live, Sequence, str]], now: float) -> list[Event]:
        """Answers under a constraint go on with their last tokens, which brought these texts."""
        steps = [(sequence.matcher, sequence.token_ids[-1]) for _, sequence, _ in obeying if sequence.matcher]
        waits = bool(self._in_flight) and self._in_flight[0].masked
        if waits and len(steps) >= BESIDE_FROM and not (self.deltas or self._forcing.is_worth_a_look()):
            matchers, bits = self._masking()
            followed = self._beside.submit(follow, self._codec.grammars, steps, matchers, bits)
            self._obeying = Obeying(obeying, now, bits, followed)
            return []
        return self._heed(obeying, self._codec.grammars.advance(steps), now)

    def _heed(
        self, obeying: list[tuple[Live, Sequence, str]], outcomes: list[bool | RequestError], now: float
    ) -> list[Event]:
        """Answers have gone on: what came of it."""
        events: list[Event] = []
        forces = self._forcing.is_worth_a_look()
        for (live, sequence, text), outcome in zip(obeying, outcomes, strict=True):
            if sequence.finished:  # with another answer of its request
                continue
            if outcome is False and len(sequence.token_ids) < sequence.max_len and not (forces or self.deltas):
                continue
            made, pieces = [sequence.token_ids[-1]], [text]
            try:
                if isinstance(outcome, RequestError):
                    raise outcome
                ended = live.ended(sequence, finished=outcome)
                if ended is None and forces:
                    more, ended = self._forcing.force(live, sequence, made)
                    pieces.append(more)
            except Exception as error:
                events.append(self._close(failed(live.request, as_failure(error))))
                continue
            if ended is not None or self.deltas:
                events += self._tell(live, sequence, tuple(made), "".join(pieces), ended, now)
        return events

    def _tell(
        self, live: Live, sequence: Sequence, made: tuple[int, ...], text: str, ended: End | None, now: float
    ) -> list[Event]:
        """An answer got tokens, which brought this text and may have ended it."""
        choice = None
        if ended is not None:
            try:
                rest, choice = live.end(sequence, ended, self._codec.token_bytes)
            except Exception as error:
                return [self._close(failed(live.request, as_failure(error)))]
            text += rest
        events: list[Event] = []
        if self.deltas:
            events.append(Delta(live.request.request_id, sequence.index, made, text))
        if choice is not None:
            self._batcher.finish(sequence)
            live.choices.append(choice)
            if len(live.choices) == len(live.sequences):
                live.times.last_token = now
                events.append(self._close(answered(live)))
        return events

    def _mask_oldest(self) -> list[Event]:
        """Where the next step to be read waits for its mask, it gets it: all tokens before it are known. A request that
        has no mask ends."""
        if not self._in_flight or not self._in_flight[0].masked:
            return []
        step, obeying, self._obeying = self._in_flight[0], self._obeying, None
        sequences = [step.sampled[row] for row in step.masked]
        if obeying is None:
            matchers, bits = self._masking()
            errors = self._codec.grammars.fill(matchers, bits)
        else:
            bits, (outcomes, errors) = obeying.bits, obeying.followed.result()
        step.pending.mask(bits)
        step.masked = []
        events = [] if obeying is None else self._heed(obeying.answers, outcomes, obeying.now)
        for place, error in errors.items():
            if not sequences[place].finished:  # with another one of its request
                events.append(self._close(failed(sequences[place].request, as_failure(error))))
        return events

    def _masking(self) -> tuple[list[Matcher | None], U32]:
        """Whose masks the oldest step waits for, and where they are to be made."""
        step = self._in_flight[0]
        sequences = [step.sampled[row] for row in step.masked]
        matchers = [None if sequence.finished else sequence.matcher for sequence in sequences]
        return matchers, self._backend.mask_memory()[: len(matchers)]

    def _close(self, completion: Completion, *, spoilt: bool = False) -> Completion:
        self._finish(self._live.pop(completion.request_id), spoilt=spoilt)
        return completion

    def _finish(self, live: Live, *, spoilt: bool = False) -> None:
        """End what is under way of a request; spoilt: what was computed for it may be what went wrong."""
        for sequence in reversed(live.sequences):
            if not sequence.finished:
                self._batcher.finish(sequence, spoilt=spoilt)
