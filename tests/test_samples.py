"""Laws of several answers to one prompt: computed once, shared, copied where they part, each as if it were alone."""

from collections.abc import Sequence as Seq
from dataclasses import replace

import pytest
from fake_backend import FakeBackend, FakeCodec, NextToken, VirtualClock, hashed, limits, request, scripted
from hypothesis import given
from hypothesis import strategies as st

from tinyvllm_cli.engine.batcher import Batcher
from tinyvllm_cli.engine.engine import Engine
from tinyvllm_cli.engine.sampling import sample_seed
from tinyvllm_cli.errors import DeviceError
from tinyvllm_cli.types import Completion, Delta, Event, Limits, Request, Sequence, SlotOptions, Stats, Usage


class World:
    """An engine over a fake backend, which is checked after every step, and what it has told."""

    def __init__(
        self, lim: Limits, next_token: NextToken | None = None, *, eos: tuple[int, ...] = (), prefix_cache: bool = True
    ) -> None:
        clock = VirtualClock()
        self.backend = FakeBackend(lim, next_token or hashed(lim.vocab_size), clock)
        self.engine = Engine(self.backend, FakeCodec(clock), eos_token_ids=eos, clock=clock, prefix_cache=prefix_cache)
        self.backend.owners = self.engine._batcher.memory.pool.owners
        self.events: list[Event] = []

    def step(self) -> None:
        self.events += self.engine.step()
        self.engine.check()

    def finish(self) -> dict[int, Completion]:
        while not self.engine.idle:
            self.step()
        assert self.engine._batcher.memory.pool.num_owned == 0
        return {event.request_id: event for event in self.events if isinstance(event, Completion)}

    def answer(self, *requests: Request) -> dict[int, Completion]:
        for req in requests:
            self.engine.add(req)
        return self.finish()

    @property
    def rows(self) -> int:
        return sum(sum(step.chunks) for step in self.backend.steps)


def ids(completion: Completion) -> list[tuple[int, ...]]:
    return [choice.token_ids for choice in completion.choices]


# ---------------------------------------------------------------- what each answer is


@pytest.mark.parametrize("own_seed", [5, None])
@pytest.mark.parametrize("has_own_id", [True, False])
def test_an_answer_does_not_depend_on_how_many_there_are(own_seed: int | None, has_own_id: bool):
    plain = replace(request(0, range(1, 11), max_tokens=6, seed=own_seed), has_own_id=has_own_id)
    answers = {
        n: ids(World(limits()).answer(replace(plain, params=replace(plain.params, n=n)))[0]) for n in (1, 2, 3, 9)
    }
    for n, found in answers.items():
        assert found == answers[9][:n]
    assert len(set(answers[9])) == 9


def test_each_answer_is_that_of_a_request_with_its_seed():
    several = World(limits()).answer(request(0, range(10), max_tokens=6, seed=77, n=5))[0]
    alone = [request(i, range(10), max_tokens=6, seed=sample_seed(77, i)) for i in range(5)]
    assert ids(several) == [ids(World(limits()).answer(req)[req.request_id])[0] for req in alone]


@pytest.mark.parametrize("ahead", [1, 3])
def test_where_nothing_is_drawn_all_answers_are_equal(ahead: int):
    done = World(limits(max_in_flight=ahead), scripted(10, 9, 8, 7, 6)).answer(request(0, range(10), max_tokens=4, n=6))
    assert ids(done[0]) == [(9, 8, 7, 6)] * 6


def by_seed(ends: dict[int, int], token: int = 2) -> NextToken:
    """9 to all, but `token` where the answer of this seed has so many tokens."""
    return lambda history, options: token if len(history) - 3 == ends.get(options.seed) else 9


@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize("slots", [1, 2, 4])
def test_each_ends_by_itself_and_the_request_with_the_last(slots: int, ahead: int):
    """The second one at once, the first after two tokens."""
    ends = by_seed({sample_seed(7, 1): 0, 7: 2})
    world = World(limits(max_slots=slots, max_in_flight=ahead), ends, eos=(2,))
    completion = world.answer(request(0, (5, 6, 7), max_tokens=5, seed=7, n=3))[0]
    assert ids(completion) == [(9, 9, 2), (2,), (9,) * 5]
    assert [choice.index for choice in completion.choices] == [0, 1, 2]
    assert [choice.finish_reason for choice in completion.choices] == ["stop", "stop", "length"]
    assert [choice.text for choice in completion.choices] == [" 9 9.", ".", " 9 9 9 9 9."]
    assert completion.usage == Usage(3, 9)
    deltas = [event for event in world.events if isinstance(event, Delta)]
    for choice in completion.choices:
        mine = [delta for delta in deltas if delta.index == choice.index]
        assert "".join(delta.text for delta in mine) == choice.text
        assert sum((delta.token_ids for delta in mine), ()) == choice.token_ids
    assert world.events[-1] is completion


