"""Laws of the schedule: who runs in a step, with how many tokens, in which slot and blocks."""

from collections import deque
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from fake_backend import limits, refilling_limits, request
from hypothesis import given
from hypothesis import strategies as st

from tinyvllm_cli.engine.batcher import Batcher, Plan
from tinyvllm_cli.types import Limits, Sequence, SlotOptions


def sequence(prompt_len: int, max_tokens: int = 1, i: int = 0) -> Sequence:
    ids = list(range(100 * i, 100 * i + prompt_len))  # of no other's prefix
    return Sequence(request(i, ids), ids.copy(), prompt_len, prompt_len + max_tokens, SlotOptions())


def chunks(plan: Plan) -> list[int]:
    return np.diff(plan.batch.query_start_loc).tolist()


def land(batcher: Batcher, plan: Plan) -> None:
    """Read a step back; whoever has reached its length ends."""
    for s in plan.sampled:
        if not s.finished:
            s.token_ids.append(7)
            if len(s.token_ids) == s.max_len:
                batcher.finish(s)


def run(batcher: Batcher, ahead: int = 1) -> list[Plan]:
    """All steps until nothing is left."""
    plans: list[Plan] = []
    in_flight: deque[Plan] = deque()
    while batcher.waiting or batcher.running:
        while len(in_flight) < ahead and (plan := batcher.plan()):
            in_flight.append(plan)
            plans.append(plan)
        land(batcher, in_flight.popleft())
        batcher.check()
    return plans


sizes = st.builds(
    refilling_limits,
    max_batch_tokens=st.integers(1, 12),
    max_slots=st.integers(1, 5),
    refill_slots=st.integers(1, 5),
    admit_slots=st.integers(1, 5),
    max_seq_len=st.just(24),
    block_size=st.sampled_from([1, 4, 16]),
)
shapes = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 4)), min_size=1, max_size=12)


@given(sizes, shapes, st.integers(1, 4))
def test_decoding_rows_come_first_then_prompts_in_order_fill_the_budget(lim, shapes, ahead):
    batcher = Batcher(replace(lim, max_in_flight=ahead))
    for i, (prompt_len, max_tokens) in enumerate(shapes):
        batcher.add(sequence(prompt_len, max_tokens, i))
    in_flight: deque[Plan] = deque()
    while batcher.waiting or batcher.running:
        decoding = [s for s in batcher.running if s.num_sampled and s.prompt_len + s.num_sampled < s.max_len]
        plan = batcher.plan()
        batcher.check()
        if plan is not None:
            by_slot = {s.slot: s for s in batcher.running}
            rows = [by_slot[slot] for slot in plan.batch.slots.tolist()]
            assert rows[: len(decoding)] == decoding
            assert chunks(plan)[: len(decoding)] == [1] * len(decoding)
            prompts = rows[len(decoding) :]
            assert prompts == [s for s in batcher.running if s in prompts], "prompts in the order of arrival"
            assert all(s.num_computed == s.prompt_len for s in prompts[:-1]), "a prompt is begun when those before end"
            behind = [s for s in batcher.running if s.num_computed < s.prompt_len]
            assert len(plan.batch.token_ids) <= lim.max_batch_tokens
            assert len(plan.batch.token_ids) == lim.max_batch_tokens or not behind, "budget left while prompts wait"
            in_flight.append(plan)
        if plan is None or len(in_flight) == ahead:
            land(batcher, in_flight.popleft())
            batcher.check()


@given(sizes, shapes, st.integers(1, 4))
def test_every_token_is_computed_once_and_only_last_rows_are_sampled(lim, shapes, ahead):
    batcher = Batcher(replace(lim, max_in_flight=ahead))
    sequences = [sequence(prompt_len, max_tokens, i) for i, (prompt_len, max_tokens) in enumerate(shapes)]
    for s in sequences:
        batcher.add(s)
    plans = run(batcher, ahead)
    assert not batcher.preemptions, "the pool holds what all slots can use"
    assert [s for plan in plans for s in plan.admitted] == sequences, "first in, first out"
    assert all((plan.batch.token_ids == -1).all() for plan in plans), "the token table has every token"
    for s in sequences:
        assert sum(plan.sampled.count(s) for plan in plans) == s.max_len - s.prompt_len
    # The last token of each is never fed back.
    assert sum(len(plan.batch.token_ids) for plan in plans) == sum(s.max_len - 1 for s in sequences)
    assert batcher.memory.pool.num_owned == 0


