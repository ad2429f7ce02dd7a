"""A backend that notes what it is asked for and when: the seam itself, with a clock on both sides of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from tinyvllm_cli.backends.base import Backend, Pending
from tinyvllm_cli.backends.timing import Timing
from tinyvllm_cli.types import F32, I32, U32, BackendFacts, Batch, Limits, SlotOptions, StepOutput

Kind = Literal["prompt", "decode", "mixed"]


@dataclass(slots=True)
class MeteredStep:
    """One step; its times are seconds from the start of the run on the host's clock, but for the marks."""

    prompt_rows: int
    decode_rows: int
    enqueued: float  # when it was asked for
    begin: Any  # Timing's mark before all of its work
    end: Any = None  # after it

    @property
    def kind(self) -> Kind:
        return "decode" if not self.prompt_rows else "mixed" if self.decode_rows else "prompt"


class Meter:
    """The seam over another backend, whose every call it passes on.

    Batches are those of the engine, whose num_computed are counts: never -1, which only the device can resolve.
    """

    def __init__(self, backend: Backend, timing: Timing) -> None:
        self._backend = backend
        self._timing = timing
        self._prompt_lens = np.zeros(backend.limits.max_slots, np.int32)
        self.restart()

    def restart(self) -> None:
        """Forget all that was noted; times count from now on."""
        self._timing.restart()
        self._zero = time.perf_counter()
        self.read = 0.0
        self.steps: list[MeteredStep] = []
        self._bound: dict[int, tuple[SlotOptions, int]] = {}
        self.waited = 0.0  # seconds, for the device: until a step was enqueued that runs at once, or a result was there

    def now(self) -> float:
        """The clock of everything here, and of the engine above; `read` is what it said last."""
        self.read = time.perf_counter() - self._zero
        return self.read

    @property
    def first_slots(self) -> list[int]:
        """The slot of each sequence, in the order of their first ones.

        A sequence has its options for itself, and is bound with the same ones again where it was preempted.
        """
        return [slot for _, slot in self._bound.values()]

    @property
    def limits(self) -> Limits:
        return self._backend.limits

    def mask_memory(self) -> U32:
        return self._backend.mask_memory()

    @property
    def facts(self) -> BackendFacts:
        return self._backend.facts

    def bind(self, slot: int, token_ids: Sequence[int] | I32, options: SlotOptions) -> None:
        self._bound.setdefault(id(options), (options, slot))
        self._prompt_lens[slot] = len(token_ids)
        self._backend.bind(slot, token_ids, options)

    def step(self, batch: Batch) -> Pending:
        rows = len(batch.token_ids)
        in_prompts = np.clip(self._prompt_lens[batch.slots] - batch.num_computed, 0, np.diff(batch.query_start_loc))
        prompt_rows = int(in_prompts.sum())
        step = MeteredStep(prompt_rows, rows - prompt_rows, self.now(), self._timing.mark())
        pending = self._backend.step(batch)
        step.end = self._timing.mark()
        if self._timing.at_once:
            self.waited += self.now() - step.enqueued
        self.steps.append(step)
        return _Awaited(pending, self)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._backend.copy_blocks(pairs)

    def logits(self, batch: Batch) -> F32:
        return self._backend.logits(batch)

    def counts(self) -> dict[str, int]:
        return self._backend.counts()

    def close(self) -> None:
        self._backend.close()


class _Awaited:
    """A step under way, that tells the meter how long it was waited for."""

    def __init__(self, pending: Pending, meter: Meter) -> None:
        self._pending = pending
        self._meter = meter

    def mask(self, bits: U32) -> None:
        self._pending.mask(bits)

    def result(self) -> StepOutput:
        started = time.perf_counter()
        output = self._pending.result()
        self._meter.waited += time.perf_counter() - started
        return output
