"""Which KV blocks are free: allocation prefers a consecutive run, which a backend may read without a copy."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable
from itertools import pairwise


class BlockAllocator:
    """The free blocks of a pool, kept as runs; block 0 is the null block and is never handed out.

    Sequences free what they got in one piece, so there are about as many runs as sequences, however large the pool is:
    allocating and freeing cost the number of runs, not the number of blocks.
    """

    def __init__(self, num_blocks: int) -> None:
        """`num_blocks` counts the null block, as Limits.num_blocks does."""
        self.num_blocks = num_blocks
        self.num_free = max(num_blocks - 1, 0)
        self._runs = [(1, num_blocks)] if num_blocks > 1 else []  # free [start, end), ascending, never adjacent

    def allocate(self, n: int) -> list[int] | None:
        """n blocks: the lowest consecutive ascending run that holds them, else the lowest free ones, else None."""
        if n > self.num_free:
            return None
        for i, (start, end) in enumerate(self._runs):
            if end - start >= n:
                return self._take(i, n)
        blocks: list[int] = []
        while len(blocks) < n:
            start, end = self._runs[0]
            blocks += self._take(0, min(end - start, n - len(blocks)))
        return blocks

    def free(self, blocks: Iterable[int]) -> None:
        """Give blocks back. ValueError for a block that is free already, or that no pool hands out."""
        for start, end in _runs(blocks):
            self._insert(start, end)

    def check(self) -> None:
        """Assert that the runs are inside the pool, ascending, apart from each other, and counted."""
        assert all(start < end for start, end in self._runs), self._runs
        assert all(a[1] < b[0] for a, b in pairwise(self._runs)), self._runs
        assert not self._runs or (self._runs[0][0] > 0 and self._runs[-1][1] <= self.num_blocks), self._runs
        assert self.num_free == sum(end - start for start, end in self._runs)

    def free_blocks(self) -> list[int]:
        """Every free block, ascending. For checks and tests: its cost is the size of the pool."""
        return [block for start, end in self._runs for block in range(start, end)]

    def _take(self, i: int, n: int) -> list[int]:
        """The first n blocks of run i."""
        start, end = self._runs[i]
        if start + n == end:
            del self._runs[i]
        else:
            self._runs[i] = (start + n, end)
        self.num_free -= n
        return list(range(start, start + n))

    def _insert(self, start: int, end: int) -> None:
        i = bisect(self._runs, (start, end))
        before = self._runs[i - 1] if i else (0, 0)
        after = self._runs[i] if i < len(self._runs) else (self.num_blocks + 1, self.num_blocks + 1)
        if start < max(before[1], 1) or end > min(after[0], self.num_blocks):
            raise ValueError(f"blocks {start} to {end - 1} are free already, or not of this pool of {self.num_blocks}")
        self.num_free += end - start
        first, last = i, i  # the neighbours that the run grows together with
        if before[1] == start:
            first, start = i - 1, before[0]
        if after[0] == end:
            last, end = i + 1, after[1]
        self._runs[first:last] = [(start, end)]


def _runs(blocks: Iterable[int]) -> list[tuple[int, int]]:
    """Blocks as consecutive ascending runs [start, end), in their order."""
    runs: list[tuple[int, int]] = []
    for block in blocks:
        if runs and runs[-1][1] == block:
            runs[-1] = (runs[-1][0], block + 1)
        else:
            runs.append((block, block + 1))
    return runs
