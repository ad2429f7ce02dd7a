"""The loop over the lines of a file: feeds an engine and writes each answer the moment it is there."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from tinyvllm_cli.engine.stats import EngineStats
from tinyvllm_cli.errors import DeviceError, InputError
from tinyvllm_cli.io.feed import Feed
from tinyvllm_cli.io.ordered import Order
from tinyvllm_cli.io.progress import Display
from tinyvllm_cli.io.record import RunRecord
from tinyvllm_cli.io.results import ResultWriter
from tinyvllm_cli.io.summary import Progress, Summary, Tally, place
from tinyvllm_cli.said import warn
from tinyvllm_cli.types import Completion, Event, Failure, Request

WAIT_S = 1.0  # for a line while there is nothing else to do; then progress and record are looked at again

# What is read between two steps at most, so that answers under way go on beside bad lines and long prompts. Counts, not
# seconds: the same file is shared out to steps in the same way each time. Both are far more than a step can start.
FILL_ITEMS = 256
FILL_SIZE = 200_000  # characters or ids to tokenize

Hold = Callable[[], AbstractContextManager[object]]


class Answering(Protocol):
    """An Engine, or another that ends each request with a Completion (engine/engine.py says what its methods do)."""

    stats: EngineStats

    @property
    def idle(self) -> bool: ...

    @property
    def wants_more(self) -> bool: ...

    def add(self, request: Request) -> None: ...

    def step(self) -> list[Event]: ...

    def fail_running(self, message: str) -> list[Completion]: ...


class Job:
    """One run over one input. `hold` is a context in which a signal waits, so that no finished answer is lost."""

    def __init__(
        self,
        engine: Answering,
        feed: Feed,
        writer: ResultWriter,
        *,
        display: Display,
        record: RunRecord,
        tally: Tally | None = None,
        total: int | None = None,
        order: Order | None = None,
        tell_failures: bool = False,
        hold: Hold = nullcontext,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """tally: counts what is finished; None: a plain one. total: requests in the input, None where it is a pipe.
        order: where answers leave in that of the input. tell_failures: an output line cannot say why there is no
        answer."""
        self.tally = Tally() if tally is None else tally
        self._engine = engine
        self._feed = feed
        self._writer = writer
        self._display = display
        self._record = record
        self._total = total
        self._order = order
        self._tell_failures = tell_failures
        self._hold = hold
        self._clock = clock
        self._started = clock()

    def run(self) -> None:
        """Until every line has its answer or its error.

        DeviceError where the device fails under way: what was being answered has got its error, what waited no line.
        InputError where the input was cut: what could be read of it has its answers.
        """
        try:
            while not (self._feed.exhausted and self._engine.idle):
                self._fill()
                self._step()
                self._show()
        except InputError:
            while not self._engine.idle:
                self._step()
                self._show()
            raise

    def write_rest(self) -> None:
        """For a run that ends here: write what is finished and waits for its turn. Errors as those of the writer."""
        if self._order is not None and not self._tell_failures:  # a line of text is known by its place alone
            for completion in self._order.rest():
                self._write(completion)

    def progress(self) -> Progress:
        """How far the run is."""
        return self._progress(self._engine.stats.completion_tokens)

    def result(self, *, load_s: float, num_blocks: int) -> tuple[Progress, Summary]:
        """What the run has come to, without the answers that have no end; block 0 of num_blocks belongs to nobody."""
        progress = self._progress(self.tally.completion_tokens)
        return progress, self.tally.summary(progress, self._engine.stats, load_s=load_s, num_blocks=num_blocks)

    def _progress(self, made_tokens: int) -> Progress:
        return Progress(
            done=self.tally.done,
            failed=self.tally.failed,
            total=self._total,
            prompt_tokens=self.tally.prompt_tokens,
            completion_tokens=self.tally.completion_tokens,
            made_tokens=made_tokens,
            elapsed_s=self._clock() - self._started,
        )

    def _fill(self) -> None:
        """Give the engine what it wants, without waiting for a pipe while there is work, nor for much reading."""
        size = 0
        for _ in range(FILL_ITEMS):
            if size >= FILL_SIZE or self._feed.exhausted or not self._engine.wants_more:
                return
            if self._order is not None and self._order.full:
                return
            item = self._feed.pull(WAIT_S if self._engine.idle else 0.0)
            if item is None:
                return
            with self._hold():
                if self._order is not None:
                    self._order.join(item.request_id)
                if isinstance(item, Completion):
                    self._finish(item)
                else:
                    self._engine.add(item)
                    size += _size(item)

    def _step(self) -> None:
        """Until the model has made a step: before it, the engine tells what ended without one."""
        steps = self._engine.stats.steps
        while not self._engine.idle and self._engine.stats.steps == steps:
            with self._hold():
                try:
                    events = self._engine.step()
                except DeviceError as error:
                    for completion in self._engine.fail_running(f"the GPU failed under way: {error}"):
                        self._finish(completion)
                    self.write_rest()
                    raise
                for event in events:
                    if isinstance(event, Completion):
                        self._finish(event)

    def _finish(self, completion: Completion) -> None:
        for ready in [completion] if self._order is None else self._order.finish(completion):
            self._write(ready)

    def _write(self, completion: Completion) -> None:
        self._writer.write(completion)
        self.tally.add(completion)
        if completion.error is not None:
            self._tell(place(completion), completion.error)

    def _tell(self, place: str, failure: Failure) -> None:
        if self._tell_failures:
            warn(f"{place}: {failure.type}: {failure.message}")
        if failure.detail is not None:
            self._record.add_traceback(failure.detail)

    def _show(self) -> None:
        self._display.update(self.progress())
        if self._record.due():
            self._record.write("running", self.progress().as_json())


def _size(request: Request) -> int:
    """Characters or ids to tokenize: a context with each of its continuations."""
    prompt = len(request.prompt or "") + len(request.prompt_token_ids or ())
    messages = sum(len(message.content) for message in request.messages or ())
    return prompt + messages + sum(prompt + len(continuation) for continuation in request.continuations or ())
