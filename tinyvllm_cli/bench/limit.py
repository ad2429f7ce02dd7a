"""The least time that a machine needs for a workload: bytes over its read rate, operations over its product rate.

An ideal engine keeps its slots full and makes every token in the first step that it can. A free slot gets the next
request, whose whole prompt is computed in one step and gives the first token; every other slot gives a token a step.
In each step the parts follow one after another, and each takes what bounds it:

    products    max(weight bytes / read rate, 2 * (rows * body + sampled rows * head) / product rate)
    decoding    KV bytes of every token that a decoding row attends to / read rate
    prefill     4 * layers * heads * head_dim * (pairs of a prompt's row and a token that it attends to) / product rate
    writing     KV bytes of every new token / read rate

Weights are those that are multiplied: all matrices and the head once a step, norms and single rows of the embedding
not. A row is computed through the body, and through the head where a token is drawn from it. What all prompts begin
with is computed once, and read once a step however many rows attend to it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tinyvllm_cli.backends.timing import Rates
from tinyvllm_cli.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Limit:
    """What a workload takes at least."""

    seconds: float
    steps: int
    bytes: float  # read and written, over all steps
    flops: float


@dataclass(frozen=True, slots=True)
class _Costs:
    """Of one model."""

    body: int  # weights of all layers' matrices
    head: int
    token_bytes: int  # K and V of a token
    weight_bytes: int  # body and head
    pair_flops: int  # of a query row and a token that it attends to, over all layers

    @classmethod
    def of(cls, c: ModelConfig, elem_bytes: int, token_bytes: int) -> _Costs:
        heads = (2 * c.num_heads + 2 * c.num_kv_heads) * c.head_dim
        body, head = c.num_layers * c.hidden_size * (heads + 3 * c.intermediate_size), c.vocab_size * c.hidden_size
        return cls(
            body=body,
            head=head,
            token_bytes=token_bytes,
            weight_bytes=elem_bytes * (body + head),
            pair_flops=4 * c.num_layers * c.num_heads * c.head_dim,
        )


def compute_limit(
    config: ModelConfig,
    lengths: Sequence[tuple[int, int]],
    *,
    elem_bytes: int,
    token_bytes: int,
    slots: int,
    rates: Rates,
    shared: int = 0,
) -> Limit:
    """lengths: (prompt tokens, output tokens) of each request in its order; elem_bytes: of a weight; token_bytes: of K
    and V of one token, over all layers, as they are held; shared: tokens that every prompt begins with.
    """
    costs = _Costs.of(config, elem_bytes, token_bytes)
    queue = deque((prompt, output) for prompt, output in lengths if output)
    context = np.zeros(slots, np.int64)  # tokens of a slot whose K and V are in place
    left = np.zeros(slots, np.int64)  # tokens that it is still to give
    computed = 0  # of the shared tokens: none until the first prompt brings them
    seconds = nbytes = flops = steps = 0.0
    while queue or left.any():
        decoding = left > 0
        rows = sampled = int(decoding.sum())
        attended = int(context[decoding].sum()) + rows - computed * max(0, rows - 1)
        context += decoding
        left -= decoding
        pairs = 0
        for slot in np.flatnonzero(~decoding)[: len(queue)]:
            prompt, left[slot] = queue.popleft()
            new = max(1, prompt - computed)
            rows, sampled, pairs = rows + new, sampled + 1, pairs + new * (2 * prompt - new + 1) // 2
            context[slot], computed = prompt, shared
            left[slot] -= 1
        products = 2.0 * (rows * costs.body + sampled * costs.head)
        moved = costs.token_bytes * (attended + rows)
        seconds += max(costs.weight_bytes / rates.read, products / rates.product)
        seconds += moved / rates.read + costs.pair_flops * pairs / rates.product
        nbytes += costs.weight_bytes + moved
        flops += products + costs.pair_flops * pairs
        steps += 1
    return Limit(seconds, int(steps), nbytes, flops)
