"""Long random runs of the engine in small memory: nobody's tokens change, and all invariants hold after every step.

TINYVLLM_RANDOM_STEPS=100000 python -m pytest tests/test_random_worlds.py -s
"""

import os
from collections import Counter
from collections.abc import Iterator
from random import Random

import pytest
from fake_backend import FakeBackend, FakeCodec, VirtualClock, refilling_limits, request
from fake_grammars import FakeGrammars, constraint
from test_engine_laws import EOS, FAULTY, VOCAB, alone, model, samples

import tinyvllm_cli.engine.engine as engine_module
from tinyvllm_cli.engine.engine import Engine
from tinyvllm_cli.types import Completion, Limits, Request

STEPS = int(os.environ.get("TINYVLLM_RANDOM_STEPS", "3000"))
MOST = 5  # samples of a request
STEPS_EACH = 400  # steps during which requests come to one engine


def a_world(rng: Random) -> Limits:
    block_size = rng.choice([1, 2, 4, 16])
    longest = rng.choice([rng.randint(2, 16), rng.randint(16, 64)])
    return refilling_limits(
        max_batch_tokens=rng.choice([1, 3, 8, 64]),
        max_slots=rng.randint(1, 8),
        refill_slots=rng.choice([1, 1, 3]),
        admit_slots=rng.choice([1, 2, 99]),
        max_seq_len=longest,
        block_size=block_size,
        num_blocks=1 + max(1, int(-(-longest // block_size) * rng.choice([0.5, 1, 1.2, 1.5, 2, 6]))),
        max_in_flight=rng.randint(1, 3),
        chunk_cost=rng.choice([0, 0, 1, 99]),
        vocab_size=VOCAB,
    )


def requests(rng: Random, lim: Limits) -> Iterator[Request]:
    """Prompts that begin as others, or as others and their answers; some that never fit."""
    texts: list[list[int]] = [[]]
    for i in range(1 << 30):
        text = rng.choice(texts[-12:])
        cut = rng.choice([len(text), len(text) // lim.block_size * lim.block_size, rng.randint(0, len(text))])
        prompt = [*text[:cut], *(rng.randrange(VOCAB) for _ in range(rng.choice([0, 1, 3, lim.block_size])))]
        prompt = prompt[: lim.max_seq_len + 1] or [1]
        params = {"max_tokens": rng.choice([1, 5, 30, 60]), "ignore_eos": rng.random() < 0.7}
        seed = rng.choice([0] * 6 + [1] * 4 + [FAULTY])
        rules = constraint(rng.randrange(9)) if seed != FAULTY and rng.random() < 0.4 else None
        req = request(i, prompt, n=rng.choice([1] * 6 + [2, MOST]), seed=seed, constraint=rules, **params)
        outcome = alone(req, lim)
        texts.append([*prompt, *(outcome[0] if isinstance(outcome, tuple) and outcome else ())])  # type: ignore[misc]
        yield req


def run_world(rng: Random, seen: Counter[str]) -> None:
    lim = a_world(rng)
    clock = VirtualClock()
    backend = FakeBackend(lim, model(), clock)
    codec = FakeCodec(clock, grammars=FakeGrammars(VOCAB, EOS))
    how = {"prefix_cache": rng.random() < 0.85, "deltas": rng.random() < 0.3}
    engine = Engine(backend, codec, eos_token_ids=EOS, clock=clock, **how)
    backend.owners, backend.late_ends = engine._batcher.memory.pool.owners, not how["deltas"]
    source, under_way = requests(rng, lim), {}
    arrivals = rng.choice([0.1, 0.7, 2.0])  # a step
    quiet = 0
    while seen["steps"] < STEPS:
        steps = engine.stats.steps
        if steps < STEPS_EACH and engine.wants_more:
            for _ in range(int(arrivals) + (rng.random() < arrivals % 1)):
                req = next(source)
                under_way[req.request_id] = req
                engine.add(req)
        if under_way and rng.random() < 0.03:
            victim = rng.choice([*under_way][:2] + [*under_way][-2:])
            del under_way[victim]
            engine.abort(victim)
            quiet = 0
        engine.check()
        if engine.idle and steps >= STEPS_EACH:
            break
        for event in engine.step():
            if isinstance(event, Completion):
                compare(event, under_way.pop(event.request_id), lim)
                quiet = 0
        engine.check()
        seen["steps"] += engine.stats.steps - steps
        quiet += engine.stats.steps - steps
        # The oldest waits at most for those that decode where they take the whole budget, and then always goes on.
        assert quiet <= MOST * (lim.max_slots + 1) * (lim.max_seq_len + 2 * lim.max_in_flight), "some request starves"
    seen["preemptions"] += engine.stats.preemptions
    seen["evictions"] += engine.stats.evictions
    seen["copies"] += sum(map(len, backend.copied))
    seen["cached tokens"] += engine.stats.cached_tokens


def compare(completion: Completion, req: Request, lim: Limits) -> None:
    wanted = samples(req, lim)
    if completion.error is not None:
        assert completion.error.type in wanted
        return
    assert [(c.token_ids, c.finish_reason, c.stop_reason) for c in completion.choices] == wanted


def test_random_worlds(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(engine_module, "BESIDE_FROM", 1)
    seen: Counter[str] = Counter()
    world = 0
    while seen["steps"] < STEPS:
        run_world(Random(world), seen)
        world += 1
    print(world, "worlds:", dict(seen))
    assert min(seen[name] for name in ("preemptions", "evictions", "copies", "cached tokens")) > STEPS / 200, (
        "what it is about"
    )
