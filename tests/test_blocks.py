"""Laws of the block pool: a block is free, cached or owned; runs where there are some; the least recently used goes."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinyvllm_cli.engine.blocks import BlockPool


def runs_that_hold(free: list[int], n: int) -> list[int]:
    """First blocks of the consecutive runs of n in a set of free blocks."""
    return [b for b in free if set(range(b, b + n)) <= set(free)]


@given(st.integers(1, 40), st.data())
def test_what_a_pool_does_is_what_lists_would_do(num_blocks: int, data: st.DataObject):
    """The same operations on a list of free blocks, one of cached ones in their order, and one for each owner."""
    forgotten: list[int] = []
    free, cached, known = set(range(1, num_blocks)), [], set()
    pool = BlockPool(num_blocks, known, lambda block: (forgotten.append(block), known.remove(block)))
    held: list[list[int]] = []

    def taken(blocks: list[int]) -> None:
        new_free, evicted = [b for b in blocks if b in free], [b for b in blocks if b not in free]
        assert not evicted or set(new_free) == free, "free ones first"
        assert sorted(evicted) == sorted(cached[: len(evicted)]) == sorted(forgotten)
        del cached[: len(evicted)]
        free.difference_update(new_free)
        forgotten.clear()

    for _ in range(data.draw(st.integers(0, 30))):
        act = data.draw(st.sampled_from(["allocate", "allocate", "extend", "share", "keep", "free"]))
        if act == "allocate":
            n, room = data.draw(st.integers(0, 12)), data.draw(st.integers(0, 16))
            after = data.draw(st.sampled_from([blocks[-1] for blocks in held if blocks] or [0]))
            starts = runs_that_hold(sorted(free), n)
            blocks = pool.allocate(n, after=after, room=room)
            assert (blocks is None) == (n > len(free) + len(cached))
            if blocks:
                if starts:
                    assert blocks == list(range(blocks[0], blocks[0] + n)), "a run, where there is one"
                    assert blocks[0] == after + 1 or after + 1 not in starts or not after
                taken(blocks)
                held.append(blocks)
        elif act == "extend" and held:
            owners = data.draw(st.lists(st.sampled_from(held), max_size=3, unique_by=id))
            blocks = pool.extend([owner[-1] for owner in owners])
            assert (blocks is None) == (len(owners) > len(free) + len(cached))
            if blocks is not None:
                behind = [owner[-1] + 1 for owner in owners]
                assert all(a == b or b not in free or b in blocks for a, b in zip(blocks, behind, strict=True))
                taken(blocks)
                for owner, block in zip(owners, blocks, strict=True):
                    owner.append(block)
        elif act == "share" and (known & {b for blocks in held for b in blocks} or cached):
            block = data.draw(st.sampled_from(sorted(known & ({b for blocks in held for b in blocks} | set(cached)))))
            pool.share([block])
            if block in cached:
                cached.remove(block)
            held.append([block])
        elif act == "keep" and held:
            block = data.draw(st.sampled_from(held))[0]
            known.add(block)
        elif act == "free" and held:
            blocks = held.pop(data.draw(st.integers(0, len(held) - 1)))
            pool.free(reversed(blocks))
            for block in reversed(blocks):
                if not any(block in others for others in held):
                    cached.append(block) if block in known else free.add(block)
        owned = Counter(block for blocks in held for block in blocks)
        pool.check(owned)
        assert pool.free_blocks() == sorted(free)
        assert pool.num_available == len(free) + len(cached)
        assert pool.num_owned == len(owned) and pool.num_shared == sum(n > 1 for n in owned.values())


def pool_of(num_blocks: int) -> BlockPool:
    """One of whose blocks no content is known."""
    return BlockPool(num_blocks, set(), lambda block: None)


def test_a_pool_that_was_emptied_is_one_run_again():
    pool = pool_of(12)
    held = [pool.allocate(n) for n in (1, 4, 2, 3, 1)]
    assert pool.allocate(1) is None
    for i in (3, 0, 4, 2, 1):
        pool.free(held[i])
    assert pool.allocate(11) == list(range(1, 12))


def test_split_blocks_are_used_where_no_run_is_long_enough():
    pool = pool_of(8)
    a, b, c = (pool.allocate(n) for n in (2, 3, 2))
    pool.free(a)
    pool.free(c)
    assert pool.allocate(3) == [1, 2, 6]
    pool.free(b)
    assert pool.num_available == 4


def test_sequences_that_grow_stay_consecutive_where_there_is_space():
    """A backend may read them without a copy."""
    pool = pool_of(1 + 4 * 10)
    held = [pool.allocate(2, room=10) for _ in range(4)]
    for _ in range(8):
        for blocks, block in zip(held, pool.extend([blocks[-1] for blocks in held]), strict=True):
            blocks.append(block)
    assert all(blocks == list(range(blocks[0], blocks[0] + 10)) for blocks in held)


def test_what_was_used_again_is_evicted_later():
    known = {1, 2, 3}
    pool = BlockPool(4, known, known.remove)
    pool.free(reversed(pool.allocate(3)))
    pool.share([3])
    pool.free([3])
    assert [pool.allocate(1) for _ in range(3)] == [[2], [1], [3]]
    assert pool.evictions == 3


@pytest.mark.parametrize("blocks", [[3], [2, 3], [5, 6], [4, 4], [0], [8], [-1]])
def test_a_block_that_is_not_held_cannot_be_freed(blocks: list[int]):
    pool = pool_of(8)
    pool.allocate(7)
    pool.free([2, 3, 5])
    with pytest.raises(ValueError, match="free already"):
        pool.free(blocks)