@pytest.mark.parametrize("ahead", [1, 3])
@pytest.mark.parametrize("slots", [1, 2, 8])
@pytest.mark.parametrize("made", [0, 2])
def test_an_answer_that_fails_fails_its_request_and_no_other(made: int, slots: int, ahead: int):
    fails = by_seed({sample_seed(7, 2): made}, token=-1)
    world = World(limits(max_slots=slots, max_in_flight=ahead), fails)
    good = [request(i, (5, 6, 7), max_tokens=5, seed=i, n=2) for i in (0, 2)]
    done = world.answer(good[0], request(1, (5, 6, 7), max_tokens=5, seed=7, n=4), good[1])
    assert done[1].error is not None and done[1].error.type == "nan_logits"
    assert (done[1].choices, done[1].usage, done[1].stats) == ((), None, None)
    assert ids(done[0]) == ids(done[2]) == [(9,) * 5] * 2


def test_no_token_wanted_is_no_answer_however_many():
    completion = World(limits()).answer(request(0, (5, 6), max_tokens=0, n=3))[0]
    assert (completion.choices, completion.usage, completion.error) == ((), Usage(2, 0), None)


# ---------------------------------------------------------------- what is computed


@given(
    prompt_len=st.integers(1, 20),
    n=st.integers(2, 6),
    max_tokens=st.integers(1, 7),
    size=st.sampled_from([1, 2, 4, 16]),
    budget=st.integers(1, 12),
    ahead=st.integers(1, 3),
    prefix_cache=st.booleans(),
)
def test_the_prompt_is_computed_once_and_the_block_that_it_ends_in_is_copied(
    prompt_len: int, n: int, max_tokens: int, size: int, budget: int, ahead: int, prefix_cache: bool
):
    lim = limits(max_slots=6, block_size=size, max_batch_tokens=budget, max_in_flight=ahead)
    world = World(lim, prefix_cache=prefix_cache)
    completion = world.answer(request(0, range(prompt_len), max_tokens=max_tokens, seed=1, n=n))[0]
    assert world.rows == prompt_len + n * (max_tokens - 1)
    copies = n - 1 if prompt_len % size and max_tokens > 1 else 0  # all at once, before any of them writes
    assert [len(pairs) for pairs in world.backend.copied] == ([copies] if copies else [])
    assert completion.stats is not None and completion.stats.cached_tokens == 0
    if budget >= n and max_tokens > 1:  # so that all end at once, each with blocks of its own behind the full ones
        full, longest = prompt_len // size, -(-(prompt_len + max_tokens - 1) // size)
        assert world.engine.stats.peak_blocks == full + n * (longest - full)


def test_256_samples_hold_a_prompt_s_full_blocks_once():
    lim = limits(
        block_size=16, max_slots=256, max_batch_tokens=512, max_seq_len=2048, num_blocks=1 + 95 + 256, max_in_flight=2
    )
    world = World(lim)
    completion = world.answer(request(0, [i % 50 for i in range(1530)], max_tokens=4, seed=1, n=256))[0]
    assert completion.usage == Usage(1530, 256 * 4)
    assert world.engine.stats.peak_blocks == 95 + 256 and world.engine.stats.preemptions == 0
    assert world.engine.stats.peak_shared_blocks == 96, "all of the prompt until they part"
    (pairs,) = world.backend.copied
    assert len({source for source, _ in pairs}) == 1 and len({target for _, target in pairs}) == len(pairs) == 255
    assert world.rows == 1530 + 256 * 3
    # The end of the prompt's last block once, then 255 copies of it too, of which each step writes a position.
    assert world.engine.stats.unwritten_steps == 6 + 256 * (5 + 4 + 3)


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_more_samples_than_slots(prefix_cache: bool):
    """Those that come later find the prompt, or compute it once for all that come with them."""
    world = World(limits(max_slots=2, block_size=4), prefix_cache=prefix_cache)
    completion = world.answer(request(0, range(10), max_tokens=3, seed=1, n=5))[0]
    assert len(set(ids(completion))) == 5
    again = 2 if prefix_cache else 10  # rows; in turns of two, two and one
    assert world.rows == 10 + 2 * again + 5 * 2
    assert completion.stats is not None and completion.stats.cached_tokens == 0, "of itself it finds no hit"


