"""The KV blocks of the sequences that run: their block tables, what they share and what they find computed."""

from __future__ import annotations

from collections import Counter

import numpy as np

from tinyvllm_cli.engine.blocks import BlockPool
from tinyvllm_cli.engine.prefix import PrefixCache
from tinyvllm_cli.types import Limits, Sequence


class KVMemory:
    """Blocks are taken when rows are to be written into them. A block with several owners is written by none of them.

    A sequence's `num_computed` goes on here by what it finds; by what it computes, in the batcher.
    """

    def __init__(self, limits: Limits, *, prefix_cache: bool) -> None:
        self.block_size = limits.block_size
        self.prefix = PrefixCache(limits.block_size, enabled=prefix_cache)
        self.pool = BlockPool(limits.num_blocks, self.prefix.blocks, self.prefix.forget)
        # The block table of every slot, kept as an array so that a step gathers rows instead of converting lists.
        self.tables = np.zeros((limits.max_slots, ceil_div(limits.max_seq_len, limits.block_size)), np.int32)
        self.copies: list[tuple[int, int]] = []  # (source, target), before the next step
        self.forked: list[Sequence] = []  # that others share a block with in which they are to write on
        self.capacity = 0  # positions in all block tables
        self.written = 0  # of them, once every enqueued step has run

    @property
    def unwritten(self) -> int:
        """Positions in held blocks that nothing was written to, of a block that forks share once."""
        shared = sum(len(sequence.block_table) * self.block_size - sequence.num_computed for sequence in self.forked)
        return self.capacity - self.written - shared

    def needed(self, num_tokens: int) -> int:
        """Blocks for so many tokens."""
        return ceil_div(num_tokens, self.block_size)

    def demand(self, sequence: Sequence) -> int:
        """Blocks that it is still to get for its known tokens, and one more where it may go on."""
        wanted = min(self.needed(sequence.num_known) + 1, self.needed(sequence.max_len - 1))
        return wanted - len(sequence.block_table)

    def fork_demand(self, sequence: Sequence) -> int:
        """The same of one that waits for another to compute its prompt, whose full blocks it gets from that one."""
        return self.demand(sequence) - sequence.prompt_len // self.block_size

    def has_room(self, sequence: Sequence, reserved: int) -> bool:
        """Whether a sequence that does not run fits beside those that do, to which `reserved` blocks are promised."""
        missing = self.demand(sequence) + reserved - self.pool.num_available
        if missing <= 0:
            return True
        found = self.prefix.found(sequence)[: sequence.first_row // self.block_size]
        return missing <= sum(self.pool.owners(block) > 0 for block in found)

    def has_room_to_fork(self, sequence: Sequence, reserved: int) -> bool:
        """The same of one whose prompt another that runs is about to compute."""
        return self.fork_demand(sequence) + reserved <= self.pool.num_available

    def begin(self, sequence: Sequence) -> None:
        """A sequence got its slot."""
        self.prefix.begin(sequence)
        self.adopt(sequence)

    def adopt(self, sequence: Sequence) -> None:
        """Share the blocks that are there of a sequence that is behind, up to the first row that is to be computed,
        whatever is cached."""
        found = self.prefix.computed(sequence, sequence.first_row // self.block_size)
        if found:
            self.pool.share(found)
            sequence.num_computed += len(found) * self.block_size
            self._append(sequence, found)
            self._count_found(sequence, len(found) * self.block_size)
        self.prefix.next(sequence)  # it computes what nobody does

    def waits(self, sequence: Sequence) -> bool:
        """Whether another sequence is about to compute what this one would compute next."""
        node = self.prefix.next(sequence)
        return node is not None and node.owner not in (None, sequence)

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Blocks for its first num_tokens tokens, or as many as there are: whether they are enough."""
        missing = self.needed(num_tokens) - len(sequence.block_table)
        if missing <= 0:
            return True
        held = sequence.block_table
        room = self.needed(sequence.max_len - 1) - len(held)
        blocks = self.pool.allocate(min(missing, self.pool.num_available), after=held[-1] if held else 0, room=room)
        assert blocks is not None
        self._append(sequence, blocks)
        return len(blocks) == missing

    def extend(self, sequences: list[Sequence]) -> bool:
        """A block more for each, all of which have some, or for none where there are too few."""
        blocks = self.pool.extend([sequence.block_table[-1] for sequence in sequences])
        if blocks is None:
            return False
        for sequence, block in zip(sequences, blocks, strict=True):
            self.tables[sequence.slot, len(sequence.block_table)] = block
            sequence.block_table.append(block)
        self.capacity += len(blocks) * self.block_size
        return True

    def copy_found(self, sequence: Sequence) -> None:
        """Where all known tokens are cached: copy the last block into the one that the sequence has grown by, so that
        a single row is left to compute, and no block is written that others read."""
        node = self.prefix.next(sequence)
        if node is None or not node.block or len(sequence.block_table) * self.block_size <= sequence.num_computed:
            return
        self.copies.append((node.block, sequence.block_table[-1]))
        sequence.num_computed += self.block_size - 1
        self._count_found(sequence, self.block_size - 1)

    def fork(self, sequence: Sequence, other: Sequence) -> None:
        """A sequence that has nothing gets all that another has computed, the block that is begun too."""
        blocks = other.block_table[: self.needed(other.num_computed)]
        self.pool.share(blocks)
        self._append(sequence, blocks)
        self.prefix.begin(sequence)
        sequence.num_computed = other.num_computed
        self.written += sequence.num_computed
        self.prefix.enter(sequence)
        if sequence.num_computed % self.block_size and sequence.num_known < sequence.max_len:
            self.forked.append(sequence)

    def separate(self, sequence: Sequence) -> bool:
        """A block of its own for one that was forked, to write on in it: whether there was one. The last of those that
        share the block keeps it, the others get copies."""
        shared = sequence.block_table[-1]
        if self.pool.owners(shared) > 1:
            place = len(sequence.block_table) - 1
            blocks = self.pool.allocate(1, room=self.needed(sequence.max_len - 1) - place)
            if blocks is None:
                return False
            self.copies.append((shared, blocks[0]))
            self.pool.free([shared])
            sequence.block_table[place] = self.tables[sequence.slot, place] = blocks[0]
        self.forked.remove(sequence)
        return True

    def release(self, sequence: Sequence) -> None:
        """A sequence leaves. What it computed stays cached; the end of it is evicted before its begin."""
        self.prefix.release(sequence)
        if sequence in self.forked:
            self.forked.remove(sequence)
        if sequence.slot is not None:
            self.vacate(sequence.slot)
        self.copies = [copy for copy in self.copies if copy[1] not in sequence.block_table]
        self.capacity -= len(sequence.block_table) * self.block_size
        self.written -= sequence.num_computed
        self.pool.free(reversed(sequence.block_table))
        sequence.block_table = []

    def vacate(self, slot: int) -> None:
        """Nobody is in a slot any more."""
        self.tables[slot] = 0

    def forget(self, sequence: Sequence) -> None:
        """What a sequence had computed or found is not to be shared any more, nor what others computed behind it."""
        for block in self.prefix.disown(sequence):
            self.pool.discard(block)

    def check(self, running: list[Sequence]) -> None:
        """Assert that blocks, tables and counts are those of the sequences that run, in the order of admission."""
        self.pool.check(Counter(block for sequence in running for block in sequence.block_table))
        self.prefix.check(running)
        assert set(self.forked) <= set(running) and not self.copies
        to_copy = {sequence.block_table[-1] for sequence in self.forked}
        for sequence in running:
            held = sequence.block_table
            if sequence.slot is not None:
                table = self.tables[sequence.slot]
                assert table[: len(held)].tolist() == held and not table[len(held) :].any(), sequence
            assert sequence.num_computed <= len(held) * self.block_size, sequence
            if sequence.num_known < sequence.max_len:  # it writes on, if not in a block that it is to get a copy of
                begun = set(held[sequence.num_computed // self.block_size :]) - to_copy
                assert all(self.pool.owners(block) == 1 for block in begun), sequence
        assert self.capacity == sum(len(sequence.block_table) for sequence in running) * self.block_size
        assert self.written == sum(sequence.num_computed for sequence in running)

    def _append(self, sequence: Sequence, blocks: list[int]) -> None:
        held = sequence.block_table
        self.tables[sequence.slot, len(held) : len(held) + len(blocks)] = blocks
        held += blocks
        self.capacity += len(blocks) * self.block_size

    def _count_found(self, sequence: Sequence, num_tokens: int) -> None:
        self.written += num_tokens
        if not sequence.num_preempted:  # else it may be what it computed itself
            sequence.num_cached += num_tokens


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)
