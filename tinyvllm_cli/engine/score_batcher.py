"""Which tokens of which sequences run in the next step where nothing is drawn: tokens that are known get logprobs."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from tinyvllm_cli.engine.kv_memory import KVMemory
from tinyvllm_cli.types import I32, Batch, Limits, Sequence


@dataclass(slots=True, eq=False, kw_only=True)
class ScoredSequence(Sequence):
    """One text to score. Its token_ids are all but the last: those that have rows."""

    targets: I32  # [N] ids at its end, each of which the row before it scores
    logprobs: list[float] = field(default_factory=list)  # of those that were read back
    greedy: bool = True  # as far as they were read back

    @property
    def first_row(self) -> int:
        return self.prompt_len - len(self.targets)


class Chunk(NamedTuple):
    """What a step computes of a sequence."""

    sequence: ScoredSequence
    begin: int  # position of its first row
    end: int

    @property
    def targets(self) -> I32:
        """Of its last rows."""
        first = self.sequence.first_row
        return self.sequence.targets[max(self.begin - first, 0) : max(self.end - first, 0)]


@dataclass(frozen=True, slots=True)
class ScorePlan:
    """One step to enqueue, and whose rows are read back from it."""

    admitted: list[ScoredSequence]  # to be bound to their slots before the step
    batch: Batch
    spans: list[tuple[ScoredSequence, int]]  # consecutive ones of its R rows


class ScoreBatcher:
    """Chunked prefill of all that run, in the order of arrival, within two budgets of a step: its rows, and those that
    are scored, of which a backend takes as many as it has slots.

    Blocks are promised to a sequence for its whole length when it gets its slot, as that is known: so nobody waits for
    blocks under way, and nobody has to give any back. Prefixes are shared as in engine/batcher.py, up to the first row
    that is scored: those behind it are computed for their logprobs, whatever is cached of them.
    """

    def __init__(self, limits: Limits, *, prefix_cache: bool = True) -> None:
        self.memory = KVMemory(limits, prefix_cache=prefix_cache)
        self.waiting: deque[ScoredSequence] = deque()
        self.running: list[ScoredSequence] = []  # in the order of admission
        self._limits = limits
        self._free_slots = list(range(limits.max_slots))[::-1]  # a stack, lowest on top

    def add(self, sequence: ScoredSequence) -> None:
        """Queue a sequence that has targets, and whose blocks fit into an empty pool."""
        assert len(sequence.targets) and self.memory.needed(sequence.prompt_len) < self._limits.num_blocks, sequence
        self.waiting.append(sequence)

    def plan(self) -> ScorePlan | None:
        """Lay out the next step; None where nothing is left to compute."""
        admitted = self._admit()
        chunks = self._chunks()
        if not chunks:
            assert not self.running, "the oldest waits for nobody"
            return None
        batch = self._batch(chunks)
        for sequence, begin, end in chunks:
            sequence.num_computed = end
            self.memory.written += end - begin
            self.memory.prefix.enter(sequence)
        spans = [(chunk.sequence, len(chunk.targets)) for chunk in chunks]
        return ScorePlan(admitted, batch, spans)

    def release_computed(self) -> None:
        """Slots and blocks of those all of whose rows are enqueued are for others, from the next step on."""
        for sequence in [s for s in self.running if s.num_computed == s.prompt_len]:
            self._leave(sequence)

    def drop(self, sequence: ScoredSequence, *, spoilt: bool = False) -> None:
        """Forget a sequence, wherever it stands; what is in flight of it is to be dropped by `finished`. spoilt: nobody
        is to share its blocks later."""
        sequence.finished = True
        if sequence.slot is not None:
            self._leave(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        if spoilt:
            self.memory.forget(sequence)

    def check(self) -> None:
        """Assert the invariants: slots have one owner each, blocks as many as count, and promises can be kept."""
        slots = [sequence.slot for sequence in self.running if sequence.slot is not None]
        assert sorted(slots + self._free_slots) == list(range(self._limits.max_slots))
        assert all(sequence.num_computed < sequence.prompt_len for sequence in self.running)
        assert all(s.slot is None and not s.block_table and not s.num_computed for s in self.waiting)
        assert sum(map(self.memory.demand, self.running)) <= self.memory.pool.num_available
        self.memory.check([*self.running])

    def _admit(self) -> list[ScoredSequence]:
        """Slots for the head of the queue, as long as there are some, and blocks."""
        admitted: list[ScoredSequence] = []
        promised = sum(map(self.memory.demand, self.running))
        while self.waiting and self._free_slots and self.memory.has_room(self.waiting[0], promised):
            sequence = self.waiting.popleft()
            sequence.slot = self._free_slots.pop()
            self.running.append(sequence)
            admitted.append(sequence)
            self.memory.begin(sequence)
            promised += self.memory.demand(sequence)
        return admitted

    def _chunks(self) -> list[Chunk]:
        rows, targets = self._limits.max_batch_tokens, self._limits.max_slots
        chunks = []
        for sequence in self.running:
            if not rows:
                break
            chunk = self._chunk(sequence, rows, targets)
            if chunk.end > chunk.begin:
                chunks.append(chunk)
                rows -= chunk.end - chunk.begin
                targets -= len(chunk.targets)
        return chunks

    def _chunk(self, sequence: ScoredSequence, rows: int, targets: int) -> Chunk:
        """The next rows of a sequence, so many at most, of which so many are scored; it has the blocks for them."""
        memory = self.memory
        memory.adopt(sequence)
        begin, first = sequence.num_computed, sequence.first_row
        shares = begin + memory.block_size <= first  # else it has to compute the next block itself
        if shares and memory.waits(sequence):
            return Chunk(sequence, begin, begin)
        end = min(sequence.prompt_len, begin + rows, max(begin, first) + targets)
        if not memory.grow(sequence, end):
            raise AssertionError("blocks were promised to it")
        return Chunk(sequence, begin, end)

    def _batch(self, chunks: list[Chunk]) -> Batch:
        starts = np.cumsum([0, *(end - begin for _, begin, end in chunks)], dtype=np.int32)
        slots = np.array([sequence.slot for sequence, _, _ in chunks], np.int32)
        counts = [len(chunk.targets) for chunk in chunks]  # of rows that are scored, the last ones of a chunk
        scored = [np.arange(end - count, end, dtype=np.int32) for count, end in zip(counts, starts[1:], strict=True)]
        return Batch(
            query_start_loc=starts,
            slots=slots,
            block_tables=self.memory.tables[slots, : self.memory.needed(max(end for _, _, end in chunks))],
            num_computed=np.array([begin for _, begin, _ in chunks], np.int32),
            token_ids=np.full(starts[-1], -1, np.int32),
            logits_indices=np.concatenate(scored),
            sample_slots=slots.repeat(counts),
            targets=np.concatenate([chunk.targets for chunk in chunks]),
        )

    def _leave(self, sequence: ScoredSequence) -> None:
        assert sequence.slot is not None
        self.running.remove(sequence)
        self.memory.release(sequence)
        self._free_slots.append(sequence.slot)
        sequence.slot = None
