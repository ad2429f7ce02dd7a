"""Which tokens of which sequences run in the next step: the queue, the slots, the KV blocks and the token budget."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from tinyvllm_cli.engine.blocks import BlockAllocator
from tinyvllm_cli.types import Batch, Limits, Sequence


@dataclass(frozen=True, slots=True)
class Plan:
    """One step to enqueue, and whose it is."""

    admitted: list[Sequence]  # to be bound to their slots before the step
    batch: Batch
    sampled: list[Sequence]  # [R] whose next token each sampled row is


class Batcher:
    """Continuous batching (Yu et al., Orca, 2022) with chunked prefill (Agrawal et al., Sarathi-Serve, 2024).

    A step takes one token of every sequence that decodes, then fills the token budget with prompts, both in the order
    of arrival. Admission is first in, first out, without overtaking: nobody starves. A sequence gets all blocks it can
    ever need with its slot, so that no step, however far ahead it is enqueued, can run out of them.

    Steps may be planned before the tokens of earlier ones are read: a sequence's `num_computed` and `num_sampled` say
    how things stand once all planned steps have run, its `token_ids` hold what was read back.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.blocks = BlockAllocator(limits.num_blocks)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in the order of admission
        self._free_slots = list(range(limits.max_slots))[::-1]  # a stack, lowest on top
        # The block table of every slot, kept as an array so that a step gathers rows instead of converting lists.
        self._tables = np.zeros((limits.max_slots, _ceil_div(limits.max_seq_len, limits.block_size)), np.int32)

    @property
    def blocks_held(self) -> int:
        return self.limits.num_blocks - 1 - self.blocks.num_free

    def blocks_needed(self, max_len: int) -> int:
        """Blocks of a sequence that ends with max_len tokens: the last token is never fed back, so it has no KV."""
        return _ceil_div(max_len - 1, self.limits.block_size)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. It must fit: max_len <= max_seq_len, and its blocks into an empty pool."""
        assert sequence.prompt_len < sequence.max_len <= self.limits.max_seq_len, sequence
        assert self.blocks_needed(sequence.max_len) < self.limits.num_blocks, sequence
        self.waiting.append(sequence)

    def plan(self) -> Plan | None:
        """Give free slots to the queue and lay out the next step; None when nothing can run before more is landed."""
        admitted = self._admit()
        rows = self._schedule()
        if not rows:
            assert not admitted
            return None
        batch, sampled = self._batch(rows)
        return Plan(admitted, batch, sampled)

    def land(self, sequence: Sequence, token_id: int) -> None:
        """A token of an unfinished sequence was read back."""
        sequence.token_ids.append(token_id)

    def finish(self, sequence: Sequence) -> None:
        """End a sequence wherever it stands; its tokens still in flight are to be dropped by identity.

        Slot and blocks are free at once, although steps in flight may still touch them: whoever gets them next is
        bound, and writes, in later calls, which take effect after those steps (the seam's contract, line 4).
        """
        sequence.finished = True
        if sequence.slot is None:
            self.waiting.remove(sequence)
            return
        self.running.remove(sequence)
        self._free_slots.append(sequence.slot)
        self.blocks.free(sequence.block_table)
        sequence.slot = None
        sequence.block_table = []

    def check(self) -> None:
        """Assert the invariants: slots and blocks have one owner each, and the counts of tokens agree."""
        self.blocks.check()
        owned = [block for sequence in self.running for block in sequence.block_table]
        assert sorted(owned + self.blocks.free_blocks()) == list(range(1, self.limits.num_blocks))
        slots = [sequence.slot for sequence in self.running if sequence.slot is not None]
        assert sorted(slots + self._free_slots) == list(range(self.limits.max_slots))
        for sequence in self.waiting:
            assert sequence.slot is None and not sequence.block_table and not sequence.finished, sequence
        for sequence in self.running:
            assert not sequence.finished, sequence
            known = sequence.prompt_len + sequence.num_sampled
            assert sequence.num_computed <= known <= sequence.max_len, sequence
            assert sequence.num_computed == known - 1 or not sequence.num_sampled, sequence
            assert sequence.prompt_len <= len(sequence.token_ids) <= known, sequence
            assert len(sequence.block_table) == self.blocks_needed(sequence.max_len), sequence
            table = self._tables[sequence.slot]
            assert table[: len(sequence.block_table)].tolist() == sequence.block_table, sequence
            assert not table[len(sequence.block_table) :].any(), sequence
        assert len({*self.waiting, *self.running}) == len(self.waiting) + len(self.running)

    def _admit(self) -> list[Sequence]:
        """Slots and blocks for the head of the queue, as long as there are both."""
        admitted: list[Sequence] = []
        while self.waiting and self._free_slots:
            sequence = self.waiting[0]
            blocks = self.blocks.allocate(self.blocks_needed(sequence.max_len))
            if blocks is None:
                break
            self.waiting.popleft()
            slot = self._free_slots.pop()
            sequence.slot, sequence.block_table = slot, blocks
            self._tables[slot] = 0
            self._tables[slot, : len(blocks)] = blocks
            self.running.append(sequence)
            admitted.append(sequence)
        return admitted

    def _schedule(self) -> list[tuple[Sequence, int]]:
        """Who computes how many tokens: decoding sequences one each, then prompts by what is left of the budget.

        What counts is how many tokens a sequence is behind those that it has; whose they are, the prompt's or drawn
        ones, is no difference.
        """
        budget = self.limits.max_batch_tokens
        # A sequence whose last token is drawn in a step in flight has nothing more to compute: lengths are known ahead.
        unfinished = [s for s in self.running if s.num_known < s.max_len]
        rows = [(sequence, 1) for sequence in unfinished if _decodes(sequence)][:budget]
        budget -= len(rows)
        for sequence in unfinished:
            chunk = min(sequence.num_known - sequence.num_computed, budget)
            if chunk and not _decodes(sequence):
                rows.append((sequence, chunk))
                budget -= chunk
        return rows

    def _batch(self, rows: list[tuple[Sequence, int]]) -> tuple[Batch, list[Sequence]]:
        """The step's arrays; counts its tokens as computed and sampled."""
        starts = [0]
        slots: list[int] = []
        num_computed: list[int] = []
        token_ids: list[int] = []
        logits_indices: list[int] = []
        sampled: list[Sequence] = []
        widest = 0  # tokens
        for sequence, chunk in rows:
            begin, end = sequence.num_computed, sequence.num_computed + chunk
            assert sequence.slot is not None
            slots.append(sequence.slot)
            num_computed.append(begin)
            read_back = sequence.token_ids[begin:end]
            token_ids += read_back + [-1] * (chunk - len(read_back))  # -1: as the token table has it
            starts.append(starts[-1] + chunk)
            widest = max(widest, end)
            sequence.num_computed = end
            if end == sequence.num_known:  # not a chunk without the last row
                logits_indices.append(starts[-1] - 1)
                sampled.append(sequence)
                sequence.num_sampled += 1
        slot_ids = np.array(slots, np.int32)
        batch = Batch(
            query_start_loc=np.array(starts, np.int32),
            slots=slot_ids,
            block_tables=self._tables[slot_ids, : _ceil_div(widest, self.limits.block_size)],
            num_computed=np.array(num_computed, np.int32),
            token_ids=np.array(token_ids, np.int32),
            logits_indices=np.array(logits_indices, np.int32),
            sample_slots=np.array([sequence.slot for sequence in sampled], np.int32),
        )
        return batch, sampled


def _decodes(sequence: Sequence) -> bool:
    return sequence.num_sampled > 0 and sequence.num_known - sequence.num_computed == 1


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
