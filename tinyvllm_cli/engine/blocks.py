"""Which KV blocks are free, cached or owned, and by how many: reference counts, eviction of the least recently used."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Mapping


class BlockPool:
    """The blocks of a KV cache but block 0, the null block, which is never handed out. Each is

    free      nothing is known of its content;
    cached    nobody owns it, but its content is known and may be shared: it is kept as long as no free block is left;
    or owned  by one sequence or, shared, by several, which only read it.

    A consecutive run is preferred: a backend may read it without a copy. What is freed first is evicted first.
    """

    def __init__(self, num_blocks: int, known: Container[int], forget: Callable[[int], None]) -> None:
        """`num_blocks` counts the null block, as Limits.num_blocks does.

        known: blocks whose content may be shared; forget(block) takes one out, as it is about to be lost.
        """
        self.num_blocks = num_blocks
        self.num_shared = 0  # blocks with more than one owner
        self.evictions = 0
        self._known = known
        self._forget = forget
        self._owners = [0] * num_blocks  # how many
        self._cached: OrderedDict[int, None] = OrderedDict()  # the next one to be evicted comes first
        self._free = bytearray(b"\0" + b"\1" * (num_blocks - 1))  # a run is found as fast as a word in a text
        self._num_free = num_blocks - 1
        self._next = 1  # where the next sequence may lie: behind the room of the one before

    @property
    def num_available(self) -> int:
        """Free and cached blocks."""
        return self._num_free + len(self._cached)

    @property
    def num_owned(self) -> int:
        return self.num_blocks - 1 - self.num_available

    def owners(self, block: int) -> int:
        """How many own a block."""
        return self._owners[block]

    def allocate(self, n: int, *, after: int = 0, room: int = 0) -> list[int] | None:
        """n blocks for one new owner, or None.

        after: the owner's last block, 0 if it has none; the n follow it where they are free. room: as many as the owner
        may ever need; of a sequence's first blocks, those that it does not need yet are left free behind them as long
        as there is space elsewhere.
        """
        if n > self.num_available:
            return None
        free = min(n, self._num_free)
        blocks = self._take(free, after, room)
        if n > free:
            blocks += sorted(self._evict() for _ in range(n - free))
        for block in blocks:
            self._owners[block] = 1
        return blocks

    def extend(self, last: list[int]) -> list[int] | None:
        """A block for each of several owners, or None: the one behind its last block, where that is free."""
        if len(last) > self.num_available:
            return None
        blocks = []
        free, owners = self._free, self._owners
        for block in last:
            new = block + 1
            if not free.startswith(b"\1", new):
                new = free.find(1) if self._num_free else self._evict()
            if free[new]:
                free[new] = 0
                self._num_free -= 1
            owners[new] = 1
            blocks.append(new)
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """One owner more for each of some blocks, which are cached or owned."""
        owners = self._owners
        for block in blocks:
            before = owners[block]
            owners[block] = before + 1
            if before == 1:
                self.num_shared += 1
            elif before == 0:
                del self._cached[block]

    def free(self, blocks: Iterable[int]) -> None:
        """One owner less for each; those whose content is known stay cached, and are evicted in this order.

        ValueError for a block that nobody owns.
        """
        owners = self._owners
        for block in blocks:
            left = owners[block] - 1 if 0 < block < self.num_blocks else -1
            if left < 0:
                raise ValueError(f"block {block} is free already, or not of this pool of {self.num_blocks}")
            owners[block] = left
            if left > 1:  # as of most blocks of a prefix that many share
                continue
            if left == 1:
                self.num_shared -= 1
            elif block in self._known:
                self._cached[block] = None
            else:
                self._free[block] = 1
                self._num_free += 1

    def discard(self, block: int) -> None:
        """The content of a cached or owned block is known, and is to be shared no more."""
        self._forget(block)
        if not self._owners[block]:
            del self._cached[block]
            self._free[block] = 1
            self._num_free += 1

    def check(self, owners: Mapping[int, int]) -> None:
        """Assert that each block is free, cached or owned, and by as many as `owners` says (0 where it lacks one)."""
        assert not owners.get(0) and owners.keys() <= set(range(self.num_blocks))
        assert self._owners == [owners.get(block, 0) for block in range(self.num_blocks)]
        assert self._num_free == sum(self._free)
        for block in range(1, self.num_blocks):
            states = self._free[block], block in self._cached, self._owners[block] > 0
            assert sum(states) == 1, (block, states)
            assert block in self._known or not states[1], block
            assert block not in self._known or not states[0], block
        assert self.num_shared == sum(count > 1 for count in self._owners)

    def free_blocks(self) -> list[int]:
        """Every free block, ascending. For tests: its cost is the size of the pool."""
        return [block for block, free in enumerate(self._free) if free]

    def _take(self, n: int, after: int, room: int) -> list[int]:
        """n of the free blocks, of which there are enough."""
        if n == 0:
            return []
        run = b"\1" * n
        if after and self._free.startswith(run, after + 1):
            blocks = list(range(after + 1, after + 1 + n))
        else:
            blocks = self._first_run(max(n, room), n) or self._first_run(n, n) or self._singles(n)
        for block in blocks:
            self._free[block] = 0
        self._num_free -= n
        return blocks

    def _first_run(self, length: int, n: int) -> list[int]:
        """The first n of a run of free blocks, or none."""
        run = b"\1" * length
        start = self._free.find(run, self._next)
        if start < 0:
            start = self._free.find(run)
        if start < 0:
            return []
        self._next = start + length
        return list(range(start, start + n))

    def _singles(self, n: int) -> list[int]:
        blocks = [0]
        for _ in range(n):
            blocks.append(self._free.index(1, blocks[-1] + 1))
        return blocks[1:]

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        self._forget(block)
        self.evictions += 1
        return block
