"""Laws of the block allocator: every block has one owner, and a consecutive run is taken where there is one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinyvllm_cli.engine.blocks import BlockAllocator


def runs_that_hold(free: list[int], n: int) -> list[int]:
    """First blocks of the consecutive runs of n in a set of free blocks."""
    return [b for b in free if set(range(b, b + n)) <= set(free)]


@given(st.integers(0, 40), st.data())
def test_every_block_is_free_or_handed_out_once(num_blocks: int, data: st.DataObject):
    allocator = BlockAllocator(num_blocks)
    held: list[list[int]] = []
    for _ in range(data.draw(st.integers(0, 30))):
        if held and data.draw(st.booleans()):
            allocator.free(data.draw(st.permutations(held.pop(data.draw(st.integers(0, len(held) - 1))))))
        else:
            n = data.draw(st.integers(0, 12))
            free = allocator.free_blocks()
            blocks = allocator.allocate(n)
            assert (blocks is None) == (n > len(free))
            if blocks is not None:
                held.append(blocks)
                assert len(blocks) == n and blocks == sorted(blocks)
                if n and (starts := runs_that_hold(free, n)):
                    assert blocks == list(range(starts[0], starts[0] + n))
        allocator.check()
        assert sorted([*allocator.free_blocks(), *(b for blocks in held for b in blocks)]) == list(range(1, num_blocks))


def test_a_pool_that_was_emptied_is_one_run_again():
    allocator = BlockAllocator(12)
    held = [allocator.allocate(n) for n in (1, 4, 2, 3, 1)]
    assert allocator.allocate(1) is None
    for i in (3, 0, 4, 2, 1):
        allocator.free(held[i])
    assert allocator.allocate(11) == list(range(1, 12))


def test_split_blocks_are_used_where_no_run_is_long_enough():
    allocator = BlockAllocator(8)
    a, b, c = (allocator.allocate(n) for n in (2, 3, 2))
    allocator.free(a)
    allocator.free(c)
    assert allocator.allocate(3) == [1, 2, 6]
    allocator.free(b)
    assert allocator.num_free == 4


@pytest.mark.parametrize("blocks", [[3], [2, 3], [5, 6], [4, 4], [0], [8], [-1]])
def test_a_block_that_is_not_held_cannot_be_freed(blocks: list[int]):
    allocator = BlockAllocator(8)
    allocator.allocate(7)
    allocator.free([2, 3, 5])
    with pytest.raises(ValueError, match="free already"):
        allocator.free(blocks)
