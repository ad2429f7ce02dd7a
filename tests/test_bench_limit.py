"""The computed limit: what was computed apart from it, and what any limit must obey."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinyvllm_cli.backends.timing import Rates
from tinyvllm_cli.bench.limit import Costs, Limit, compute_limit
from tinyvllm_cli.bench.workloads import NAMED, named_requests, shared_tokens
from tinyvllm_cli.config import ModelConfig
from tinyvllm_cli.model.random_weights import random_config

H200 = Rates(read=4.47e12, product=650e12)
FASTEST = replace(H200, product=790e12)
SLOTS = 256

# Output tokens/s at most of an H200, computed apart from this function, and how far from it a figure may be: a share.
# Those of one request were computed at 4.3 TB/s.
COMPUTED_APART = [
    ("llama-3.2-1b", "latency", H200, 1740, 0.04),
    ("llama-3.2-1b", "mixed", H200, 70_000, 0.02),
    ("llama-3.2-1b", "short", H200, 88_000, 0.005),
    ("llama-3.2-1b", "short", FASTEST, 104_000, 0.005),
    ("llama-3.1-8b", "latency", H200, 290, 0.03),
    ("llama-3.1-8b", "mixed", H200, 12_955, 0.001),
    ("llama-3.1-8b", "mixed", FASTEST, 14_170, 0.002),
    ("llama-3.1-8b", "short", H200, 15_000, 0.1),
    ("llama-3.1-8b", "short", FASTEST, 15_000, 0.1),
    ("llama-3.1-8b", "prefix", H200, 24_500, 0.02),
]

Lengths = list[tuple[int, int]]


def lengths_of(name: str) -> tuple[Lengths, int]:
    """(prompt, output) tokens of one of our workloads, and what its prompts share."""
    requests = named_requests(name, 1000)
    prompts = [request.prompt_token_ids or () for request in requests]
    pairs = [(len(ids), request.params.max_tokens) for ids, request in zip(prompts, requests, strict=True)]
    return pairs, shared_tokens(prompts)


def limit(lengths: Lengths, config: ModelConfig | None = None, **changes: object) -> Limit:
    config = config or random_config("smollm2-135m")
    token_bytes = 2 * config.num_layers * 2 * config.num_kv_heads * config.head_dim
    options = {"elem_bytes": 2, "token_bytes": token_bytes, "slots": 4, "rates": H200} | changes
    return compute_limit(config, lengths, **options)


@pytest.mark.parametrize(("model", "workload", "rates", "wanted", "off"), COMPUTED_APART)
def test_the_limits_are_those_that_were_computed_apart(
    model: str, workload: str, rates: Rates, wanted: float, off: float
):
    lengths, shared = lengths_of(workload)
    found = limit(lengths, random_config(model), slots=SLOTS, rates=rates, shared=shared)
    assert sum(output for _, output in lengths) / found.seconds == pytest.approx(wanted, rel=off)


def test_the_workloads_are_those_whose_limits_were_computed_apart():
    totals = {name: [sum(side) for side in zip(*lengths_of(name)[0], strict=True)] for name in NAMED}
    assert totals == {
        "latency": [128, 256],
        "mixed": [145_017, 145_605],
        "short": [286_557, 144_219],
        "prefix": [806_810, 32_768],
    }
    assert [lengths_of(name)[1] for name in NAMED] == [0, 0, 0, 1536]


def test_one_request_is_a_prompt_and_then_a_token_a_step():
    """By hand: the 1B has 1,235,746,816 multiplied weights, 262,668,288 of them in the head, and 16,384 numbers of K
    and V a token."""
    prompt, output = 100, 3
    weights, head, kv = 1_235_746_816, 262_668_288, 2 * 16_384
    found = limit([(prompt, output)], random_config("llama-3.2-1b"))
    reads = 2 * weights / H200.read
    attention = 4 * 16 * 32 * 64 * (prompt * (prompt + 1) / 2)
    assert found.steps == output
    assert 2 * (prompt * (weights - head) + head) / H200.product < reads
    moved = kv * ((prompt + 1) + (prompt + 2) + prompt + 2)  # read in two steps; written
    assert found.bytes == 2 * weights * output + moved
    assert found.flops == 2 * ((prompt + 2) * (weights - head) + 3 * head) + attention
    assert found.seconds == pytest.approx(3 * reads + moved / H200.read + attention / H200.product)


def test_a_limit_is_the_sum_of_those_of_its_steps():
    """Two requests in two slots: both prompts, a step of both, one of the second alone."""
    config = random_config("smollm2-135m")
    costs = Costs.of(config, 2, 2 * config.num_layers * 2 * config.num_kv_heads * config.head_dim)
    prompts = costs.step(H200, rows=30, sampled=2, attended=0, pairs=10 * 11 // 2 + 20 * 21 // 2)
    steps = [costs.decode_step(H200, rows=2, context=15), costs.decode_step(H200, rows=1, context=21)]
    whole, found = sum(steps, prompts), limit([(10, 2), (20, 3)], config)
    assert (found.steps, found.bytes, found.flops) == (whole.steps, whole.bytes, whole.flops)
    assert found.seconds == pytest.approx(whole.seconds)


def test_layers_in_fp8_have_a_byte_a_weight_and_a_rate_of_their_own():
    """By hand, where reading takes longer and where multiplying does; the head is in 16 bits."""
    body, head, kv = 1_235_746_816 - 262_668_288, 262_668_288, 2 * 16_384
    prompt = 100
    slow = Rates(read=1e30, product=1e12, fp8_product=2e12)
    for rates in (Rates(H200.read, H200.product, 2 * H200.product), slow):
        found = limit([(prompt, 2)], random_config("llama-3.2-1b"), layer_bytes=1, rates=rates)
        attention = 4 * 16 * 32 * 64 * (prompt * (prompt + 1) / 2) / rates.product
        moved = kv * ((prompt + 1) + prompt + 1)
        reads, products = (
            (body + 2 * head) / rates.read,
            [2 * (rows * body / rates.fp8_product + head / rates.product) for rows in (prompt, 1)],
        )
        assert found.bytes == 2 * (body + 2 * head) + moved
        assert found.flops == limit([(prompt, 2)], random_config("llama-3.2-1b")).flops
        assert found.product_seconds == pytest.approx(sum(products) + attention)
        wanted = sum(max(reads, each) for each in products) + moved / rates.read + attention
        assert found.seconds == pytest.approx(wanted)


REQUESTS = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 20)), min_size=1, max_size=12)
RATE = st.floats(1e9, 1e16)


@given(lengths=REQUESTS, read=RATE, product=RATE, slots=st.integers(1, 8))
def test_it_is_between_the_larger_of_both_bounds_and_their_sum(lengths, read: float, product: float, slots: int):
    found = limit(lengths, rates=Rates(read, product), slots=slots)
    bounds = found.bytes / read, found.flops / product
    assert max(bounds) <= found.seconds * (1 + 1e-9)
    assert found.seconds <= sum(bounds) * (1 + 1e-9)


@given(lengths=REQUESTS, read=RATE, product=RATE, more=st.floats(1, 100))
def test_a_faster_machine_needs_no_longer(lengths, read: float, product: float, more: float):
    seconds = limit(lengths, rates=Rates(read, product)).seconds
    for rates in (Rates(read * more, product), Rates(read, product * more)):
        assert limit(lengths, rates=rates).seconds <= seconds * (1 + 1e-9)


@given(lengths=REQUESTS, extra=st.tuples(st.integers(1, 60), st.integers(1, 20)))
def test_another_request_has_more_to_move_and_to_multiply(lengths, extra: tuple[int, int]):
    less, more = limit(lengths), limit([*lengths, extra])
    assert more.flops > less.flops and more.bytes > less.bytes and more.steps >= less.steps
    assert more.seconds > less.seconds


@given(lengths=REQUESTS, slots=st.integers(1, 8))
def test_flops_are_those_of_the_tokens_whatever_the_slots(lengths, slots: int):
    assert limit(lengths, slots=slots).flops == pytest.approx(limit(lengths, slots=1).flops)


@given(lengths=REQUESTS, shared=st.integers(0, 60), token_bytes=st.integers(1, 10**6))
def test_bytes_of_k_and_v_are_those_that_a_token_takes(lengths, shared: int, token_bytes: int):
    """Nothing else changes with them, and what they take is in proportion."""
    shared = min(shared, *(prompt - 1 for prompt, _ in lengths))
    nothing, some, twice = (limit(lengths, shared=shared, token_bytes=each * token_bytes) for each in (0, 1, 2))
    assert twice.bytes - some.bytes == some.bytes - nothing.bytes >= token_bytes
    assert some.seconds - nothing.seconds == pytest.approx((some.bytes - nothing.bytes) / H200.read, rel=1e-3)
    assert (some.steps, some.flops) == (nothing.steps, nothing.flops)


@given(lengths=REQUESTS, shared=st.integers(0, 60))
def test_what_is_shared_is_saved(lengths, shared: int):
    """The last token of a prompt is computed in any case: it gives the logits."""
    shared = min(shared, *(prompt - 1 for prompt, _ in lengths))
    whole, saved = limit(lengths), limit(lengths, shared=shared)
    assert saved.bytes <= whole.bytes and saved.flops <= whole.flops and saved.steps == whole.steps
    assert (saved == whole) == (shared == 0 or len(lengths) == 1)


def test_answers_without_a_token_take_nothing():
    assert limit([(5, 0), (9, 4), (3, 0)]) == limit([(9, 4)])
    assert limit([(5, 0)]).seconds == 0


def test_the_page_shows_what_the_function_gives():
    page = (Path(__file__).parent.parent / "docs" / "bench.md").read_text()
    rows = re.findall(r"^\| (Llama-3\.\d-\dB) \| (.*) \|$", page, re.MULTILINE)
    assert [name for name, _ in rows] == ["Llama-3.2-1B", "Llama-3.1-8B"]
    for name, cells in rows:
        for workload, cell in zip(NAMED, cells.split(" | "), strict=True):
            lengths, shared = lengths_of(workload)
            options = {"config": random_config(name.lower()), "slots": SLOTS, "shared": shared}
            tokens = sum(output for _, output in lengths)
            found = [f"{tokens / limit(lengths, rates=rates, **options).seconds:,.0f}" for rates in (H200, FASTEST)]
            assert cell == " - ".join(dict.fromkeys(found)), (name, workload)
