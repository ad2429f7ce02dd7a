"""Where the host's time goes in the steps of an engine, call by call."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from tinyvllm_cli.backends.base import Backend, Pending
from tinyvllm_cli.backends.cpu.backend import CpuStep
from tinyvllm_cli.backends.gpu.in_flight import InFlight
from tinyvllm_cli.engine.batcher import Batcher
from tinyvllm_cli.engine.engine import Engine
from tinyvllm_cli.text.codec import Answer
from tinyvllm_cli.text.grammars import Grammars, Matcher
from tinyvllm_cli.types import Batch

# Of the engine's step().
PARTS = ("accept", "plan", "bind", "enqueue", "wait", "advance", "forced", "fill", "mask()", "text")


class Clock:
    """Seconds of the host in each part of its work, and what the steps were."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.steps = 0
        self.rows = 0  # that they computed
        self.decode_steps = 0  # of one row for each sequence
        self.masked_steps = 0

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        seconds, now = self.seconds, time.perf_counter

        def timed_call(*args: Any, **options: Any) -> Any:
            started = now()
            result = call(*args, **options)
            seconds[name] += now() - started
            return result

        return timed_call

    def enqueue(self, step: Callable[..., Any]) -> Callable[..., Any]:
        timed = self.timed("enqueue", step)

        def counted(backend: Backend, batch: Batch) -> Pending:
            self.steps += 1
            self.rows += len(batch.token_ids)
            self.decode_steps += len(batch.token_ids) == len(batch.slots)
            self.masked_steps += batch.mask_rows is not None
            pending: Pending = timed(backend, batch)
            return pending

        return counted

    @contextmanager
    def watching(self, backend: Backend) -> Iterator[None]:
        calls = [
            (Engine, "_take_in", "accept"),
            (Engine, "step", "step"),
            (Batcher, "plan", "plan"),
            (Grammars, "fill", "fill"),
        ]
        calls += [(Grammars, "advance", "advance"), (Matcher, "forced", "forced"), (Answer, "push_all", "text")]
        calls += [(type(backend), "bind", "bind")]
        for pending in (CpuStep, InFlight):
            calls += [(pending, "mask", "mask()"), (pending, "result", "wait")]
        with ExitStack() as patches:
            for owner, name, label in calls:
                patches.enter_context(patch.object(owner, name, self.timed(label, getattr(owner, name))))
            patches.enter_context(patch.object(type(backend), "step", self.enqueue(type(backend).step)))
            yield


COUNTS = ("steps", "decode only", "with masks", "rows a step")


def parts_table(clocks: dict[str, Clock]) -> Iterator[str]:
    """A table in Markdown."""
    names = ["host, ms a step", "step()", *PARTS, "rest", *COUNTS]
    yield f"| {' | '.join(names)} |"
    yield f"|{' --- |' * len(names)}"
    for name, clock in clocks.items():
        ms = {part: 1e3 * seconds / clock.steps for part, seconds in clock.seconds.items()}
        inside = [ms.get(part, 0.0) for part in PARTS]
        cells = [f"{value:.3f}" for value in (ms["step"], *inside, ms["step"] - sum(inside))]
        cells += [f"{clock.steps}", f"{clock.decode_steps}", f"{clock.masked_steps}"]
        cells += [f"{clock.rows / clock.steps:.1f}"]
        yield f"| {name} | {' | '.join(cells)} |"