def test_a_prompt_that_is_cached_counts_once():
    world = World(limits(block_size=4))
    world.answer(request(0, range(10)))
    completion = world.answer(request(1, range(10), n=3, seed=1))[1]
    assert completion.stats is not None and completion.stats.cached_tokens == 8
    assert (world.engine.stats.prompt_tokens, world.engine.stats.cached_tokens) == (20, 8)


def test_times_are_from_the_first_to_the_last():
    world = World(limits(max_slots=2, max_batch_tokens=4, max_in_flight=1), scripted(4, 9), prefix_cache=False)
    completion = world.answer(request(0, (5, 6, 7, 8), max_tokens=2, n=3))[0]
    # A step of the prompt, one of both, then the same again for the third.
    assert completion.stats == Stats(queue_s=0, ttft_s=1, decode_s=3, e2e_s=4, tokens_per_s=6 / 4)


def test_the_first_tokens_come_from_one_row():
    world = World(limits(max_in_flight=1, max_batch_tokens=6))
    world.engine.add(request(0, range(10), max_tokens=3, n=3, seed=1))
    world.engine.add(request(1, [7, 8], max_tokens=3))
    for _ in range(3):
        world.step()
    assert [step.chunks for step in world.backend.steps] == [[6], [4, 2], [1, 1, 1, 1]]
    assert [step.sampled for step in world.backend.steps] == [[], [0, 1, 2, 3], [0, 1, 2, 3]]


# ---------------------------------------------------------------- when some leave


def planned(n: int, *older: Sequence) -> tuple[Batcher, list[Sequence]]:
    """The samples of a prompt of six tokens, of which one step has drawn the first tokens; nothing is read back."""
    batcher = Batcher(limits(block_size=4, max_slots=8))
    req = request(0, range(6), n=n)
    sequences = [Sequence(req, list(range(6)), 6, 14, SlotOptions(), index=i) for i in range(n)]
    for sequence in (*older, *sequences):
        batcher.add(sequence)
    plan = batcher.plan()
    assert plan is not None and plan.sampled == [*older, *sequences] and not plan.copies
    batcher.check()
    return batcher, sequences


@pytest.mark.parametrize("ended", [(0,), (2,), (0, 1), (1, 2, 3), (0, 1, 2, 3)])
def test_the_last_that_holds_a_block_keeps_it(ended: Seq[int]):
    """Some end with their first token, before they have parted."""
    batcher, sequences = planned(4)
    shared = sequences[0].block_table[1]
    for i in ended:
        batcher.finish(sequences[i])
        batcher.check()
    plan = batcher.plan()
    batcher.check()
    left = [sequence for sequence in sequences if not sequence.finished]
    assert (plan is None) == (not left)
    if plan is not None:
        assert [source for source, _ in plan.copies] == [shared] * (len(left) - 1)
        lasts = [sequence.block_table[1] for sequence in left]
        assert shared in lasts and {target for _, target in plan.copies} == {*lasts} - {shared}
        assert all(sequence.block_table[0] == left[0].block_table[0] for sequence in left)


def test_where_no_block_is_left_to_part_the_youngest_leave():
    """Of the blocks that were promised to them, somebody else has all but one."""
    batcher, sequences = planned(4)
    pool = batcher.memory.pool
    taken = pool.allocate(pool.num_available - 1)
    plan = batcher.plan()
    assert plan is not None and taken is not None
    assert batcher.running == sequences[:2] and list(batcher.waiting) == sequences[2:] and batcher.preemptions == 2
    assert len(plan.copies) == 1 and plan.sampled == sequences[:2]
    pool.free(taken)
    batcher.check()
    for sequence in sequences:
        sequence.token_ids.append(7)
    assert batcher.plan() is not None
    batcher.check()


