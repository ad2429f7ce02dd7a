"""A model for the calls of several iterators and threads: their requests share its steps, each is told of its own.

Everything that touches the engine runs on one thread of its own, job after job. So threads need no lock, and what
breaks off in the caller's thread (^C, a signal handler that raises, a deadline) never leaves a step half done: the job
goes on to its end, and what came of it waits for those whom it concerns.
"""

from __future__ import annotations

import itertools
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ParamSpec, TypeAlias, TypeVar

from tinyvllm_cli.engine.scoring import ScoringEngine
from tinyvllm_cli.errors import DeviceError, RequestError, TinyvllmError, UsageError
from tinyvllm_cli.load import new_engine
from tinyvllm_cli.types import Completion, Delta, Event, Failure, Request
from tinyvllm_cli.worker import EndedError, Worker

if TYPE_CHECKING:
    from tinyvllm_cli.engine.engine import Engine
    from tinyvllm_cli.load import LoadedModel

P = ParamSpec("P")
T = TypeVar("T")
Make: TypeAlias = Callable[[Any, int, int], Request]  # of what a caller gives, a request_id, and its place

PULL_S = 0.01  # of asking for items while there is something to do; then the engine makes a step


@dataclass(eq=False, slots=True)
class Call:
    """What is wanted, and what has come of it."""

    make: Make
    scores: bool = False
    streams: bool = False  # the pieces of answers are wanted too
    listed: bool = False  # every item is to be told of, also where the engine fails under way
    open: set[int] = field(default_factory=set)  # request_ids that are not told yet
    ready: deque[Event] = field(default_factory=deque)
    room: int = 0  # for so many more items
    left: bool = False  # nobody waits for it any more
    failure: Failure | None = None  # of the engine, while something was under way