def test_a_prompt_longer_than_a_step_is_cut_and_sampled_once():
    batcher = Batcher(limits(max_batch_tokens=16, max_seq_len=64))
    batcher.add(sequence(33, 1))
    plans = [batcher.plan() for _ in range(3)]
    assert [chunks(plan) for plan in plans] == [[16], [16], [1]]
    assert [plan.batch.num_computed.tolist() for plan in plans] == [[0], [16], [32]]
    assert [plan.batch.logits_indices.tolist() for plan in plans] == [[], [], [0]]
    assert [plan.batch.block_tables.shape[1] for plan in plans] == [4, 8, 9], "as wide as the step needs"
    assert batcher.plan() is None, "its one token is in flight"


def test_several_prompts_share_a_step():
    batcher = Batcher(limits(max_batch_tokens=16))
    for i, prompt_len in enumerate((5, 6, 9)):
        batcher.add(sequence(prompt_len, 2, i))
    plan = batcher.plan()
    assert chunks(plan) == [5, 6, 5]
    assert plan.batch.logits_indices.tolist() == [4, 10]
    plan = batcher.plan()
    assert chunks(plan) == [1, 1, 4], "decoding rows are not held up by the rest of a prompt"
    assert plan.batch.num_computed.tolist() == [5, 6, 5]


def test_a_slot_is_refilled_in_the_next_step():
    batcher = Batcher(limits(max_slots=2))
    a, b, c = (sequence(3, n, i) for i, n in enumerate((1, 3, 1)))
    for s in (a, b, c):
        batcher.add(s)
    plan = batcher.plan()
    assert plan.admitted == [a, b]
    slot = a.slot
    land(batcher, plan)
    plan = batcher.plan()
    assert plan.admitted == [c] and c.slot == slot
    assert chunks(plan) == [1, 3]


def test_who_has_drawn_its_last_token_gives_its_slot_to_the_next_step():
    """Before that token is read; its blocks stay, as nobody knows yet what they hold."""
    batcher = Batcher(limits(max_slots=2, block_size=4))
    a, b, c = (sequence(3, n, i) for i, n in enumerate((2, 9, 1)))
    for s in (a, b, c):
        batcher.add(s)
    first, second = batcher.plan(), batcher.plan()
    slot, held = a.slot, list(a.block_table)
    third = batcher.plan()
    batcher.check()
    assert (third.admitted, c.slot, a.slot, a.block_table) == ([c], slot, None, held)
    assert chunks(third) == [1, 3]
    for plan in (first, second, third):
        land(batcher, plan)
        batcher.check()
    assert a.finished and not a.block_table and batcher.running == [b]


def test_nobody_overtakes_a_sequence_that_waits_for_blocks():
    batcher = Batcher(limits(num_blocks=1 + 8, block_size=4))
    first, big, small = sequence(17, 1, 0), sequence(17, 1, 1), sequence(1, 1, 2)
    for s in (first, big, small):
        batcher.add(s)
    plan = batcher.plan()
    assert plan.admitted == [first]
    batcher.plan()
    assert batcher.waiting == deque([big, small])
    batcher.finish(first)
    assert batcher.plan().admitted == [big, small]


@given(sizes, shapes, st.integers(1, 3))
def test_slots_are_refilled_many_at_once(lim: Limits, shapes: list[tuple[int, int]], ahead: int):
    """Where memory holds every slot's sequence: all free slots, once they are enough, or those that wait are few; so
    many in a step as it may be."""
    # Of up to two steps in flight those that have drawn hold blocks, and no slots.
    batcher = Batcher(replace(lim, num_blocks=4 * lim.num_blocks, max_in_flight=ahead))
    for i, (prompt_len, max_tokens) in enumerate(shapes):
        batcher.add(sequence(prompt_len, max_tokens, i))
    in_flight: deque[Plan] = deque()
    goes_on = False
    while batcher.waiting or batcher.running:
        seated = [s for s in batcher.running if s.num_known < s.max_len or ahead > 2]
        free, waiting = lim.max_slots - len(seated), len(batcher.waiting)
        plan = batcher.plan()
        refilled = goes_on or free >= lim.refill_slots or waiting < lim.refill_slots
        assert (len(plan.admitted) if plan else 0) == (min(free, waiting, lim.admit_slots) if refilled else 0)
        goes_on = refilled and min(free, waiting) > lim.admit_slots
        if plan is not None:
            in_flight.append(plan)
        if plan is None or len(in_flight) == ahead:
            land(batcher, in_flight.popleft())


def test_whoever_waited_for_blocks_waits_for_no_slots_besides():
    batcher = Batcher(limits(num_blocks=1 + 8, block_size=4, refill_slots=3))
    first = sequence(7, 2, 0)  # 2 blocks
    others = [sequence(19, 2, 1), sequence(3, 2, 2)]  # 5 and 1
    waiting = [sequence(7, 2, i) for i in range(3, 6)]
    for s in (first, *others, *waiting):
        batcher.add(s)
    assert batcher.plan().admitted == [first, *others], "a slot is left and no block"
    batcher.finish(first)
    assert batcher.plan().admitted == waiting[:1], "with 2 of 3 slots free"
    batcher.check()


