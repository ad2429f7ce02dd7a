"""What the engine counts: the times of one request, and the work of all of them."""

from __future__ import annotations

from dataclasses import dataclass

from tinyvllm_cli.types import Stats


@dataclass(slots=True)
class Timeline:
    """When things happened to one request, in seconds on the engine's clock; None: not yet."""

    arrival: float
    first_slot: float | None = None
    first_token: float | None = None
    last_token: float | None = None

    def enter_slot(self, now: float) -> None:
        """The request got a slot; of several times the first counts."""
        if self.first_slot is None:
            self.first_slot = now

    def stats(self, completion_tokens: int) -> Stats:
        """The request's stats once it has ended; with no token made only its place in the queue has a meaning."""
        queue_s = 0.0 if self.first_slot is None else self.first_slot - self.arrival
        if self.first_token is None or self.last_token is None:
            return Stats(queue_s=queue_s, ttft_s=None, decode_s=None, e2e_s=queue_s, tokens_per_s=0.0)
        e2e_s = self.last_token - self.arrival
        busy_s = e2e_s - queue_s
        return Stats(
            queue_s=queue_s,
            ttft_s=self.first_token - self.arrival,
            decode_s=self.last_token - self.first_token,
            e2e_s=e2e_s,
            tokens_per_s=completion_tokens / busy_s if busy_s > 0 else 0.0,  # a coarse clock must not give Infinity
        )


@dataclass(slots=True)
class EngineStats:
    """The work of an engine since it was made."""

    steps: int = 0
    slot_steps: int = 0  # slots taken, summed over the steps
    peak_blocks: int = 0  # KV blocks held at once, at most
    prompt_tokens: int = 0  # of requests that got a first token
    completion_tokens: int = 0  # tokens read back, those of answers that failed later included

    @property
    def mean_slots_busy(self) -> float:
        """Slots taken, mean over the steps; 0 before the first step."""
        return self.slot_steps / self.steps if self.steps else 0.0
