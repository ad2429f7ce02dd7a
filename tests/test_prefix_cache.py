"""Laws of sharing: each content is computed once, by whoever comes first, and found by all who come later."""

from collections import OrderedDict, deque
from collections.abc import Sequence as Seq

import pytest
from fake_backend import FakeBackend, FakeCodec, VirtualClock, hashed, limits, refilling_limits, request
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tinyvllm_cli.engine.batcher import Batcher, Plan
from tinyvllm_cli.engine.engine import Engine
from tinyvllm_cli.types import Completion, Limits, Sequence, SlotOptions


class World:
    """An engine over a fake backend, and what it has told."""

    def __init__(self, lim: Limits, *, prefix_cache: bool = True) -> None:
        clock = VirtualClock()
        self.backend = FakeBackend(lim, hashed(lim.vocab_size), clock)
        self.engine = Engine(self.backend, FakeCodec(clock), eos_token_ids=(), clock=clock, prefix_cache=prefix_cache)
        self.backend.owners = self.engine._batcher.memory.pool.owners
        self.done: dict[int, Completion] = {}

    def add(self, i: int, prompt: Seq[int], max_tokens: int = 1) -> None:
        self.engine.add(request(i, list(prompt), max_tokens=max_tokens, seed=0))

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
        if copied and tuple(prompt) not in self.cached:  # what follows the copy would not be found
            text = text[: len(prompt) - size]
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
    # The third one's copy outlives its source: what follows it must not keep the second one's block from staying.
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


# ---------------------------------------------------------------- admission, against a search of all tables


def demand(s: Sequence, size: int) -> int:
    """Blocks that it lacks for all it knows and, where it may go on, for a block more."""
    known, longest = s.prompt_len + s.num_sampled, s.max_len - 1
    return min(-(-known // size) + 1, -(-longest // size)) - len(s.block_table)


def fits(s: Sequence, running: dict[Sequence, int], lim: Limits, *, copies: bool) -> bool:
    """Whether a sequence fits beside those that run, each with the number of tokens that it knew when it began.

    What they have computed of that, it shares; copies: also the last block where it ends with those tokens, which may
    be a copy, and what is found then is its source.
    """
    size = lim.block_size
    texts = {
        tuple(other.token_ids[:end])
        for other, began in running.items()
        for end in range(size, min(other.num_computed, began if copies else began - 1) + 1, size)
    }
    shared = 0
    while (shared + 1) * size < len(s.token_ids) and tuple(s.token_ids[: (shared + 1) * size]) in texts:
        shared += 1
    owned = {block for other in running for block in other.block_table}
    promised = sum(demand(other, size) for other in running if other.prompt_len + other.num_sampled < other.max_len)
    return demand(s, size) - shared + promised <= lim.num_blocks - 1 - len(owned)


small = st.builds(
    refilling_limits,
    max_batch_tokens=st.integers(1, 12),
    max_slots=st.integers(1, 5),
    refill_slots=st.integers(1, 3),
    max_seq_len=st.just(20),
    block_size=st.sampled_from([1, 2, 4]),
    num_blocks=st.integers(21, 40),
)
shapes = st.lists(
    st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=12), st.integers(1, 8)), min_size=1, max_size=12
)


@settings(max_examples=300)
@given(small, shapes, st.integers(1, 3))
@example(
    # A block that one is to copy is evicted in the plan that admits another with the same prompt.
    lim=limits(max_batch_tokens=1, max_seq_len=20, block_size=1, num_blocks=37),
    shapes=[([0], 1), ([0], 7), ([1], 5), ([1] + [0] * 7, 8), ([1, 0, 1] + [0] * 5, 3), *[([0], 1), ([0], 3)] * 2],
    ahead=3,
)  # fmt: skip
def test_admissions_are_those_of_a_search_of_all_tables(lim: Limits, shapes, ahead: int):
    """The head of the queue gets a slot if it fits, and only then; where blocks run out, the youngest leave."""
    batcher = Batcher(lim)
    for i, (ids, max_tokens) in enumerate(shapes):
        batcher.add(Sequence(request(i, ids), list(ids), len(ids), len(ids) + max_tokens, SlotOptions()))
    began: dict[Sequence, int] = {}
    has_room, asked = batcher.memory.has_room, []

    def compared(s: Sequence, promised: int) -> bool:
        began.update({other: len(other.token_ids) for other in batcher.running if other not in began})
        found = has_room(s, promised)
        running = {other: began[other] for other in batcher.running}
        assert fits(s, running, lim, copies=False) <= found <= fits(s, running, lim, copies=True)
        asked.append((s, found))
        return found

    batcher.memory.has_room = compared  # type: ignore[method-assign]
    in_flight: deque[Plan] = deque()
    while batcher.waiting or batcher.running:
        before = list(batcher.running)
        plan = batcher.plan()
        batcher.check()
        admitted = plan.admitted if plan else []
        assert admitted == [s for s, found in asked if found] and all(found for _, found in asked[:-1])
        asked.clear()
        stayed = before[: len(batcher.running) - len(admitted)]
        assert batcher.running == stayed + admitted, "only the youngest leave"
        for s in set(before) - set(stayed):
            began.pop(s)
        began.update({s: len(s.token_ids) for s in admitted})
        if plan is not None:
            in_flight.append(plan)
        if plan is None or len(in_flight) == ahead:
            for s in in_flight.popleft().sampled:
                s.token_ids.append(len(s.token_ids) % 2)
                if len(s.token_ids) == s.max_len:
                    batcher.finish(s)
                    began.pop(s, None)
            batcher.check()
