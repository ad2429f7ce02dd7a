"""The batcher against a slow one that knows texts, no chains or arrays: the same steps, of the same worlds."""

from collections import deque
from collections.abc import Sequence as Seq

import numpy as np
from brute_batcher import BruteBatcher, Job
from fake_backend import limits, refilling_limits, request
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tinyvllm_cli.engine.batcher import Batcher, Plan
from tinyvllm_cli.types import Limits, Sequence, SlotOptions


class Both:
    """A batcher and the slow one, which are told the same; their states are compared after everything that happens."""

    def __init__(self, lim: Limits, *, prefix_cache: bool = True, as_arrays: bool = True) -> None:
        """as_arrays: whether prompts are given as arrays too, as the engine does."""
        self.lim, self.as_arrays = lim, as_arrays
        self.batcher, self.brute = Batcher(lim, prefix_cache=prefix_cache), BruteBatcher(lim, prefix_cache=prefix_cache)
        self.sequences: list[Sequence] = []
        self.jobs: list[Job] = []
        self.in_flight: deque[list[int]] = deque()

    @property
    def idle(self) -> bool:
        return not (self.batcher.running or self.batcher.waiting or self.in_flight)

    def add(self, prompt: Seq[int], max_tokens: int, n: int = 1) -> None:
        """A request that fits."""
        family, prompt_len = len(self.jobs), len(prompt)
        max_len = min(prompt_len + max_tokens, self.lim.max_seq_len)
        for index in range(n):
            req = request(family, prompt, n=n)
            ids = np.array(prompt, np.int32) if self.as_arrays else None
            self.sequences.append(
                Sequence(req, list(prompt), prompt_len, max_len, SlotOptions(), index, prompt_ids=ids)
            )
            self.jobs.append(Job(len(self.jobs), tuple(prompt), max_len, family, list(prompt)))
            self.batcher.add(self.sequences[-1])
            self.brute.waiting.append(self.jobs[-1])
        self.compare()

    def plan(self) -> bool:
        plan, step = self.batcher.plan(), self.brute.plan()
        self.batcher.check()
        assert (plan is None) == (step is None)
        if plan is not None and step is not None:
            assert self.numbers(plan.admitted) == step.admitted
            assert self.rows(plan) == step.rows
            assert self.numbers(plan.sampled) == step.sampled
            assert len(plan.copies) == step.num_copies
            self.in_flight.append(step.sampled)
        self.compare()
        return plan is not None

    def land(self, token: int, *, eos: bool = False) -> None:
        """The oldest step in flight is read back: each draws this token; eos: with which it ends."""
        for number in self.in_flight.popleft():
            sequence, job = self.sequences[number], self.jobs[number]
            if not sequence.finished:
                sequence.token_ids.append(token)
                job.tokens.append(token)
                if eos or len(job.tokens) == job.max_len:
                    self.finish(number)
        self.compare()

    def abort(self, number: int) -> None:
        """All samples of a request."""
        family = self.jobs[number].family
        for other in reversed(self.jobs):
            if other.family == family and not self.sequences[other.number].finished:
                self.finish(other.number)
        self.compare()

    def finish(self, number: int) -> None:
        self.batcher.finish(self.sequences[number])
        self.brute.finish(self.jobs[number])

    def numbers(self, sequences: Seq[Sequence]) -> list[int]:
        return [self.sequences.index(sequence) for sequence in sequences]

    def rows(self, plan: Plan) -> list[tuple[int, int, int]]:
        """Sequence, first token and number of tokens of each part of a step."""
        by_slot = {sequence.slot: number for number, sequence in enumerate(self.sequences)}
        numbers = [by_slot[slot] for slot in plan.batch.slots.tolist()]
        counts = np.diff(plan.batch.query_start_loc).tolist()
        return list(zip(numbers, plan.batch.num_computed.tolist(), counts, strict=True))

    def compare(self) -> None:
        self.batcher.check()
        pool, brute = self.batcher.memory.pool, self.brute
        assert self.numbers(self.batcher.running) == [job.number for job in brute.running]
        assert self.numbers(self.batcher.waiting) == [job.number for job in brute.waiting]
        assert len(pool.free_blocks()) == brute.num_free and pool.num_available == brute.num_available
        assert pool.num_owned == len(brute.owned)
        assert pool.num_shared == sum(len(block.owners) > 1 for block in brute.owned)
        assert (pool.evictions, self.batcher.preemptions) == (brute.evictions, brute.preemptions)
        for sequence, job in zip(self.sequences, self.jobs, strict=True):
            assert len(sequence.block_table) == len(job.blocks)
            assert (sequence.num_computed, sequence.num_cached) == (job.computed, job.cached) or sequence.finished


