"""The loop of `tinyvllm run`: feeds an engine and writes each answer the moment it is there."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from tinyvllm_cli.engine.engine import Engine
from tinyvllm_cli.io.feed import Feed
from tinyvllm_cli.io.progress import Display
from tinyvllm_cli.io.record import RunRecord
from tinyvllm_cli.io.results import ResultWriter
from tinyvllm_cli.io.summary import Progress, Summary, Tally, percentile
from tinyvllm_cli.types import Completion

WAIT_S = 1.0  # for a line while there is nothing else to do; then progress and record are looked at again

Hold = Callable[[], AbstractContextManager[object]]


class Job:
    """One run over one input. `hold` is a context in which a signal waits, so that no finished answer is lost."""

    def __init__(
        self,
        engine: Engine,
        feed: Feed,
        writer: ResultWriter,
        *,
        display: Display,
        record: RunRecord,
        total: int | None = None,
        hold: Hold = nullcontext,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """total: requests in the input, None where it is a pipe."""
        self.tally = Tally()
        self._engine = engine
        self._feed = feed
        self._writer = writer
        self._display = display
        self._record = record
        self._total = total
        self._hold = hold
        self._clock = clock
        self._started = clock()

    def run(self) -> None:
        """Until every line has its answer or its error."""
        while not (self._feed.exhausted and self._engine.idle):
            self._fill()
            if not self._engine.idle:
                with self._hold():
                    for event in self._engine.step():
                        if isinstance(event, Completion):
                            self._finish(event)
            self._show()

    def progress(self) -> Progress:
        """How far the run is, the tokens of unfinished answers included."""
        stats = self._engine.stats
        elapsed_s = self._clock() - self._started
        done, failed = self.tally.done, self.tally.failed
        return Progress(
            done=done,
            failed=failed,
            total=self._total,
            prompt_tokens=stats.prompt_tokens,
            completion_tokens=stats.completion_tokens,
            elapsed_s=elapsed_s,
            answer_tokens=self.tally.completion_tokens,
        )

    def summary(self, *, load_s: float, num_blocks: int) -> Summary:
        """What the run has come to; block 0 of num_blocks belongs to nobody."""
        tally, stats = self.tally, self._engine.stats
        wall_s = self._clock() - self._started
        return Summary(
            ok=tally.ok,
            failed=tally.failed,
            cut=tally.cut,
            prompt_tokens=tally.prompt_tokens,
            completion_tokens=tally.completion_tokens,
            tokens_per_s=tally.completion_tokens / wall_s if wall_s > 0 else 0.0,
            ttft_p50_s=percentile(tally.ttft_s, 50),
            ttft_p99_s=percentile(tally.ttft_s, 99),
            e2e_p50_s=percentile(tally.e2e_s, 50),
            e2e_p99_s=percentile(tally.e2e_s, 99),
            mean_slots_busy=stats.mean_slots_busy,
            peak_blocks=stats.peak_blocks,
            num_blocks=num_blocks - 1,
            load_s=load_s,
            wall_s=wall_s,
            failures=dict(tally.failures),
            first_failure=tally.first_failure,
        )

    def _fill(self) -> None:
        """Give the engine what it wants, without waiting for a pipe while there is work."""
        while self._engine.wants_more and not self._feed.exhausted:
            item = self._feed.pull(WAIT_S if self._engine.idle else 0.0)
            if item is None:
                return
            with self._hold():
                if isinstance(item, Completion):
                    self._finish(item)
                    self._show()
                else:
                    self._engine.add(item)

    def _finish(self, completion: Completion) -> None:
        self._writer.write(completion)
        self.tally.add(completion)
        if completion.error is not None and completion.error.detail is not None:
            self._record.add_traceback(completion.error.detail)

    def _show(self) -> None:
        self._display.update(self.progress())
        if self._record.due():
            self._record.write("running", self.progress().as_json())
