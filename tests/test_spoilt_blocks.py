"""What a row without finite logits leaves behind: nobody is to read again what led to it."""

import pytest
from fake_backend import NextToken, hashed, limits
from test_prefix_cache import World

from tinyvllm_cli.types import SlotOptions


def failing(length: int) -> NextToken:
    """A model whose first row behind so many tokens has no finite logits, for seed 1; the fault does not come again."""
    rows: list[int] = []

    def next_token(history: tuple[int, ...], options: SlotOptions) -> int:
        if options.seed == 1 and len(history) == length:
            rows.append(length)
            return -1 if len(rows) == 1 else hashed()(history, options)
        return hashed()(history, options)

    return next_token


@pytest.mark.parametrize("after", [0, 9])
@pytest.mark.parametrize("ahead", [1, 3])
def test_nobody_finds_what_led_to_no_finite_logits(ahead: int, after: int):
    world = World(limits(block_size=4, max_in_flight=ahead), failing(12 + after))
    world.add(0, range(12), 10, seed=1)
    world.finish()
    assert world.done[0].error is not None and not world.engine._batcher.memory.prefix.blocks
    rows = world.rows
    world.add(1, range(12), 10, seed=1)
    world.finish()
    assert world.cached(1) == 0 and world.rows == rows + 12 + 9
    world.add(2, range(12), 10, seed=1)
    world.finish()
    assert world.cached(2) == 11 and world.answer(1) == world.answer(2)


def test_nor_what_it_had_found_or_others_have_computed_behind_it():
    """1 goes on where 0 ended, 2 copies a block of 0's, and 3 runs on beside it with what it shares."""
    world = World(limits(block_size=4, num_blocks=100, max_batch_tokens=13), failing(12))
    world.add(0, range(12), 1)
    world.finish()
    world.add(1, [*range(12), *range(20, 28)])
    world.finish()
    world.add(3, [*range(8), 30], 20)
    world.step()
    world.add(2, range(12), 1, seed=1)
    world.step()
    assert world.done[2].error is not None and 3 not in world.done
    for i, prompt in ((4, [*range(12), *range(20, 28)]), (5, range(12))):
        world.add(i, prompt)
        while i not in world.done:
            world.step()
    world.finish()
    assert [world.cached(i) for i in (4, 5)] == [0, 11]
    alone = World(limits(max_seq_len=64))
    alone.add(3, [*range(8), 30], 20)
    alone.finish()
    assert world.answer(3) == alone.answer(3)


def test_nor_what_one_had_computed_that_was_preempted_before_its_tokens_came():
    """Of two that need 6 blocks each in a pool of 8, the second has left with its last tokens in flight."""
    lim = limits(block_size=4, num_blocks=9, max_seq_len=32, max_in_flight=3)
    world = World(lim, failing(16))
    world.add(0, [20] * 4, 20)
    world.add(1, [21] * 4, 20, seed=1)
    while not world.engine.stats.preemptions:
        world.step()
    assert 1 not in world.done and len(world.engine._batcher.waiting) == 1
    world.step()
    assert world.done[1].error is not None and not world.engine._batcher.waiting
    world.add(2, [21] * 4, 1)
    world.finish()
    assert world.cached(2) == 0
