"""A workload through the engine, once: its answers, and when everything happened."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from tinyvllm_cli.backends.timing import Timing
from tinyvllm_cli.bench.meter import Meter, MeteredStep
from tinyvllm_cli.bench.workloads import failed
from tinyvllm_cli.engine.engine import Engine
from tinyvllm_cli.text.codec import TextCodec
from tinyvllm_cli.types import Completion, Request

Hold = Callable[[], AbstractContextManager[object]]
Watch = Callable[[int, float], None]  # gets the output tokens so far, and the seconds


def unwatched(tokens: int, seconds: float) -> None:
    """A Watch that shows nothing."""


@dataclass(frozen=True, slots=True)
class TimedRequest:
    """One answer; seconds from the start of the run."""

    completion: Completion
    arrival: float  # in the queue
    slot: int | None  # None: it needed none, as it asked for no token


@dataclass(frozen=True, slots=True)
class TimedStep:
    """One step; its seconds on the device are from the start of the run."""

    metered: MeteredStep
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class Trial:
    """One run over all requests."""

    seconds: float  # from the first request given to the last answer
    requests: list[TimedRequest]  # in the order in which they were given
    steps: list[TimedStep]
    engine_s: float  # in the engine's step(), waiting included
    waited_s: float  # for results
    peak_blocks: int
    mean_slots_busy: float
    cached_tokens: int  # of the prompts, whose KV was found instead of computed
    preemptions: int
    counts: dict[str, int]  # launches by the kernel's name

    @property
    def output_tokens(self) -> int:
        """Ids in the answers."""
        return sum(len(choice.token_ids) for timed in self.requests for choice in timed.completion.choices)


def run_trial(
    meter: Meter,
    timing: Timing,
    codec: TextCodec,
    requests: Sequence[Request],
    *,
    eos_token_ids: tuple[int, ...],
    prefix_cache: bool,
    hold: Hold,
    watch: Watch = unwatched,
) -> Trial:
    """Answer all requests as `run` does. TinyvllmError where one fails, or the device does.

    hold: a context in which a signal waits, so that no call of the device is torn. watch: called after every step,
    outside of what counts as the engine's time.
    """
    counts = Counter(meter.counts())
    meter.restart()
    engine = Engine(meter, codec, eos_token_ids=eos_token_ids, prefix_cache=prefix_cache, deltas=False, clock=meter.now)
    answers = _Answers(engine, meter)
    answers.run(requests, hold, watch)
    seconds = meter.now()
    # First in, first out: a slot is given to one request after another that asks for tokens.
    slots = iter(meter.first_slots)
    timed = [
        TimedRequest(
            answers.done[request.request_id],
            answers.arrivals[request.request_id],
            next(slots) if request.params.max_tokens else None,
        )
        for request in requests
    ]
    assert next(slots, None) is None, "more sequences than requests"
    stats = answers.engine.stats
    return Trial(
        seconds=seconds,
        requests=timed,
        steps=[TimedStep(step, timing.seconds(step.begin), timing.seconds(step.end)) for step in meter.steps],
        engine_s=answers.engine_s,
        waited_s=meter.waited,
        peak_blocks=stats.peak_blocks,
        mean_slots_busy=stats.mean_slots_busy,
        cached_tokens=stats.cached_tokens,
        preemptions=stats.preemptions,
        counts=dict(Counter(meter.counts()) - counts),
    )


class _Answers:
    """The loop over an engine, which gets its requests as those of a file reach it in a run."""

    def __init__(self, engine: Engine, meter: Meter) -> None:
        self.engine = engine
        self.arrivals: dict[int, float] = {}
        self.done: dict[int, Completion] = {}
        self.engine_s = 0.0
        self._meter = meter

    def run(self, requests: Iterable[Request], hold: Hold, watch: Watch) -> None:
        waiting = iter(requests)
        more = True
        while more or not self.engine.idle:
            while more and self.engine.wants_more:
                request = next(waiting, None)
                more = request is not None
                if request is not None:
                    self.engine.add(request)
                    self.arrivals[request.request_id] = self._meter.read  # the last thing that add() asks for
            if not self.engine.idle:
                self._step(hold)
                watch(self.engine.stats.completion_tokens, self._meter.read)

    def _step(self, hold: Hold) -> None:
        started = self._meter.now()
        with hold():
            events = self.engine.step()
        self.engine_s += self._meter.now() - started
        for event in events:
            if isinstance(event, Completion):
                if event.error is not None:
                    raise failed(event)
                self.done[event.request_id] = event
