"""A model for the calls of several iterators and threads: their requests share its steps, each is told of its own."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

from tinyvllm_cli.engine.failures import as_failure
from tinyvllm_cli.engine.scoring import ScoringEngine
from tinyvllm_cli.errors import DeviceError, UsageError
from tinyvllm_cli.load import new_engine
from tinyvllm_cli.types import Completion, Delta, Event, Failure, Request
from tinyvllm_cli.uninterrupted import uninterrupted

if TYPE_CHECKING:
    from tinyvllm_cli.engine.engine import Engine
    from tinyvllm_cli.load import LoadedModel

Make: TypeAlias = Callable[[Any, int, int], Request]  # of what a caller gives, a request_id, and its place


@dataclasses.dataclass(eq=False, slots=True)
class Call:
    """What is wanted, and what has come of it."""

    make: Make
    scores: bool = False
    streams: bool = False  # the pieces of answers are wanted too
    open: set[int] = dataclasses.field(default_factory=set)  # request_ids that are not told yet
    ready: deque[Event] = dataclasses.field(default_factory=deque)


class Calls:
    """The calls under way on a model. Answers and scores need engines of two kinds, of which there is one at a time."""

    def __init__(self, loaded: LoadedModel) -> None:
        """loaded: with an engine that tells no deltas."""
        self._loaded = loaded
        self._engine: Engine | ScoringEngine = loaded.engine
        self._owners: dict[int, tuple[Call, int]] = {}  # by request_id: whose it is, and its place there
        self._streams: set[int] = set()  # those of them whose pieces are wanted
        self._dropped: deque[int] = deque()  # those of them that nobody waits for any more
        self._ids = itertools.count()
        self._lock = threading.RLock()
        self._fault: Exception | None = None  # why there are no further steps

    def events(self, call: Call, items: Iterator[Any]) -> Generator[Event]:
        """What comes of the items, request_id the place of each among them. Ends early where it is closed.

        Raises what the items raise, UsageError once this is closed, and the error that ended the engine before.
        """
        numbered, more = enumerate(items), True
        try:
            while more or call.open or call.ready:
                while call.ready:
                    yield call.ready.popleft()
                while more and self._wants_more(call):
                    place, item = next(numbered, (-1, None))
                    more = place >= 0
                    if more:
                        self._add(call, place, item)
                if call.open or more:  # the queue is full, perhaps with what other calls want
                    self._step(call)
        finally:
            # Perhaps inside a step, where the collector has found an iterator that nobody holds: this only takes note.
            self._dropped.extend(call.open)

    def close(self) -> None:
        """End what is under way; iterators that are open raise UsageError."""
        with self._lock:
            if self._fault is None:
                self._dropped.extend(self._owners)
                self._finish_steps()
                self._fault = UsageError("this LLM is closed: make another one")
            if not isinstance(self._engine, ScoringEngine):
                self._engine.close()

    def _wants_more(self, call: Call) -> bool:
        with self._lock:
            self._switch(scores=call.scores)
            return self._engine.wants_more

    def _add(self, call: Call, place: int, item: Any) -> None:
        with self._lock:
            self._switch(scores=call.scores)
            request_id = next(self._ids)
            try:
                request = call.make(item, request_id, place)
            except Exception as error:
                call.ready.append(_failed(place, as_failure(error), item))
                return
            self._owners[request_id] = call, place
            call.open.add(request_id)
            if not isinstance(self._engine, ScoringEngine):
                if call.streams:
                    self._streams.add(request_id)
                # Pieces cost the host about as much as all else: they are made while somebody wants some.
                self._engine.deltas = bool(self._streams)
            self._engine.add(request)

    def _step(self, call: Call) -> None:
        """Let the engine make a step, where nothing has come yet of what the call waits for."""
        with self._lock:
            if call.ready:
                return
            if self._fault is not None:
                raise self._fault
            self._make_step()

    def _make_step(self) -> None:
        while self._dropped:
            request_id = self._dropped.popleft()
            self._owners.pop(request_id, None)  # there is none where it was told since
            self._streams.discard(request_id)
            self._engine.abort(request_id)
        with uninterrupted():
            try:
                events = self._engine.step()
            except Exception as error:
                self._fail(error)
                return
            for event in events:
                call, place = self._owners[event.request_id]
                if isinstance(event, Completion):
                    self._end(event.request_id, dataclasses.replace(event, request_id=place))
                elif call.streams:
                    call.ready.append(Delta(place, event.index, event.token_ids, event.text))

    def _switch(self, *, scores: bool) -> None:
        """The engine of a kind; a new one takes nothing for known of the blocks that the other kind filled."""
        if self._fault is None and scores != isinstance(self._engine, ScoringEngine):
            self._finish_steps()
        if self._fault is not None:
            raise self._fault
        if scores == isinstance(self._engine, ScoringEngine):
            return
        loaded = self._loaded
        if not isinstance(self._engine, ScoringEngine):
            self._engine.close()
            self._engine = ScoringEngine(loaded.backend, loaded.codec, prefix_cache=loaded.config.prefix_cache)
        else:
            self._engine = new_engine(loaded.backend, loaded.codec, loaded.checkpoint, loaded.config, deltas=False)

    def _finish_steps(self) -> None:
        """Until nothing is under way; what comes of it waits for its calls."""
        while self._fault is None and not self._engine.idle:
            self._make_step()

    def _fail(self, error: Exception) -> None:
        """The engine cannot go on: all that is under way ends with an error."""
        self._fault = error
        if isinstance(error, DeviceError):
            failure = Failure("internal", f"the GPU failed under way: {error}")
        else:
            message = " ".join(f"the engine failed under way: {type(error).__name__}: {error}".split())
            failure = Failure("internal", message)
        for request_id, (_, place) in list(self._owners.items()):
            self._end(request_id, _failed(place, failure))

    def _end(self, request_id: int, completion: Completion) -> None:
        call, _ = self._owners.pop(request_id)
        call.open.discard(request_id)
        call.ready.append(completion)
        self._streams.discard(request_id)


def _failed(place: int, failure: Failure, item: object = None) -> Completion:
    own_id = getattr(item, "custom_id", None)
    custom_id = own_id if isinstance(own_id, str | int) else place
    return Completion(request_id=place, custom_id=custom_id, error=failure)