class Calls:
    """The calls under way on a model. Answers and scores need engines of two kinds, of which there is one at a time."""

    def __init__(self, loaded: LoadedModel) -> None:
        """loaded: with an engine that tells no deltas; closed with this, or when nobody holds this any more."""
        self._loaded = loaded
        self._engine: Engine | ScoringEngine = loaded.engine
        self._owners: dict[int, tuple[Call, int]] = {}  # by request_id: whose it is, and its place there
        self._streams: set[int] = set()  # those of them whose pieces are wanted
        self._left: deque[Call] = deque()  # calls that nobody waits for any more
        self._ids = itertools.count()
        self._fault: Callable[[], TinyvllmError] | None = None  # why there are no further steps
        self._turn: bool | None = None  # whether scores are next, or answers, where somebody waits for the other kind
        self._process = os.getpid()
        self._worker = Worker()
        self._give_back = weakref.finalize(self, _close, loaded, self._worker, self._process)
        self._give_back.atexit = False  # the end of the process gives all back, and somebody may still ask

    def events(self, call: Call, items: Iterator[Any]) -> Generator[Event]:
        """What comes of the items, request_id the place of each among them. Ends early where it is closed.

        Raises what the items raise, UsageError once this is closed, and why the engine ended before.
        """
        numbered, more = enumerate(items), True
        try:
            call.room = self._ask(call, [])
            while more or call.open or call.ready:
                while call.ready:
                    yield call.ready.popleft()
                requests: list[tuple[int, Request]] = []
                started = time.monotonic()
                if more:
                    more = self._pull(call, numbered, requests)
                asked_until = time.monotonic()
                while requests or call.open or more:
                    call.room = self._ask(call, requests)
                    requests = []
                    # Items that are slow to come hold up no answers: steps get as much time as they.
                    if call.ready or not call.open or time.monotonic() - asked_until > asked_until - started:
                        break
        finally:
            call.left = True
            self._left.append(call)

    @property
    def closed(self) -> bool:
        return not self._give_back.alive

    def close(self) -> None:
        """End what is under way; iterators that are open raise UsageError."""
        if self._process == os.getpid() and not self.closed:
            with suppress(UsageError):  # somebody else has closed it meanwhile
                self._do(self._end_all)
            self._give_back()

    # ---------------------------------------------------------------- on the caller's thread

    def _do(self, job: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Have a job done on the engine's thread."""
        if os.getpid() != self._process:
            raise UsageError("this LLM was made in another process: make one in this process")
        if self._worker.is_current:  # a finalizer that the collector runs there would wait for itself
            raise UsageError("this LLM is in the middle of a step: ask it from elsewhere")
        if self.closed:
            raise _closed()
        try:
            return self._worker.do(job, *args, **kwargs)
        except EndedError:  # it was closed meanwhile
            raise _closed() from None

    def _ask(self, call: Call, requests: list[tuple[int, Request]]) -> int:
        """_advance(), until the engine is of the kind that is wanted."""
        while (room := self._do(self._advance, call, requests)) is None:
            pass
        return room

    def _pull(self, call: Call, numbered: Iterator[tuple[int, Any]], requests: list[tuple[int, Request]]) -> bool:
        """Ask for as many items as there is room for, or fewer where they are slow; False where there are no more. One
        that is no request has its error at once."""
        started = time.monotonic()
        while len(requests) < call.room:
            place, item = next(numbered, (-1, None))
            if place < 0:
                return False
            try:
                if call.failure is not None:
                    call.ready.append(_failed(place, call.failure, item))
                else:
                    requests.append((place, call.make(item, next(self._ids), place)))
            except RequestError as error:
                call.ready.append(_failed(place, Failure(error.type, error.message, error.field), item))
            except Exception as error:  # what the item itself raises
                message = " ".join(f"it cannot be read: {type(error).__name__}: {error}".split())
                call.ready.append(_failed(place, Failure("invalid_value", message), item))
            if call.ready or ((call.open or requests) and time.monotonic() - started > PULL_S):
                break
        return True

    # ---------------------------------------------------------------- on the engine's thread

    def _advance(self, call: Call, requests: list[tuple[int, Request]]) -> int | None:
        """Add requests, and make a step where nothing has come yet of what the call waits for. Room for more; None
        where nothing was added, because answers are under way and scores are wanted, or the other way round: there was
        a step, and it is to be asked again."""
        self._forget_left()
        if call.left:
            return 0
        if call.failure is not None and call.listed:  # it is told of each item what became of it
            call.ready.extend(_failed(place, call.failure, request) for place, request in requests)
            return self._room()
        if self._fault is not None:
            raise self._fault()
        if not self._comes_to(scores=call.scores, anew=bool(requests)):
            self._make_step()
            return None
        for place, request in requests:
            self._add(call, place, request)
        if not call.ready:
            self._make_step()
        return self._room()

    def _room(self) -> int:
        """Items to ask for at a time: few, so that the next ones are asked for when slots are free."""
        wants_more = self._fault is not None or self._engine.wants_more
        return self._loaded.backend.limits.max_slots if wants_more else 0

    def _forget_left(self) -> None:
        while self._left:
            for request_id in self._left.popleft().open:
                if request_id in self._owners:
                    del self._owners[request_id]
                    self._streams.discard(request_id)
                    self._engine.abort(request_id)

    def _add(self, call: Call, place: int, request: Request) -> None:
        if not isinstance(self._engine, ScoringEngine):
            if call.streams:
                self._streams.add(request.request_id)
            # Pieces cost the host about as much as all else: they are made while somebody wants some.
            self._engine.deltas = bool(self._streams)
        self._engine.add(request)
        self._owners[request.request_id] = call, place
        call.open.add(request.request_id)

    def _make_step(self) -> None:
        try:
            events = self._engine.step()
        except Exception as error:
            self._fail(error)
            return
        for event in events:
            call, place = self._owners[event.request_id]
            if isinstance(event, Completion):
                self._tell(event.request_id, replace(event, request_id=place))
            elif call.streams:
                call.ready.append(Delta(place, event.index, event.token_ids, event.text))

    def _comes_to(self, *, scores: bool, anew: bool) -> bool:
        """Whether a call may go on with the engine, anew: with further requests. Who waits for the other kind is next:
        meanwhile nothing new begins."""
        is_scoring = isinstance(self._engine, ScoringEngine)
        if not self._engine.idle:
            if scores != is_scoring:
                self._turn = scores
            return scores == is_scoring and not (anew and self._turn not in (None, scores))
        self._turn = None
        if scores != is_scoring:
            self._switch()
        return True

    def _switch(self) -> None:
        """To an engine of the other kind: a new one, which takes nothing for known of the blocks that were filled."""
        loaded = self._loaded
        if not isinstance(self._engine, ScoringEngine):
            self._engine.close()
            self._engine = ScoringEngine(loaded.backend, loaded.codec, prefix_cache=loaded.config.prefix_cache)
        else:
            self._engine = new_engine(loaded.backend, loaded.codec, loaded.checkpoint, loaded.config, deltas=False)

    def _fail(self, error: Exception) -> None:
        """The engine cannot go on: all that is under way ends with an error."""
        of_device = isinstance(error, DeviceError)
        what = (
            f"the GPU failed under way: {error}" if of_device else f"the engine failed: {type(error).__name__}: {error}"
        )
        message = " ".join(what.split())
        kind = DeviceError if of_device else TinyvllmError
        self._fault = lambda: kind(f"{message}; make another LLM{' in another process' * of_device}")
        failure = Failure("internal", message)
        for request_id, (call, place) in list(self._owners.items()):
            call.failure = failure
            self._tell(request_id, _failed(place, failure))

    def _tell(self, request_id: int, completion: Completion) -> None:
        call, _ = self._owners.pop(request_id)
        call.ready.append(completion)  # first: another thread looks at both
        call.open.discard(request_id)
        self._streams.discard(request_id)

    def _end_all(self) -> None:
        if self._fault is None:
            for request_id in self._owners:
                self._engine.abort(request_id)
            self._owners.clear()
            while self._fault is None and not self._engine.idle:  # steps in flight
                self._make_step()
        self._fault = _closed
        if not isinstance(self._engine, ScoringEngine):
            self._engine.close()


def _closed() -> UsageError:
    return UsageError("this LLM is closed: make another one")


def _close(loaded: LoadedModel, worker: Worker, process: int) -> None:
    if os.getpid() == process:  # a forked one has no part in the device
        loaded.close()
        worker.end()


def _failed(place: int, failure: Failure, item: object = None) -> Completion:
    own_id = getattr(item, "custom_id", None)
    custom_id = own_id if isinstance(own_id, str | int) else place
    return Completion(request_id=place, custom_id=custom_id, error=failure)
