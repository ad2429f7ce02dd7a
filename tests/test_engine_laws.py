"""The law of the engine, for any arrivals, limits, ends and aborts: every request gets the tokens it gets alone."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from unittest.mock import patch

from fake_backend import FakeBackend, FakeCodec, NextToken, VirtualClock, hashed, limits, refilling_limits, request
from fake_grammars import FakeGrammars, Rules, constraint
from hypothesis import given, settings
from hypothesis import strategies as st

import tinyvllm_cli.engine.engine as engine_module
from tinyvllm_cli.engine import prefix
from tinyvllm_cli.engine.engine import Engine
from tinyvllm_cli.engine.sampling import request_seed, sample_seed, slot_options
from tinyvllm_cli.types import Completion, Delta, Event, Limits, Request, SlotOptions

EOS = (2, 7)
VOCAB = 12  # few ids, so that EOS and stop ids come often
FAULTY = 4  # a seed with which some rows give no finite logits


def model() -> NextToken:
    plain = hashed(VOCAB)

    def next_token(history: tuple[int, ...], options: SlotOptions) -> int:
        return -1 if options.seed == FAULTY and sum(history) % 7 == 0 else plain(history, options)

    return next_token


@dataclass
class Arrival:
    request: Request
    at: int  # the step before which it is added
    abort_after: int | None  # steps between its arrival and its abort


def alone(req: Request, lim: Limits) -> tuple[object, ...] | str:
    """What a request must give, from the model alone: (token ids, finish reason, stop reason), or its error's type."""
    prompt, params = req.prompt_token_ids, req.params
    if not prompt:
        return "empty_prompt"
    max_len = min(len(prompt) + params.max_tokens, lim.max_seq_len)
    if len(prompt) >= lim.max_seq_len or max_len - 1 > (lim.num_blocks - 1) * lim.block_size:
        return "prompt_too_long"
    options = slot_options(req, len(prompt), run_seed=0, eos_token_ids=EOS)
    tokens = list(prompt)
    rules = None if params.constraint is None else Rules(params.constraint.source, VOCAB, EOS)
    made: tuple[int, ...] = ()
    while len(tokens) < max_len:
        token = model()(tuple(tokens), options)
        if rules is not None:
            if (ids := rules.allowed(made)) is None:
                return "invalid_schema"
            if len(tokens) < options.min_position:
                ids = [i for i in ids if i not in options.stop_ids]
            token = token if token in ids or token < 0 else ids[token % len(ids)] if ids else -2
        if token < 0:
            return "nan_logits" if token == -1 else "invalid_value"
        tokens.append(token)
        made = tuple(tokens[len(prompt) :])
        if token in params.stop_token_ids:
            return made, "stop", token
        if token in EOS and (rules is not None or not params.ignore_eos):
            return made, "stop", None
        if rules is not None and rules.is_broken(made):
            return "invalid_schema"
        if rules is not None and rules.allowed(made) == []:
            return made, "stop", None
    return (made, "length", None) if params.max_tokens else ()


def samples(req: Request, lim: Limits) -> list[tuple[object, ...]] | set[str]:
    """What each answer of a request must be, as that of a request of its own; or the errors of which it has one."""
    seed = request_seed(req, 0)
    outcomes = [
        alone(replace(req, params=replace(req.params, n=1, seed=sample_seed(seed, i))), lim)
        for i in range(req.params.n)
    ]
    errors = {outcome for outcome in outcomes if isinstance(outcome, str)}
    return errors or [outcome for outcome in outcomes if isinstance(outcome, tuple) and outcome]


def run(
    arrivals: list[Arrival], lim: Limits, *, prefix_cache: bool = True, deltas: bool = True
) -> tuple[list[Event], FakeBackend, Engine]:
    clock = VirtualClock()
    backend = FakeBackend(lim, model(), clock)
    codec = FakeCodec(clock, grammars=FakeGrammars(VOCAB, EOS))
    engine = Engine(backend, codec, eos_token_ids=EOS, clock=clock, prefix_cache=prefix_cache, deltas=deltas)
    backend.owners, backend.late_ends = engine._batcher.memory.pool.owners, not deltas
    events: list[Event] = []
    step, last = 0, max((a.at + (a.abort_after or 0) for a in arrivals), default=0)
    while step <= last or not engine.idle:
        for arrival in arrivals:
            if arrival.at == step:
                engine.add(arrival.request)
        for arrival in arrivals:
            if arrival.abort_after is not None and arrival.at + arrival.abort_after == step:
                engine.abort(arrival.request.request_id)
        engine.check()
        events += engine.step()
        engine.check()
        step += 1
        assert step < last + bound(arrivals, lim), "some request starves"
    return events, backend, engine


