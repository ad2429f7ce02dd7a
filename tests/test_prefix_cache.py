"""Laws of sharing: each content is computed once, by whoever comes first, and found by all who come later."""

from collections import OrderedDict
from collections.abc import Sequence as Seq

import pytest
from fake_backend import FakeBackend, FakeCodec, NextToken, VirtualClock, hashed, limits, request
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tinyvllm_cli.engine.batcher import Batcher
from tinyvllm_cli.engine.engine import Engine
from tinyvllm_cli.types import Completion, Limits, Sequence, SlotOptions


class World:
    """An engine over a fake backend, and what it has told."""

    def __init__(self, lim: Limits, next_token: NextToken | None = None, *, prefix_cache: bool = True) -> None:
        clock = VirtualClock()
        self.backend = FakeBackend(lim, next_token or hashed(lim.vocab_size), clock)
        self.engine = Engine(self.backend, FakeCodec(clock), eos_token_ids=(), clock=clock, prefix_cache=prefix_cache)
        self.backend.owners = self.engine._batcher.memory.pool.owners
        self.done: dict[int, Completion] = {}

    def add(self, i: int, prompt: Seq[int], max_tokens: int = 1, **params: object) -> None:
        self.engine.add(request(i, list(prompt), **{"max_tokens": max_tokens, "seed": 0} | params))

    def step(self) -> None:
        events = self.engine.step()
        self.done |= {event.request_id: event for event in events if isinstance(event, Completion)}
        self.engine.check()

    def finish(self) -> None:
        while not self.engine.idle:
            self.step()

    def answer(self, i: int) -> list[int]:
        return list(self.done[i].choices[0].token_ids)

    def cached(self, i: int) -> int:
        stats = self.done[i].stats
        assert stats is not None
        return stats.cached_tokens

    @property
    def rows(self) -> int:
        return sum(sum(step.chunks) for step in self.backend.steps)


def common_blocks(a: Seq[int], b: Seq[int], size: int) -> int:
    """Leading full blocks of a that b has too."""
    count = 0
    while (count + 1) * size <= min(len(a), len(b)) and a[: (count + 1) * size] == b[: (count + 1) * size]:
        count += 1
    return count


prompts = st.lists(
    st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=14), st.integers(0, 6)), min_size=1, max_size=10
)


@settings(max_examples=300)
@given(prompts, st.integers(1, 20), st.integers(1, 5), st.sampled_from([1, 2, 4]), st.integers(1, 3))
def test_each_content_is_computed_once(arrivals, budget: int, slots: int, size: int, ahead: int):
    """In a pool for all of it: by who came first. Whoever comes later, also in the same step, finds or awaits it."""
    lim = limits(max_batch_tokens=budget, max_slots=slots, block_size=size, max_in_flight=ahead, num_blocks=400)
    world = World(lim)
    for i, (prompt, wait) in enumerate(arrivals):
        for _ in range(wait):
            world.step()
        world.add(i, prompt)
    world.finish()
    found = 0
    for i, (prompt, _) in enumerate(arrivals):
        blocks = max((common_blocks(prompt, earlier, size) for earlier, _ in arrivals[:i]), default=0)
        wanted = min(blocks * size, len(prompt) - 1)  # the last row is computed: the answer is drawn from it
        assert world.cached(i) == wanted, (i, prompt)
        found += wanted
    assert world.rows == sum(len(prompt) for prompt, _ in arrivals) - found


@pytest.mark.parametrize("budget", [8, 16, 64])
@pytest.mark.parametrize("ahead", [1, 2])
def test_the_same_32_tokens_three_times_at_once(budget: int, ahead: int):
    lim = limits(block_size=16, max_batch_tokens=budget, max_in_flight=ahead)
    world = World(lim)
    for i in range(3):
        world.add(i, range(32), max_tokens=5)
    world.finish()
    assert [world.cached(i) for i in range(3)] == [0, 31, 31]
    assert world.rows == 32 + 2 + 3 * 4
    # The second block is copied, for its last row is written again.
    assert world.answer(0) == world.answer(1) == world.answer(2)
    assert world.engine.stats.peak_blocks == 2 + 2 + 3 and world.engine.stats.peak_shared_blocks == 1