worlds = st.builds(
    refilling_limits,
    max_batch_tokens=st.integers(1, 12),
    max_slots=st.integers(2, 6),
    refill_slots=st.sampled_from([1, 1, 2, 4]),
    admit_slots=st.sampled_from([1, 2, 6]),
    max_seq_len=st.just(32),
    block_size=st.sampled_from([1, 2, 4]),
    num_blocks=st.integers(2, 24),
    max_in_flight=st.integers(1, 3),
)
prompts = st.builds(  # of few ids; most begin as others
    lambda begin, rest: [*begin, *rest] or [0],
    st.sampled_from([[], [0] * 4, [0] * 12, [0, 1] * 8, [0, 1] * 8]),
    st.just([]) | st.lists(st.integers(0, 1), max_size=6),
)
adds = st.tuples(st.just("add"), prompts, st.integers(1, 20), st.sampled_from([1, 1, 1, 2, 4]))
steps = st.tuples(st.just("step"), st.integers(1, 6), st.integers(0, 1), st.sampled_from([False, False, True]))
aborts = st.tuples(st.just("abort"), st.integers(0, 9))


@settings(max_examples=300)
@given(
    worlds,
    st.booleans() | st.just(True),
    st.booleans(),
    st.lists(adds, min_size=3, max_size=8),
    st.lists(adds | steps | steps | aborts),
)
@example(
    # The third one, begun again, finds what follows its lost first block evicted when the fourth is further than it.
    lim=limits(max_batch_tokens=3, max_slots=3, max_seq_len=32, block_size=2, num_blocks=19, max_in_flight=2),
    prefix_cache=True,
    as_arrays=False,
    first=[("add", [0], 1, 1), ("add", [0] * 7, 20, 1), ("add", [0], 15, 2)],
    then=[],
)
def test_each_step_is_that_of_a_slow_batcher(
    lim: Limits, prefix_cache: bool, as_arrays: bool, first: list[tuple], then: list[tuple]
):
    """Sequences come, end and are aborted in any order, in memory for few of them."""
    both = Both(lim, prefix_cache=prefix_cache, as_arrays=as_arrays)

    def step(token: int, eos: bool = False) -> None:
        if not both.plan() or len(both.in_flight) == lim.max_in_flight:
            assert both.in_flight or both.idle, "nothing runs and somebody waits"
            if both.in_flight:
                both.land(token, eos=eos)

    for act, *details in [*first, *then]:
        live = [job.number for job in (*both.brute.running, *both.brute.waiting)]
        if act == "add":
            prompt, max_tokens, n = details
            most = min(lim.max_seq_len, (lim.num_blocks - 1) * lim.block_size + 1)  # tokens, that fit
            prompt = prompt[: most - 1]
            both.add(prompt, min(max_tokens, most - len(prompt)), n)
        elif act == "step":
            count, token, eos = details
            for i in range(count):
                step(token, eos and i == count - 1)
        elif live:
            both.abort(live[details[0] % len(live)])
    for count in range(10000):
        if both.idle:
            return
        step(count % 2)
    raise AssertionError("some sequence starves")