def bound(arrivals: list[Arrival], lim: Limits) -> int:
    """More steps than any schedule needs in which the oldest request always goes on: it computes a token a step, from
    its first one on where it was preempted before it became the oldest, and waits for the steps in flight at each end.
    """
    requests = [arrival.request for arrival in arrivals for _ in range(arrival.request.params.n)]
    work = sum(min(len(req.prompt_token_ids) + req.params.max_tokens, lim.max_seq_len) for req in requests)
    return work + 2 * len(requests) * lim.max_in_flight + 2


any_limits = st.builds(
    refilling_limits,
    max_batch_tokens=st.integers(1, 12),
    max_slots=st.integers(1, 5),
    refill_slots=st.integers(1, 5),
    max_seq_len=st.integers(2, 24),
    block_size=st.sampled_from([1, 2, 4, 16]),
    num_blocks=st.integers(2, 12) | st.integers(2, 40),
    max_in_flight=st.integers(1, 4),
    chunk_cost=st.integers(0, 2),
    vocab_size=st.just(VOCAB),
)


@st.composite
def any_arrivals(draw: st.DrawFn, aborts: bool = True, faults: bool = False) -> list[Arrival]:
    arrivals = []
    for i in range(draw(st.integers(1, 10))):
        prompt = draw(st.lists(st.integers(0, VOCAB - 1), max_size=26))
        if arrivals and draw(st.booleans()):  # a prefix of another prompt, or all of it
            other = draw(st.sampled_from(arrivals)).request.prompt_token_ids
            prompt = [*other[: draw(st.integers(0, len(other)))], *prompt[: draw(st.integers(0, 3))]]
        seed = draw(st.integers(0, FAULTY if faults else FAULTY - 1))
        stops = draw(st.sampled_from([(), (3,), (2, 9), *([tuple(range(VOCAB))] if seed != FAULTY else [])]))
        req = request(
            i,
            prompt,
            max_tokens=draw(st.integers(0, 16)),
            min_tokens=draw(st.sampled_from([0, 0, 3])),
            ignore_eos=draw(st.booleans()),
            n=draw(st.sampled_from([1, 1, 2, 3, 7])),
            stop_token_ids=stops,
            seed=seed,
            constraint=draw(st.none() | st.integers(0, 9).map(constraint)) if seed != FAULTY else None,
        )
        abort_after = draw(st.none() | st.integers(0, 12)) if aborts else None
        arrivals.append(Arrival(req, draw(st.integers(0, 8)), abort_after))
    return arrivals


def change(arrivals: list[Arrival], **params: object) -> None:
    for arrival in arrivals:
        arrival.request = replace(arrival.request, params=replace(arrival.request.params, **params))


def ask_once_what_fails(arrivals: list[Arrival], lim: Limits) -> None:
    """A request's answers all end where one of them fails."""
    change([arrival for arrival in arrivals if isinstance(samples(arrival.request, lim), set)], n=1)


@contextmanager
def one_key_for_all(holds: bool) -> Iterator[None]:
    """Every content has the key of every other."""
    with patch.object(prefix, "chain_key", lambda parent, token_ids: 0) if holds else nullcontext():
        yield


@settings(max_examples=500)
@given(any_arrivals(faults=True), any_limits, st.booleans(), st.booleans())
def test_every_request_gets_what_it_gets_alone(
    arrivals: list[Arrival], lim: Limits, prefix_cache: bool, all_collide: bool
):
    """Whatever the slots, the budget, the memory, the steps ahead, and what others have computed."""
    with one_key_for_all(all_collide):
        events, backend, engine = run(arrivals, lim, prefix_cache=prefix_cache)
    done = [e for e in events if isinstance(e, Completion)]
    assert len({c.request_id for c in done}) == len(done), "told once"
    for arrival in arrivals:
        completion = next((c for c in done if c.request_id == arrival.request.request_id), None)
        if completion is None:
            assert arrival.abort_after is not None
            continue
        wanted = samples(arrival.request, lim)
        if completion.error is not None:
            assert completion.error.type in wanted
            continue
        assert isinstance(wanted, list) and [c.index for c in completion.choices] == list(range(len(wanted)))
        assert [(c.token_ids, c.finish_reason, c.stop_reason) for c in completion.choices] == wanted
        deltas = [e for e in events if isinstance(e, Delta) and e.request_id == completion.request_id]
        for choice in completion.choices:
            assert sum((d.token_ids for d in deltas if d.index == choice.index), ()) == choice.token_ids
        made = sum(len(ids) for ids, _, _ in wanted)
        assert completion.usage.completion_tokens == made
        assert arrival.request.params.constraint or len(deltas) == made
    assert not backend.in_flight
    assert engine._batcher.memory.pool.num_owned == 0
    assert engine.stats.steps == len(backend.steps)


