"""Laws of the schedule: who runs in a step, with how many tokens, in which slot and blocks."""

from collections import deque
from collections.abc import Callable

import numpy as np
import pytest
from fake_backend import limits, request
from hypothesis import given
from hypothesis import strategies as st

from tinyvllm_cli.engine.batcher import Batcher, Plan
from tinyvllm_cli.types import Sequence, SlotOptions


def sequence(prompt_len: int, max_tokens: int = 1, i: int = 0) -> Sequence:
    ids = list(range(prompt_len))
    return Sequence(request(i, ids), ids.copy(), prompt_len, prompt_len + max_tokens, SlotOptions())


def chunks(plan: Plan) -> list[int]:
    return np.diff(plan.batch.query_start_loc).tolist()


def land(batcher: Batcher, plan: Plan) -> None:
    """Read a step back; whoever has reached its length ends."""
    for s in plan.sampled:
        if not s.finished:
            batcher.land(s, 7)
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
    limits,
    max_batch_tokens=st.integers(1, 12),
    max_slots=st.integers(1, 5),
    max_seq_len=st.just(24),
    block_size=st.sampled_from([1, 4, 16]),
)
shapes = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 4)), min_size=1, max_size=12)


@given(sizes, shapes, st.integers(1, 4))
def test_decoding_rows_come_first_then_prompts_in_order_fill_the_budget(lim, shapes, ahead):
    batcher = Batcher(lim)
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
    batcher = Batcher(lim)
    sequences = [sequence(prompt_len, max_tokens, i) for i, (prompt_len, max_tokens) in enumerate(shapes)]
    for s in sequences:
        batcher.add(s)
    plans = run(batcher, ahead)
    assert [s for plan in plans for s in plan.admitted] == sequences, "first in, first out"
    for s in sequences:
        assert sum(plan.sampled.count(s) for plan in plans) == s.max_len - s.prompt_len
    # The last token of each is never fed back.
    assert sum(len(plan.batch.token_ids) for plan in plans) == sum(s.max_len - 1 for s in sequences)
    assert batcher.blocks_held == 0


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
    assert plan.batch.token_ids.tolist() == [*range(5), *range(6), *range(5)]
    plan = batcher.plan()
    assert chunks(plan) == [1, 1, 4], "decoding rows are not held up by the rest of a prompt"
    assert plan.batch.token_ids.tolist() == [-1, -1, 5, 6, 7, 8]


def test_a_token_that_was_read_is_given_and_others_are_fed_back():
    batcher = Batcher(limits())
    s = sequence(3, 3)
    batcher.add(s)
    batcher.plan()
    batcher.land(s, 41)
    assert batcher.plan().batch.token_ids.tolist() == [41]
    assert batcher.plan().batch.token_ids.tolist() == [-1]


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
    b._tables[b.running[0].slot, 0] += 1


def run_while_waiting(b: Batcher) -> None:
    b.waiting.append(b.running[0])


def count_too_far(b: Batcher) -> None:
    b.running[0].num_computed += 2


def keep_an_ended_one(b: Batcher) -> None:
    b.running[0].finished = True


@pytest.mark.parametrize(
    "damage",
    [steal_block, null_block, share_slot, lose_block, stale_table, run_while_waiting, count_too_far, keep_an_ended_one],
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
    fed: list[int] = []
    while True:
        plan = batcher.plan()
        assert plan is not None
        fed += plan.batch.token_ids.tolist()
        if plan.sampled:
            break
    assert fed == s.token_ids[:known] and s.num_computed == known and s.num_sampled == drawn + 1
