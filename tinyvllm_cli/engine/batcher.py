"""Which tokens of which sequences run in the next step: the queue, the slots, the KV blocks and the token budget."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import accumulate, compress

import numpy as np

from tinyvllm_cli.engine.blocks import BlockAllocator
from tinyvllm_cli.types import I32, Batch, Limits, Sequence

DECODED: I32 = np.array([[0], [1], [-1]], np.int32)  # what a step adds to a column of Batcher._decode_rows


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

    **Refilling** begins when limits.refill_slots slots are free, or fewer than that many sequences wait; it goes on
    until no slot is free or nobody waits. So prompts come in few steps, many at once, and most steps only decode.
    Nobody waits where nothing runs, for then all slots are free; at the end of the queue, or where few arrive, those
    that wait are few; and where blocks are missing instead of slots, refilling has begun and goes on as they get free.

    Steps may be planned before the tokens of earlier ones are read: a sequence's `num_computed` and `num_sampled` say
    how things stand once all planned steps have run. No token is given with a step: the backend's token table has
    those that were bound and those that were drawn.

    A running sequence is first behind, with known tokens to compute; then it decodes, one token behind; then, its last
    token drawn, it waits for what is in flight. Whoever came before is never further back. What a step needs of those
    that decode is kept in arrays, so that it costs little Python for each.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.blocks = BlockAllocator(limits.num_blocks)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in the order of admission, as the two that follow
        self._behind: list[Sequence] = []
        self._decoding: list[Sequence] = []
        self._decode_rows: I32 = np.empty((3, 0), np.int32)  # of _decoding: slot, num_computed, tokens left to draw
        self._free_slots = list(range(limits.max_slots))[::-1]  # a stack, lowest on top
        self._refilling = False
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
        count = min(len(self._decoding), self.limits.max_batch_tokens)
        chunks = self._chunks(self.limits.max_batch_tokens - count)
        if not (count or chunks):
            assert not admitted
            return None
        batch, sampled = self._batch(count, chunks)
        self._regroup(count, chunks)
        return Plan(admitted, batch, sampled)

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
        if sequence in self._behind:
            self._behind.remove(sequence)
        elif _left(sequence):
            place = self._decoding.index(sequence)
            del self._decoding[place]
            rows = self._decode_rows
            self._decode_rows = np.concatenate([rows[:, :place], rows[:, place + 1 :]], axis=1)
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
        assert self._decoding + self._behind == [sequence for sequence in self.running if _left(sequence)]
        assert all(map(_decodes, self._decoding)) and not any(map(_decodes, self._behind))
        assert self._decode_rows.T.tolist() == [[*_decode_row(sequence)] for sequence in self._decoding]

    def _admit(self) -> list[Sequence]:
        """Slots and blocks for the head of the queue, as long as there are both and refilling goes on."""
        admitted: list[Sequence] = []
        if not self._refilling:
            worthwhile = self.limits.refill_slots
            self._refilling = len(self._free_slots) >= worthwhile or len(self.waiting) < worthwhile
        while self._refilling and self.waiting and self._free_slots:
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
            self._behind.append(sequence)
            admitted.append(sequence)
        self._refilling = self._refilling and bool(self.waiting and self._free_slots)
        return admitted

    def _chunks(self, budget: int) -> list[tuple[Sequence, int]]:
        """How many tokens those that are behind compute, by what decoding leaves of the budget.

        What counts is how many tokens a sequence is behind those that it has; whose they are, the prompt's or drawn
        ones, is no difference.
        """
        chunks: list[tuple[Sequence, int]] = []
        for sequence in self._behind:
            chunk = min(sequence.num_known - sequence.num_computed, budget)
            if not chunk:
                break
            chunks.append((sequence, chunk))
            budget -= chunk
        return chunks

    def _batch(self, count: int, chunks: list[tuple[Sequence, int]]) -> tuple[Batch, list[Sequence]]:
        """The arrays of a step of the first `count` that decode and then of chunks; counts its tokens as computed and
        sampled."""
        slots, num_computed, _ = self._decode_rows[:, :count]
        every = np.arange(count + 1, dtype=np.int32)
        slots = _joined(slots, [_slot(sequence) for sequence, _ in chunks])
        num_computed = _joined(num_computed, [sequence.num_computed for sequence, _ in chunks])
        ends = list(accumulate((chunk for _, chunk in chunks), initial=count))[1:]  # rows of the step
        starts = _joined(every, ends)

        sampled = self._decoding[:count]
        for sequence in sampled:  # of all that a step costs, this loop is run most often
            sequence.num_computed += 1
            sequence.num_sampled += 1
        drawing = []  # which of the chunks
        for i, (sequence, chunk) in enumerate(chunks):
            sequence.num_computed += chunk
            if sequence.num_computed == sequence.num_known:
                sequence.num_sampled += 1
                sampled.append(sequence)
                drawing.append(i)

        widest = int((num_computed + (starts[1:] - starts[:-1])).max())  # tokens
        batch = Batch(
            query_start_loc=starts,
            slots=slots,
            block_tables=self._tables[slots, : _ceil_div(widest, self.limits.block_size)],
            num_computed=num_computed,
            token_ids=np.full(starts[-1], -1, np.int32),
            logits_indices=_joined(every[:-1], [ends[i] - 1 for i in drawing]),
            sample_slots=_joined(slots[:count], [_slot(chunks[i][0]) for i in drawing]),
        )
        return batch, sampled

    def _regroup(self, count: int, chunks: list[tuple[Sequence, int]]) -> None:
        """The first `count` have decoded and chunks were computed: who decodes from now on."""
        rows = self._decode_rows.copy()  # the arrays of a batch may be parts of it
        rows[:, :count] += DECODED
        left = rows[2] > 0
        if not left.all():
            rows, self._decoding = rows[:, left], list(compress(self._decoding, left.tolist()))
        through = [sequence for sequence, _ in chunks if _decodes(sequence) or not _left(sequence)]
        del self._behind[: len(through)]
        joining = [sequence for sequence in through if _left(sequence)]
        if joining:
            self._decoding += joining
            rows = np.concatenate([rows, np.array([*map(_decode_row, joining)], np.int32).T], axis=1)
        self._decode_rows = rows


def _joined(first: I32, then: list[int]) -> I32:
    return np.concatenate([first, np.array(then, np.int32)]) if then else first


def _decodes(sequence: Sequence) -> bool:
    return sequence.num_sampled > 0 and sequence.num_known - sequence.num_computed == 1


def _left(sequence: Sequence) -> int:
    """Tokens still to be drawn: a sequence whose last one is drawn in a step in flight has nothing more to compute."""
    return sequence.max_len - sequence.num_known


def _slot(sequence: Sequence) -> int:
    assert sequence.slot is not None, "it runs"
    return sequence.slot


def _decode_row(sequence: Sequence) -> tuple[int, int, int]:
    """Of _decode_rows."""
    return _slot(sequence), sequence.num_computed, _left(sequence)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
