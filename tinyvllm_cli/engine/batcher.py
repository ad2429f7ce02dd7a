"""Which tokens of which sequences run in the next step: the queue, the slots, the KV blocks and the token budget."""

from __future__ import annotations

from bisect import insort
from collections import deque
from itertools import accumulate

import numpy as np

from tinyvllm_cli.engine.decoding import Decoding, decodes, slot_of, tokens_left
from tinyvllm_cli.engine.kv_memory import KVMemory
from tinyvllm_cli.engine.plan import Plan, joined, mask_rows, told_rows
from tinyvllm_cli.engine.samples import Samples
from tinyvllm_cli.types import Batch, Limits, Sequence


class Batcher:
    """Continuous batching (Yu et al., Orca, 2022) with chunked prefill (Agrawal et al., Sarathi-Serve, 2024).

    A step takes one token of every sequence that decodes, then fills the token budget with prompts, in the order of
    arrival. Admission is first in, first out, without overtaking.

    **Blocks** (Kwon et al., PagedAttention, 2023) are taken as rows are to be written. Where none is left, the sequence
    that was admitted last gives its blocks back and goes to the head of the queue; it keeps its tokens, and is computed
    again as if they were its prompt, with what is still cached of it. It gets no slot before its tokens in flight have
    landed, and nobody else gets one before it: so who was admitted first arrived first, no sequence takes the blocks
    of an older one, the oldest always goes on, and nobody starves. To keep this rare, nobody is admitted unless all
    that run can compute what they know and go on for a block.

    **Prefixes** that are cached are shared. A sequence whose next block another one is about to compute waits for it,
    in its slot. It never waits for a younger one: what nobody computes any more is for the first of those that need it.

    **Samples** of one prompt are sequences of their own. Those that run before it is computed wait in their slots until
    one of them has computed it; then all draw from its last row and share its blocks. The block that it ends in is
    copied before the next step, for all but one of them (copy-on-write).

    **Refilling** begins when limits.refill_slots slots are free, or fewer than that many sequences wait; it goes on
    until no slot is free or nobody waits, with limits.admit_slots of them in a step at most: the device works on while
    the host takes in the next. So prompts come in few steps, many at once, and most steps only decode.
    Nobody waits where nothing runs, for then all slots are free; at the end of the queue, or where few arrive, those
    that wait are few; and where blocks are missing instead of slots, refilling has begun and goes on as they get free.

    Steps may be planned before the tokens of earlier ones are read: a sequence's `num_computed` and `num_sampled` say
    how things stand once all planned steps have run. No token is given with a step: the backend's token table has
    those that were bound and those that were drawn.

    A running sequence is first behind, with known tokens to compute; then it decodes, one token behind; then, its last
    token drawn, it waits for what is in flight: in its blocks, as what they hold is known with its tokens, but without
    a slot, which is free for the next step. One that gets tokens that nobody draws (go_on) is behind again.
    """

    def __init__(self, limits: Limits, *, prefix_cache: bool = True) -> None:
        self.limits = limits
        self.memory = KVMemory(limits, prefix_cache=prefix_cache)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in the order of admission, which is that of arrival
        self.preemptions = 0
        self._behind: list[Sequence] = []  # in the same order
        self._paused: list[Sequence] = []
        self._drawn: list[Sequence] = []  # by the step before, all that they may: they need their slots no more
        self._decoding = Decoding(limits.block_size)
        self._samples = Samples()
        self._free_slots = list(range(limits.max_slots))[::-1]  # a stack, lowest on top
        self._refilling = False
        self._admissions = 0
        self._telling = 0  # of those that run, how many want logprobs
        self._constrained = 0  # of those that run, how many draw from masks

    def blocks_needed(self, max_len: int) -> int:
        """Blocks of a sequence that ends with max_len tokens: the last token is never fed back, so it has no KV."""
        return self.memory.needed(max_len - 1)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. It must fit: max_len <= max_seq_len, and its blocks into an empty pool."""
        assert sequence.prompt_len < sequence.max_len <= self.limits.max_seq_len, sequence
        assert self.blocks_needed(sequence.max_len) < self.limits.num_blocks, sequence
        self.waiting.append(sequence)

    def plan(self) -> Plan | None:
        """Give free slots to the queue and lay out the next step; None when nothing can run before more is landed."""
        self._vacate_drawn()
        for sequence in self._behind:
            self.memory.adopt(sequence)
        self._grow_decoding()
        admitted = self._admit()
        count = min(len(self._decoding.sequences), self.limits.max_batch_tokens)
        chunks = self._chunks(self.limits.max_batch_tokens - count)
        assert all(sequence.slot is not None for sequence in admitted), "room was promised to them"
        count = min(len(self._decoding.sequences), count)  # fewer where one gave its blocks to an older one's chunk
        copies, self.memory.copies = self.memory.copies, []
        if not (count or chunks):
            assert not (admitted or copies)
            return None
        batch, sampled, told, masked = self._batch(count, chunks)
        self._regroup(count, chunks)
        return Plan(admitted, list(map(slot_of, admitted)), copies, batch, sampled, told, masked)

    @property
    def num_slots_busy(self) -> int:
        """Slots of the step that was planned last."""
        return self.limits.max_slots - len(self._free_slots)

    @property
    def has_paused(self) -> bool:
        return bool(self._paused)

    def pause(self, sequence: Sequence) -> None:
        """A sequence that decodes draws no more until it is to go on."""
        if sequence.slot is not None and tokens_left(sequence):
            self._decoding.remove(sequence)
            self._paused.append(sequence)

    def go_on(self, sequence: Sequence, count: int) -> None:
        """The last `count` of a sequence's tokens, none of which is in flight, are known without having been drawn."""
        if not count and sequence not in self._paused:
            return
        sequence.num_sampled += count
        if sequence.slot is None:  # it waits to be computed as a whole
            return
        if sequence in self._paused:
            self._paused.remove(sequence)
        else:
            self._decoding.remove(sequence)
        if count:
            insort(self._behind, sequence, key=lambda behind: behind.admission)
        else:
            self._decoding.add([sequence])

    def finish(self, sequence: Sequence, *, spoilt: bool = False) -> None:
        """End a sequence wherever it stands; its tokens still in flight are to be dropped by identity. Of the sequences
        of a request, of which none has drawn, the last one ends first. spoilt: nobody is to share its blocks later.

        Slot and blocks are free at once, although steps in flight may still touch them: whoever gets them next is
        bound, and writes, in later calls, which take effect after those steps (the seam's contract, line 4).
        """
        sequence.finished = True
        if sequence.slot is None and not sequence.block_table:
            self.waiting.remove(sequence)
        else:
            self._leave(sequence)
        if spoilt:
            self.memory.forget(sequence)

    def check(self) -> None:
        """Assert the invariants: slots have one owner each, blocks as many as count, and the counts of tokens agree."""
        slots = [sequence.slot for sequence in self.running if sequence.slot is not None]
        assert sorted(slots + self._free_slots) == list(range(self.limits.max_slots))
        assert all(sequence.slot is not None or not tokens_left(sequence) for sequence in self.running)
        self.memory.check(self.running)
        for sequence in self.waiting:
            assert sequence.slot is None and not sequence.block_table and not sequence.finished, sequence
            assert sequence.num_computed == 0 and (sequence.num_preempted or not sequence.num_sampled), sequence
        for sequence in self.running:
            assert not sequence.finished, sequence
            known = sequence.num_known
            assert sequence.num_computed <= known <= sequence.max_len, sequence
            is_behind = sequence in self._behind and (sequence.num_preempted or sequence.matcher)
            assert is_behind or sequence.num_computed == known - 1 or not sequence.num_sampled, sequence
            assert sequence.prompt_len <= len(sequence.token_ids) <= known, sequence
            assert len(sequence.block_table) <= self.blocks_needed(sequence.max_len), sequence
        assert len({*self.waiting, *self.running}) == len(self.waiting) + len(self.running)
        assert self._telling == sum(sequence.options.logprobs for sequence in self.running)
        assert self._constrained == sum(sequence.matcher is not None for sequence in self.running)
        left = {sequence for sequence in self.running if tokens_left(sequence)}
        apart = [*self._decoding.sequences, *self._behind, *self._paused, *self._samples.waiting]
        assert len(apart) == len(left) and {*apart} == left
        assert self._behind == [sequence for sequence in self.running if sequence in self._behind]
        assert all(map(decodes, [*self._decoding.sequences, *self._paused]))
        assert all(sequence.num_computed < sequence.num_known for sequence in self._behind)
        self._decoding.check()

    def _grow_decoding(self) -> None:
        """A block for the next row of each that decodes and needs one; where none is left, the youngest leaves."""
        for sequence in self.memory.forked.copy():
            while sequence.slot is not None and not self.memory.separate(sequence):
                self._preempt(self.running[-1])
        decoding = self._decoding
        while lacking := decoding.lacking(self.limits.max_batch_tokens):
            if self.memory.extend([decoding.sequences[place] for place in lacking]):
                decoding.grown(lacking)
                return
            self._preempt(self.running[-1])

    def _admit(self) -> list[Sequence]:
        """Slots for the head of the queue, as long as there are some, blocks too, and refilling goes on."""
        admitted: list[Sequence] = []
        if not self._refilling:
            worthwhile = self.limits.refill_slots
            self._refilling = len(self._free_slots) >= worthwhile or len(self.waiting) < worthwhile
        if not (self._refilling and self.waiting and self._free_slots):
            self._refilling = False
            return admitted
        memory = self.memory
        promised = self._decoding.promised() + sum(map(memory.demand, [*self._behind, *self._paused]))
        promised += sum(map(memory.fork_demand, self._samples.waiting))
        while self.waiting and self._free_slots and len(admitted) < self.limits.admit_slots:
            sequence = self.waiting[0]
            landed = len(sequence.token_ids) == sequence.num_known
            has_room = memory.has_room_to_fork if self._samples.waits(sequence) else memory.has_room
            if not (landed and has_room(sequence, promised)):
                break
            self.waiting.popleft()
            sequence.slot = self._free_slots.pop()
            self.running.append(sequence)
            self._admissions += 1
            sequence.admission = self._admissions
            self._telling += sequence.options.logprobs
            self._constrained += sequence.matcher is not None
            admitted.append(sequence)
            if self._samples.join(sequence):
                promised += memory.fork_demand(sequence)
                continue
            memory.begin(sequence)
            promised += memory.demand(sequence)
            self._behind.append(sequence)
        self._refilling = bool(self.waiting and self._free_slots)
        return admitted

    def _chunks(self, budget: int) -> list[tuple[Sequence, int]]:
        """How many tokens those that are behind compute, by what decoding leaves of the budget.

        What counts is how many tokens a sequence is behind those that it has; whose they are, the prompt's or drawn
        ones, is no difference.
        """
        chunks: list[tuple[Sequence, int]] = []
        for sequence in self._behind.copy():
            if not budget:
                break
            chunk = self._chunk(sequence, budget)
            if chunk:
                chunks.append((sequence, chunk))
                budget -= chunk
        return chunks

    def _chunk(self, sequence: Sequence, budget: int) -> int:
        """How many tokens a sequence computes; it has the blocks for them."""
        memory = self.memory
        if sequence.slot is None:  # it gave its blocks to an older one of the same step
            return 0
        memory.adopt(sequence)
        if memory.waits(sequence):
            return 0
        end = min(sequence.num_known, sequence.num_computed + budget)
        while not memory.grow(sequence, end) and self.running[-1] is not sequence:
            self._preempt(self.running[-1])
        memory.copy_found(sequence)
        held = len(sequence.block_table) * self.limits.block_size
        return min(sequence.num_known - sequence.num_computed, budget, held - sequence.num_computed)

    def _preempt(self, sequence: Sequence) -> None:
        """It gives slot and blocks back, and is the next to get some; its tokens stay, those in flight are to land."""
        if sequence.block_table:  # else it only waited in its slot
            sequence.num_preempted += 1
            self.preemptions += 1
        self._leave(sequence)
        sequence.num_computed = 0
        self.waiting.appendleft(sequence)

    def _leave(self, sequence: Sequence) -> None:
        """A running sequence runs no more."""
        if sequence.slot is not None:
            self._vacate(sequence)
        self.running.remove(sequence)
        self._telling -= sequence.options.logprobs
        self._constrained -= sequence.matcher is not None
        if not self._samples.waits(sequence):
            if sequence in self._behind:
                self._behind.remove(sequence)
            elif sequence in self._paused:
                self._paused.remove(sequence)
            elif tokens_left(sequence):
                self._decoding.remove(sequence)
            self.memory.release(sequence)
        self._samples.leave(sequence)

    def _vacate_drawn(self) -> None:
        """Slots of those that have drawn all they may are free, before what they drew is read. Some may have left."""
        gives = self.limits.max_in_flight <= 2  # else newcomers may come to lack blocks that these still hold
        for sequence in [drawn for drawn in self._drawn if gives and drawn.slot is not None]:
            self._vacate(sequence)
        self._drawn = []

    def _vacate(self, sequence: Sequence) -> None:
        self.memory.vacate(slot_of(sequence))
        self._free_slots.append(slot_of(sequence))
        sequence.slot = None

    def _batch(
        self, count: int, chunks: list[tuple[Sequence, int]]
    ) -> tuple[Batch, list[Sequence], list[int], list[int]]:
        """The arrays of a step of the first `count` that decode and then of chunks, whose its rows are, and which of
        them are told, and wait for masks; counts its tokens as computed and sampled."""
        slots, num_computed, _, _ = self._decoding.rows[:, :count]
        every = np.arange(count + 1, dtype=np.int32)
        slots = joined(slots, [slot_of(sequence) for sequence, _ in chunks])
        num_computed = joined(num_computed, [sequence.num_computed for sequence, _ in chunks])
        ends = list(accumulate((chunk for _, chunk in chunks), initial=count))[1:]  # rows of the step
        starts = joined(every, ends)

        sampled = self._decoding.sequences[:count]
        for sequence in sampled:  # of all that a step costs, this loop is run most often
            sequence.num_computed += 1
            sequence.num_sampled += 1
        drawn_from = []  # rows of the chunks
        token_ids = np.full(starts[-1], -1, np.int32)
        for (sequence, chunk), end in zip(chunks, ends, strict=True):
            if sequence.num_sampled and sequence.matcher:  # the token table may not have them
                token_ids[end - chunk : end] = sequence.token_ids[sequence.num_computed :][:chunk]
            sequence.num_computed += chunk
            if sequence.num_computed == sequence.num_known:
                for drawing in (sequence, *self._samples.behind(sequence)):
                    drawing.num_sampled += 1
                    sampled.append(drawing)
                    drawn_from.append(end - 1)

        told, top_logprobs = told_rows(sampled) if self._telling else ([], 0)
        masked = [row for row, one in enumerate(sampled) if one.matcher] if self._constrained else []

        widest = int((num_computed + (starts[1:] - starts[:-1])).max())  # tokens
        batch = Batch(
            query_start_loc=starts,
            slots=slots,
            block_tables=self.memory.tables[slots, : self.memory.needed(widest)],
            num_computed=num_computed,
            token_ids=token_ids,
            logits_indices=joined(every[:-1], drawn_from),
            sample_slots=joined(slots[:count], [slot_of(sequence) for sequence in sampled[count:]]),
            mask_rows=mask_rows(len(sampled), masked) if masked else None,
            top_logprobs=top_logprobs,
        )
        self.memory.written += len(batch.token_ids)
        return batch, sampled, told, masked

    def _regroup(self, count: int, chunks: list[tuple[Sequence, int]]) -> None:
        """The first `count` have decoded and chunks were computed: who decodes from now on, and what may be shared."""
        self._drawn += self._decoding.advance(count)
        through = []
        for sequence, _ in chunks:
            self.memory.prefix.enter(sequence)
            if sequence.num_computed == len(sequence.token_ids):  # none of which is in flight
                through.append(sequence)
                for other in self._samples.drew(sequence):
                    self.memory.fork(other, sequence)
                    through.append(other)
        if through:
            gone = set(through)
            self._behind = [sequence for sequence in self._behind if sequence not in gone]
            self._decoding.add([sequence for sequence in through if tokens_left(sequence)])
            self._drawn += [sequence for sequence in through if not tokens_left(sequence)]