def test_one_that_leaves_as_it_parts_leaves_no_copy_behind():
    """An older one, at the end of its block, takes the last block from the one that has just got it."""
    older = Sequence(request(1, [9] * 4), [9] * 4, 4, 12, SlotOptions())
    batcher, sequences = planned(2, older)
    pool = batcher.memory.pool
    assert pool.allocate(pool.num_available - 1) is not None
    plan = batcher.plan()
    assert plan is not None and batcher.preemptions == 1
    assert plan.sampled == [older, sequences[0]] and not plan.copies


def test_those_that_wait_in_their_slots_give_no_blocks_back():
    """Two that decode take the blocks that a prompt of ten tokens still needs, of which each step computes one."""
    batcher = Batcher(limits(block_size=1, max_batch_tokens=3, max_slots=5, num_blocks=1 + 20))
    older = [Sequence(request(i, [9 + i]), [9 + i], 1, 20, SlotOptions()) for i in range(2)]
    req = request(2, range(10), n=3)
    samples = [Sequence(req, list(range(10)), 10, 12, SlotOptions(), index=i) for i in range(3)]
    for sequence in (*older, *samples):
        batcher.add(sequence)
    for plan in iter(batcher.plan, None):
        for sequence in plan.sampled:
            sequence.token_ids.append(5)
        if samples[0] in batcher.waiting:
            break
    assert list(batcher.waiting) == samples and batcher.running == older
    assert batcher.preemptions == 1 and [sequence.num_preempted for sequence in samples] == [1, 0, 0]


def test_nobody_is_admitted_to_what_is_promised_to_those_that_wait_for_the_prompt():
    """Four blocks for the prompt and what follows it, one more for the second answer: of eight, three are left."""
    batcher = Batcher(limits(block_size=4, max_batch_tokens=4, num_blocks=1 + 8))
    req = request(0, range(12), n=2)
    for i in range(2):
        batcher.add(Sequence(req, list(range(12)), 12, 20, SlotOptions(), index=i))
    assert batcher.plan() is not None
    for prompt_len, fits in ((9, False), (5, True)):  # four blocks, or three
        another = Sequence(request(1, [9] * prompt_len), [9] * prompt_len, prompt_len, 20, SlotOptions())
        batcher.add(another)
        plan = batcher.plan()
        assert plan is not None and plan.admitted == [another] * fits
        batcher.check()
        batcher.finish(another)


@pytest.mark.parametrize("num_blocks", range(4, 14))
@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_little_memory_changes_no_answer(num_blocks: int, ahead: int, prefix_cache: bool):
    asked = [request(i, [i, *range(5)], max_tokens=10, seed=i, n=4) for i in range(2)]
    lim = limits(num_blocks=1 + num_blocks, block_size=4, max_in_flight=ahead, max_slots=6)
    done = World(lim, prefix_cache=prefix_cache).answer(*asked)
    for i, req in enumerate(asked):
        assert ids(done[i]) == ids(World(limits(max_slots=6)).answer(req)[i])


@pytest.mark.parametrize("steps", range(6))
def test_an_abort_ends_all_of_them_wherever_they_stand(steps: int):
    world = World(limits(max_batch_tokens=4, max_slots=3, block_size=4, max_in_flight=2))
    world.engine.add(request(0, range(10), max_tokens=3, n=5, seed=1))
    world.engine.add(request(1, range(10), max_tokens=3, n=2, seed=2))
    for _ in range(steps):
        world.step()
    world.engine.abort(0)
    world.engine.check()
    told = len(world.events)
    done = world.finish()
    assert done.keys() == {1} and {event.request_id for event in world.events[told:]} == {1}
    assert ids(done[1]) == ids(World(limits()).answer(request(1, range(10), max_tokens=3, n=2, seed=2))[1])


def test_a_device_that_fails_fails_a_request_once():
    world = World(limits(max_slots=2, block_size=4))
    world.engine.add(request(0, range(6), max_tokens=9, n=5, seed=1))
    world.engine.add(request(1, range(6), max_tokens=9, n=2, seed=1))
    world.backend.failing_step = 4
    with pytest.raises(DeviceError):
        world.finish()
    assert [completion.request_id for completion in world.engine.fail_running("lost")] == [0], "the other waits"
    world.engine.check()