def test_one_that_comes_alone_is_not_kept_waiting():
    batcher = Batcher(limits(max_slots=4, refill_slots=4))
    for i in range(4):
        alone = sequence(3, 9, i)
        batcher.add(alone)
        assert batcher.plan().admitted == [alone]


def test_prompts_come_in_fewer_steps_where_slots_are_refilled_many_at_once():
    def steps_with_prompts(refill_slots: int) -> int:
        batcher = Batcher(limits(max_slots=64, max_batch_tokens=1024, refill_slots=refill_slots))
        for i, max_tokens in enumerate(np.random.default_rng(0).integers(10, 40, 500).tolist()):
            batcher.add(sequence(20, max_tokens, i))
        return sum(max(chunks(plan)) > 1 for plan in run(batcher))

    assert steps_with_prompts(16) < steps_with_prompts(1) / 3


def test_the_last_token_needs_no_block():
    batcher = Batcher(limits(block_size=4))
    assert [batcher.blocks_needed(n) for n in (2, 5, 6, 9, 10)] == [1, 1, 2, 2, 3]


def test_an_ended_sequence_leaves_queue_slot_and_blocks():
    batcher = Batcher(limits(max_slots=1))
    a, b, c = (sequence(3, 5, i) for i in range(3))
    for s in (a, b, c):
        batcher.add(s)
    batcher.plan()
    batcher.finish(b)
    batcher.finish(a)
    batcher.check()
    assert (a.finished, b.finished, a.slot, a.block_table) == (True, True, None, [])
    assert batcher.plan().admitted == [c]


def steal_block(b: Batcher) -> None:
    b.running[0].block_table[0] = b.running[1].block_table[0]


def null_block(b: Batcher) -> None:
    b.running[0].block_table[0] = 0


def share_slot(b: Batcher) -> None:
    b.running[0].slot = b.running[1].slot


def lose_block(b: Batcher) -> None:
    b.running[0].block_table.pop()


def stale_table(b: Batcher) -> None:
    b.memory.tables[b.running[0].slot, 0] += 1


def run_while_waiting(b: Batcher) -> None:
    b.waiting.append(b.running[0])


def count_too_far(b: Batcher) -> None:
    b.running[0].num_computed += 2


def keep_an_ended_one(b: Batcher) -> None:
    b.running[0].finished = True


def count_an_owner_too_many(b: Batcher) -> None:
    b.memory.pool._owners[b.running[0].block_table[0]] += 1


def write_what_another_reads(b: Batcher) -> None:
    first, second = b.running[0], b.running[1]
    b.memory.pool.free([second.block_table[0]])
    b.memory.pool.share([first.block_table[0]])
    b.memory.tables[second.slot, 0] = second.block_table[0] = first.block_table[0]
    b.memory.written += 2 - second.num_computed
    second.num_computed = 2


def count_rows_twice(b: Batcher) -> None:
    b.memory.written += 1


def find_what_nobody_computes(b: Batcher) -> None:
    next(iter(b.memory.prefix.blocks.values())).block = 0


@pytest.mark.parametrize(
    "damage",
    [
        *(steal_block, null_block, share_slot, lose_block, stale_table, run_while_waiting, count_too_far),
        *(keep_an_ended_one, count_an_owner_too_many, write_what_another_reads, count_rows_twice),
        find_what_nobody_computes,
    ],
)
def test_check_finds_damage(damage: Callable[[Batcher], None]):
    batcher = Batcher(limits())
    for i in range(2):
        batcher.add(sequence(5, 4, i))
    batcher.plan()
    batcher.check()
    damage(batcher)
    with pytest.raises(AssertionError):
        batcher.check()


@given(st.integers(1, 9), st.integers(1, 6), st.integers(1, 5))
def test_tokens_drawn_before_are_computed_like_a_prompt(prompt_len: int, drawn: int, budget: int):
    """A sequence that has answer tokens but no KV takes them in chunks, and draws only after the last of them."""
    known = prompt_len + drawn
    s = sequence(prompt_len, drawn + 2)
    s.token_ids += list(range(100, 100 + drawn))
    s.num_sampled = drawn
    batcher = Batcher(limits(max_batch_tokens=budget, max_slots=1, max_seq_len=32))
    batcher.add(s)
    computed: list[int] = []
    while True:
        plan = batcher.plan()
        assert plan is not None
        (begin,), (chunk,) = plan.batch.num_computed.tolist(), chunks(plan)
        computed += range(begin, begin + chunk)
        if plan.sampled:
            break
    assert computed == list(range(known)) and s.num_computed == known and s.num_sampled == drawn + 1
