"""What the engine counts: the times of one request, and the work of all of them."""

from __future__ import annotations

from dataclasses import dataclass

from tinyvllm_cli.engine.kv_memory import KVMemory
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

    def stats(self, completion_tokens: int, cached_tokens: int) -> Stats:
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
            cached_tokens=cached_tokens,
        )


@dataclass(slots=True)
class EngineStats:
    """The work of an engine since it was made."""

    steps: int = 0
    slot_steps: int = 0  # slots taken, summed over the steps, as all that ends in _steps
    prompt_tokens: int = 0  # of requests that got a first token
    cached_tokens: int = 0  # of those, whose KV was found instead of computed
    completion_tokens: int = 0  # tokens read back, those of answers that failed later included
    peak_blocks: int = 0  # KV blocks held at once, at most; a shared one counts once
    block_steps: int = 0
    peak_shared_blocks: int = 0  # of several owners
    unwritten_steps: int = 0  # positions in held blocks that nothing was written to
    block_size: int = 1
    preemptions: int = 0  # sequences that gave their blocks back before their end
    evictions: int = 0  # cached blocks that were given away

    def count_step(self, slots_taken: int, preemptions: int, memory: KVMemory) -> None:
        """How things stand with the memory after a step was laid out."""
        pool = memory.pool
        self.steps += 1
        self.slot_steps += slots_taken
        self.peak_blocks = max(self.peak_blocks, pool.num_owned)
        self.block_steps += pool.num_owned
        self.peak_shared_blocks = max(self.peak_shared_blocks, pool.num_shared)
        self.unwritten_steps += memory.unwritten
        self.block_size = memory.block_size
        self.preemptions, self.evictions = preemptions, pool.evictions

    @property
    def mean_slots_busy(self) -> float:
        """Slots taken, mean over the steps; 0 before the first step."""
        return self.slot_steps / self.steps if self.steps else 0.0

    @property
    def mean_blocks(self) -> float:
        """KV blocks held, mean over the steps; 0 before the first step."""
        return self.block_steps / self.steps if self.steps else 0.0

    @property
    def unwritten_share(self) -> float:
        """Of the positions in held blocks, those that nothing was written to: both are means over the steps."""
        return self.unwritten_steps / (self.block_steps * self.block_size) if self.block_steps else 0.0

    @property
    def hit_rate(self) -> float:
        """Prompt tokens whose KV was found instead of computed, of all."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0