@pytest.mark.parametrize("max_tokens", [1, 2])
@pytest.mark.parametrize("prompt_len", [15, 16, 17, 31, 32, 33])
def test_prompts_that_end_at_a_block_s_border(prompt_len: int, max_tokens: int):
    """Three at once, and one that comes when all of it is cached."""
    world = World(limits(block_size=16, max_batch_tokens=64, max_in_flight=2))
    for i in range(3):
        world.add(i, range(prompt_len), max_tokens)
    world.finish()
    world.add(3, range(prompt_len), max_tokens)
    world.finish()
    found = min(prompt_len // 16 * 16, prompt_len - 1)
    assert [world.cached(i) for i in range(4)] == [0, found, found, found]
    assert world.rows == prompt_len + 3 * (prompt_len - found) + 4 * (max_tokens - 1)
    assert sum(map(len, world.backend.copied)) == (0 if prompt_len % 16 else 3)


def test_a_second_turn_finds_the_first_one_s_answer():
    world = World(limits(block_size=4, max_seq_len=64, max_in_flight=2))
    world.add(0, range(10), max_tokens=11)
    world.finish()
    history = [*range(10), *world.answer(0)]  # 21 tokens, the last one never computed
    world.add(1, [*history, 1, 2, 3])
    world.finish()
    assert world.cached(1) == 20


def test_a_cached_prompt_costs_one_row():
    world = World(limits(block_size=4))
    for i in range(2):
        world.add(i, range(12))
        world.finish()
    assert world.backend.steps[-1].chunks == [1] and world.cached(1) == 11


def test_without_a_cache_nothing_is_found():
    world = World(limits(block_size=4), prefix_cache=False)
    for i in range(3):
        world.add(i, range(12))
    world.finish()
    assert world.rows == 36 and world.engine.stats.cached_tokens == 0


def test_the_last_block_of_a_cached_prompt_is_taken_over_where_no_other_is_left():
    """A pool of a single block: nothing to copy it to."""
    world = World(limits(block_size=4, num_blocks=2))
    answers = []
    for i in range(2):
        world.add(i, range(4))
        world.finish()
        answers.append(world.answer(i))
    assert answers[0] == answers[1]


# ---------------------------------------------------------------- an owner that leaves


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_who_waits_goes_on_where_the_owner_of_its_prefix_was_aborted(steps: int):
    """What was computed is found, the rest is computed by the first of those that wait; one came just now."""
    world = World(limits(block_size=4, max_batch_tokens=8, max_slots=3, max_seq_len=64))
    for i in range(3):
        world.add(i, range(40))
    for _ in range(steps):
        world.step()
    world.engine.abort(0)
    world.add(3, range(40))
    world.engine.check()
    world.finish()
    assert [world.cached(i) for i in (1, 2, 3)] == [8 * steps, 39, 39]
    assert world.rows == 40 + 1 + 1


def test_who_waits_goes_on_where_the_owner_of_its_prefix_was_preempted():
    """Three old ones take a block each a step, of which the owner computes one token, and another waits for it."""
    lim = limits(block_size=1, max_batch_tokens=4, num_blocks=1 + 55, max_seq_len=40, max_slots=5)
    asked = [*(([9 + i], 25) for i in range(3)), *((range(20), 3),) * 2]
    world = World(lim)
    for i, (prompt, max_tokens) in enumerate(asked):
        world.add(i, prompt, max_tokens)
    batcher, under_way = world.engine._batcher, []
    while not world.engine.idle:
        before = {s.request.request_id: s.num_computed for s in batcher.running}
        world.step()
        under_way += [before[s.request.request_id] for s in batcher.waiting if s.request.request_id in before]
    assert any(0 < computed < 20 for computed in under_way), "an owner left between its chunks"
    for i, (prompt, max_tokens) in enumerate(asked):
        alone = World(lim)
        alone.add(i, prompt, max_tokens)
        alone.finish()
        assert world.answer(i) == alone.answer(i)


def test_what_an_aborted_owner_leaves_is_not_for_a_younger_one():
    """1 was to compute what follows the prefix of 0; 2 waits, still within that prefix; 3 comes later."""
    world = World(limits(block_size=4, max_batch_tokens=4, max_slots=4, max_seq_len=64))
    for i, length in enumerate((16, 30, 31)):
        world.add(i, range(length))
    world.step()
    world.engine.abort(1)
    world.add(3, range(32))
    world.finish()
    assert [world.cached(i) for i in (2, 3)] == [16, 28]
    assert world.rows == 16 + 15 + 4


def test_nobody_waits_for_one_that_has_a_copy_of_what_was_evicted():
    """1 goes on behind a copy of the block that 0 left; 2 takes that block; 3 computes it again beside 1."""
    world = World(limits(block_size=4, num_blocks=1 + 6, max_batch_tokens=32))
    world.add(0, [0] * 4)
    world.finish()
    world.add(1, [0] * 4, 5)
    world.step()
    world.step()
    world.add(2, range(1, 17))
    world.step()
    assert world.engine.stats.evictions == 1
    world.add(3, [0] * 4)
    world.step()
    assert world.done.keys() == {0, 2, 3} and world.cached(3) == 0
    world.finish()
    assert world.cached(1) == 3 and world.answer(3) == world.answer(0)


def test_who_waits_for_the_last_block_of_one_that_is_computed_again_does_not_wait_for_its_end():
    """All but the last row of its eight tokens fit into a step, and the next one computes that row and draws."""
    batcher = Batcher(limits(block_size=4, max_batch_tokens=7, max_slots=2))
    again, other = (Sequence(request(i, [5] * 5), [5] * 8, 5, 20, SlotOptions()) for i in range(2))
    again.num_sampled = 3  # before it was preempted
    other.prompt_len = 8
    batcher.add(again)
    batcher.add(other)
    plans = [batcher.plan() for _ in range(3)]
    assert [plan and plan.sampled for plan in plans] == [[], [again], [again, other]]


# ---------------------------------------------------------------- eviction, against a model of it


class Model:
    """Requests one after another over a pool: which of their prompts' blocks are found. Knows texts, no blocks."""

    def __init__(self, num_blocks: int, size: int) -> None:
        self.num_blocks, self.size = num_blocks, size
        self.cached: OrderedDict[tuple[int, ...], None] = OrderedDict()  # next to be evicted first
        self.held = 0

    def take(self, count: int) -> None:
        self.held += count
        while self.held + len(self.cached) > self.num_blocks:
            self.cached.popitem(last=False)

    def answer(self, prompt: Seq[int], answer: Seq[int]) -> int:
        """Prompt tokens that are found."""
        size, text = self.size, [*prompt, *answer][:-1]  # the last token is never computed
        found = 0
        while found + size <= len(prompt) - 1 and tuple(prompt[: found + size]) in self.cached:
            found += size
        for end in range(size, found + 1, size):
            del self.cached[tuple(prompt[:end])]
        self.held = found // size
        tokens = found
        copied = found + size == len(prompt) and tuple(prompt) in self.cached
        if copied:
            self.take(1)
            copied = tuple(prompt) in self.cached  # else it was evicted to make room for its copy, and is computed
            tokens += size - 1 if copied else 0
        else:
            self.take(-(-len(prompt) // size) - found // size)
        self.take(-(-len(text) // size) - self.held)
        self.held = 0
        for end in range(len(text) // size * size, 0, -size):
            self.cached.setdefault(tuple(text[:end]))
        return tokens


@settings(max_examples=300)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=12), st.integers(1, 6)), min_size=2, max_size=14
    ),
    st.integers(2, 9),
    st.sampled_from([1, 2, 4]),
)
@example(
    # The third one's copy outlives its source, in whose place it is found from then on.
    turns=[([0] * 4, 1), ([1] * 4, 1), ([0] * 4, 6), ([0, 1] * 5, 1), ([1] * 4, 1)], num_blocks=4, size=4
)  # fmt: skip
def test_hits_are_those_of_a_least_recently_used_cache(turns, num_blocks: int, size: int):
    world = World(limits(block_size=size, num_blocks=1 + num_blocks, max_seq_len=32))
    model = Model(num_blocks, size)
    for i, (prompt, max_tokens) in enumerate(turns):
        if len(prompt) + max_tokens - 1 <= num_blocks * size:
            world.add(i, prompt, max_tokens)
            world.finish()
            assert world.cached(i) == model.answer(prompt, world.answer(i)), (i, prompt)
