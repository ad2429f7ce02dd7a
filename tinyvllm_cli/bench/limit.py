"""The least time that a machine needs for a workload: bytes over its read rate, operations over its product rate.

An ideal engine keeps its slots full and makes every token in the first step that it can. A free slot gets the next
request, whose whole prompt is computed in one step and gives the first token; every other slot gives a token a step.
In each step the parts follow one after another, and each takes what bounds it:

    products    max(weight bytes / read rate, 2 * (rows * body + sampled rows * head) / product rate)
    decoding    KV bytes of every token that a decoding row attends to / read rate
    prefill     4 * layers * heads * head_dim * (pairs of a prompt's row and a token that it attends to) / product rate
    writing     KV bytes of every new token / read rate

Weights are those that are multiplied: all matrices and the head once a step, norms and single rows of the embedding
not. The body may be held in FP8: then it has a byte a weight, and a product rate of its own. A row is computed through
the body, and through the head where a token is drawn from it. What all prompts begin with is computed once, and read
once a step however many rows attend to it.
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
    """What a workload, or a part of it, takes at least."""

    seconds: float
    steps: int
    bytes: float  # read and written, over all steps
    flops: float
    product_seconds: float  # that these take at their rates

    def __add__(self, other: Limit) -> Limit:
        """Of one after the other."""
        return Limit(
            self.seconds + other.seconds,
            self.steps + other.steps,
            self.bytes + other.bytes,
            self.flops + other.flops,
            self.product_seconds + other.product_seconds,
        )


@dataclass(frozen=True, slots=True)
class Costs:
    """What a step of one model has to move and to multiply."""

    body: int  # weights of all layers' matrices
    head: int
    token_bytes: int  # K and V of a token
    weight_bytes: int  # body and head
    pair_flops: int  # of a query row and a token that it attends to, over all layers

    @classmethod
    def of(cls, c: ModelConfig, elem_bytes: int, token_bytes: int, *, layer_bytes: int | None = None) -> Costs:
        """elem_bytes: of a weight; layer_bytes: of one of the layers' matrices, where it is another number;
        token_bytes: of K and V of one token, over all layers, as they are held."""
        heads = (2 * c.num_heads + 2 * c.num_kv_heads) * c.head_dim
        body, head = c.num_layers * c.hidden_size * (heads + 3 * c.intermediate_size), c.vocab_size * c.hidden_size
        return cls(
            body=body,
            head=head,
            token_bytes=token_bytes,
            weight_bytes=(layer_bytes or elem_bytes) * body + elem_bytes * head,
            pair_flops=4 * c.num_layers * c.num_heads * c.head_dim,
        )

    def step(self, rates: Rates, *, rows: int, sampled: int, attended: int, pairs: int = 0) -> Limit:
        """One step. rows: that are computed, of which a token is drawn from `sampled`; attended: tokens whose K and V
        decoding rows read; pairs: of a prompt's row and a token that it attends to.
        """
        of_body, of_head = 2.0 * rows * self.body, 2.0 * sampled * self.head
        products = of_body / (rates.fp8_product or rates.product) + of_head / rates.product
        moved, prefill = self.token_bytes * (attended + rows), self.pair_flops * pairs
        seconds = max(self.weight_bytes / rates.read, products) + moved / rates.read + prefill / rates.product
        flops = of_body + of_head + prefill
        return Limit(seconds, 1, self.weight_bytes + moved, flops, products + prefill / rates.product)

    def decode_step(self, rates: Rates, *, rows: int, context: float) -> Limit:
        """A step in which `rows` sequences get a token each, behind `context` tokens on the average that none share."""
        return self.step(rates, rows=rows, sampled=rows, attended=round(rows * (context + 1)))


def compute_limit(
    config: ModelConfig,
    lengths: Sequence[tuple[int, int]],
    *,
    elem_bytes: int,
    layer_bytes: int | None = None,
    token_bytes: int,
    slots: int,
    rates: Rates,
    shared: int = 0,
) -> Limit:
    """lengths: (prompt tokens, output tokens) of each request in its order; elem_bytes: of a weight; layer_bytes: of
    one of the layers' matrices, where it is another number; token_bytes: of K and V of one token, over all layers, as
    they are held; shared: tokens that every prompt begins with.
    """
    costs = Costs.of(config, elem_bytes, token_bytes, layer_bytes=layer_bytes)
    queue = deque((prompt, output) for prompt, output in lengths if output)
    context = np.zeros(slots, np.int64)  # tokens of a slot whose K and V are in place
    left = np.zeros(slots, np.int64)  # tokens that it is still to give
    computed = 0  # of the shared tokens: none until the first prompt brings them
    found = Limit(0.0, 0, 0.0, 0.0, 0.0)
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
        found += costs.step(rates, rows=rows, sampled=sampled, attended=attended, pairs=pairs)
    return found