@given(any_arrivals(aborts=False), any_limits)
def test_slots_are_given_in_the_order_of_arrival(arrivals: list[Arrival], lim: Limits):
    enough = limits(max_slots=lim.max_slots, max_seq_len=lim.max_seq_len, block_size=lim.block_size).num_blocks
    lim = replace(lim, num_blocks=enough)  # so that nobody gets a slot twice
    ask_once_what_fails(arrivals, lim)
    _, backend, engine = run(arrivals, lim)
    assert engine.stats.preemptions == 0
    by_arrival = sorted(arrivals, key=lambda a: a.at)  # stable: those of one step by their number
    no_slot = ("empty_prompt", "prompt_too_long", ())
    slots = [a.request for a in by_arrival if alone(a.request, lim) not in no_slot]
    assert backend.bound == [req.prompt_token_ids for req in slots for _ in range(req.params.n)]


@given(any_arrivals(aborts=False), any_limits)
def test_steps_ahead_change_no_answer(arrivals: list[Arrival], lim: Limits):
    def answers(max_in_flight: int) -> list[tuple[int, object, object]]:
        events, _, _ = run(arrivals, replace(lim, max_in_flight=max_in_flight))
        return sorted((e.request_id, e.choices, e.error) for e in events if isinstance(e, Completion))

    assert answers(1) == answers(2) == answers(4)


@given(any_arrivals(aborts=False), any_limits, st.sampled_from([1, 2, 99]))
def test_nobody_listening_changes_no_answer(arrivals: list[Arrival], lim: Limits, beside_from: int):
    """Nor does it where answers under a constraint go on beside."""

    def answers(deltas: bool) -> list[tuple[int, object, object]]:
        with patch.object(engine_module, "BESIDE_FROM", beside_from):
            events, _, _ = run(arrivals, replace(lim, chunk_cost=99), deltas=deltas)
        return sorted((e.request_id, e.choices, e.error) for e in events if isinstance(e, Completion))

    assert answers(deltas=False) == answers(deltas=True)


@given(any_arrivals(aborts=False), any_limits)
def test_what_forced_tokens_cost_changes_no_answer(arrivals: list[Arrival], lim: Limits):
    def answers(chunk_cost: int) -> list[tuple[int, object, object]]:
        events, _, _ = run(arrivals, replace(lim, chunk_cost=chunk_cost))
        return sorted((e.request_id, e.choices, e.error) for e in events if isinstance(e, Completion))

    assert answers(0) == answers(1) == answers(100)


@given(any_arrivals(aborts=False), any_limits)
def test_when_slots_are_refilled_changes_no_answer(arrivals: list[Arrival], lim: Limits):
    def answers(refill_slots: int) -> list[tuple[int, object, object]]:
        events, _, _ = run(arrivals, replace(lim, refill_slots=refill_slots))
        return sorted((e.request_id, e.choices, e.error) for e in events if isinstance(e, Completion))

    assert answers(1) == answers(lim.max_slots)


@given(any_arrivals(aborts=False), any_limits)
def test_without_steps_ahead_nothing_is_drawn_in_vain(arrivals: list[Arrival], lim: Limits):
    change(arrivals, constraint=None)  # under which some tokens are not drawn
    ask_once_what_fails(arrivals, lim)
    events, backend, engine = run(arrivals, replace(lim, max_in_flight=1))
    no_token = [e for e in events if isinstance(e, Completion) and e.error and e.error.type == "invalid_value"]
    assert sum(len(step.sampled) for step in backend.steps) == engine.stats.completion_tokens + len(no_token)
