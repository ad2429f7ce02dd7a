"""Attention over scattered blocks, with a float64 reference: cases for the kernels on a GPU and emulated ones alike."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from fp8_tools import planes_of, queries_of
from gpu_tools import NUMPY_DTYPE, UNIT

from tinyvllm_cli.backends import fp8
from tinyvllm_cli.backends.gpu import attention, attention_work
from tinyvllm_cli.backends.gpu.kv import KVCache
from tinyvllm_cli.backends.gpu.slots import BlockTables
from tinyvllm_cli.config import DtypeName, KVDtypeName

Array = npt.NDArray[Any]
NUM_LAYERS, LAYER = 2, 1
PLACES = 12  # partials that fit at once: long sequences take several launches


@dataclass(frozen=True)
class Heads:
    query: int
    kv: int
    head_dim: int
    dtype: DtypeName = "bfloat16"
    kv_dtype: KVDtypeName = "auto"

    @property
    def group(self) -> int:
        return self.query // self.kv


@dataclass(frozen=True)
class Context:
    """q, k and v of every position of a sequence, elem[length, heads, head_dim]."""

    q: Array
    k: Array
    v: Array

    def __len__(self) -> int:
        return len(self.q)


def context(heads: Heads, length: int, seed: int) -> Context:
    """Scores with a deviation of 1.5: some keys matter much more than others. K and V as the cache holds them."""
    rng = np.random.default_rng(seed)
    elem = NUMPY_DTYPE[heads.dtype]
    q = 1.5 * rng.standard_normal((length, heads.query, heads.head_dim), np.float32)
    k, v = rng.standard_normal((2, length, heads.kv, heads.head_dim), np.float32)
    if heads.kv_dtype == "fp8":
        k, v = fp8.rounded(k), fp8.rounded(v)
    return Context(q.astype(elem), k.astype(elem), v.astype(elem))


def reference(heads: Heads, of: Context, rows: range) -> tuple[Array, Array]:
    """(h, sum of its terms' magnitudes) float64 [rows, query heads, head_dim]."""
    q, k, v = (array.astype(np.float64) for array in (of.q, of.k, of.v))
    k, v = (np.repeat(array, heads.group, axis=1) for array in (k, v))
    h, scale = (np.empty((len(rows), heads.query, heads.head_dim)) for _ in range(2))
    for i, position in enumerate(rows):
        scores = np.einsum("hd,khd->hk", q[position], k[: position + 1]) / math.sqrt(heads.head_dim)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        h[i] = np.einsum("hk,khd->hd", weights, v[: position + 1])
        scale[i] = np.einsum("hk,khd->hd", weights, np.abs(v[: position + 1]))
    return h, scale


@dataclass(frozen=True)
class Machine:
    """Where kernels run: a GPU, or the processor that emulates one."""

    launch: Callable[..., None]  # as Device.launch
    put: Callable[[Array], Any]  # a host array becomes the device's
    get: Callable[[Any], Array]  # and back, bit for bit


def deal(
    heads: Heads, parts: Sequence[tuple[Context, range]], rng: np.random.Generator, *, shared: bool
) -> tuple[Array, Array, Array]:
    """Block tables, slots of the sequences and the pool, as attend() says."""
    num_blocks = np.array([-(-rows.stop // 16) for _, rows in parts], np.int32)
    dealt = rng.permutation(np.arange(1, num_blocks.sum() + 3)).astype(np.int32)
    slots = rng.permutation(len(parts) + 2)[: len(parts)].astype(np.int32)
    tables = np.zeros((len(parts) + 2, num_blocks.max()), np.int32)
    pool = np.full((len(dealt) + 1, NUM_LAYERS, 2, heads.kv, 16, heads.head_dim), np.nan, NUMPY_DTYPE[heads.dtype])
    known: dict[tuple[int, bytes], int] = {}  # a full block, by the one before it and its K and V
    for s, (of, rows) in enumerate(parts):
        tables[slots[s], : num_blocks[s]], dealt = dealt[: num_blocks[s]], dealt[num_blocks[s] :]
        for i in range(rows.stop // 16 if shared else 0):
            before, own = tables[slots[s], i - 1] if i else 0, slice(16 * i, 16 * i + 16)
            content = (int(before), of.k[own].tobytes() + of.v[own].tobytes())
            tables[slots[s], i] = known.setdefault(content, int(tables[slots[s], i]))
        position = np.arange(rows.stop)
        block = tables[slots[s], position // 16]
        for which, values in enumerate((of.k, of.v)):
            pool[block, LAYER, which, :, position % 16] = values[: rows.stop]
    return tables, slots, planes_of(pool.astype(np.float32)) if heads.kv_dtype == "fp8" else pool


def attend(
    machine: Machine,
    heads: Heads,
    parts: Sequence[tuple[Context, range]],
    seed: int = 0,
    *,
    places: int = PLACES,
    shared: bool = False,
) -> list[Array]:
    """One step over these rows of these sequences: h elem[rows, query heads, head_dim] of each.

    Blocks and slots are dealt out at random; the rest of the pool, and what lies behind a sequence's last row, is
    NaN, as are the output and the workspace. shared: sequences that begin with the same K and V have the same blocks
    there, as far as those are full.
    """
    elem = NUMPY_DTYPE[heads.dtype]
    lengths = np.array([rows.stop for _, rows in parts], np.int32)
    starts = np.cumsum([0, *(len(rows) for _, rows in parts)]).astype(np.int32)
    tables, slots, pool = deal(heads, parts, np.random.default_rng(seed), shared=shared)
    upload = SimpleNamespace(put=machine.put)
    num_rows, width = int(starts[-1]), tables.shape[1]
    out = machine.put(np.full((num_rows, heads.query * heads.head_dim), np.nan, elem))
    partials = machine.put(np.full((places, heads.kv, 16, heads.head_dim + 2), np.nan, np.float32))
    tickets = machine.put(np.zeros((places, heads.kv), np.int32))
    buffers = SimpleNamespace(attended=out, partials=partials, tickets=tickets)
    device = SimpleNamespace(launch=machine.launch, buffers=buffers, kernels=SimpleNamespace(shared_limit=227 << 10))
    sizes = attention_work.Sizes(heads.group, heads.head_dim, places)
    block_tables = BlockTables(machine.put(tables))
    block_tables.host[:] = tables
    work = attention_work.plan_attention(starts, lengths, slots, block_tables, sizes=sizes, upload=upload)
    rows = SimpleNamespace(
        attention=work,
        num_rows=num_rows,
        width=width,
        positions=machine.put(np.concatenate([np.array(rows, np.int32) for _, rows in parts])),
        block_tables=block_tables.device,
        query_start_loc=machine.put(starts),
        lengths=machine.put(lengths),
    )
    q = np.concatenate([of.q[rows.start : rows.stop] for of, rows in parts])
    cache = KVCache(machine.put(pool), heads.kv_dtype)
    attention.attend(device, machine.put(queries_of(q) if heads.kv_dtype == "fp8" else q), cache, rows, layer=LAYER)
    assert not machine.get(tickets).any(), "a launch leaves no ticket behind"
    h = machine.get(out).reshape(num_rows, heads.query, heads.head_dim)
    return np.split(h, starts[1:-1])


def chunked(machine: Machine, heads: Heads, of: Context, cuts: Sequence[int], neighbours: int = 0) -> Array:
    """h of positions cuts[0] .. cuts[-1] - 1, step by step, among neighbours that decode."""
    beside = [(context(heads, 40 + 13 * i, seed=100 + i), range(39 + 13 * i, 40 + 13 * i)) for i in range(neighbours)]
    steps = itertools.pairwise(cuts)
    return np.concatenate(
        [attend(machine, heads, [*beside, (of, range(*step))], seed=i)[-1] for i, step in enumerate(steps)]
    )


MIXED = [range(1), range(69, 70), range(33), range(597, 600), range(510, 530), range(1500, 1501), range(100, 164)]


def check_close(machine: Machine, heads: Heads, close: Callable[..., None]) -> None:
    """A step of every kind of rows at once: prompts, chunks, decoding, drafts, over one partial and over several."""
    contexts = [context(heads, rows.stop, seed) for seed, rows in enumerate(MIXED)]
    found = attend(machine, heads, list(zip(contexts, MIXED, strict=True)))
    for rows, of, h in zip(MIXED, contexts, found, strict=True):
        wanted, scale = reference(heads, of, rows)
        # Scores are sums of head_dim terms, whose error a weight takes in full; every weight is rounded.
        sums = {"terms": 4 * heads.head_dim + len(of), "scale": scale}
        close("attention", h, wanted, dtype=heads.dtype, **sums, slack=UNIT[heads.dtype] * scale)


def check_same_bits(machine: Machine, heads: Heads, same: Callable[..., None], length: int) -> None:
    """Prefilled at once, in chunks, by decoding, as drafts: each row has the same bits."""
    of = context(heads, length, seed=7)
    whole = chunked(machine, heads, of, [0, length])
    edges = [*range(4), 7, 16, 17, 64, 65, 200, *range(255, 258), *range(510, 514), 520, 700, *range(1023, 1026)]
    edges = [*(edge for edge in edges if edge < length), length]
    same("attention in chunks", chunked(machine, heads, of, edges, neighbours=3), whole)
    for first in (first for first in (0, 60, 252, 508, 1020) if first + 8 < length):
        single = chunked(machine, heads, of, [*range(first, first + 8)], neighbours=1)
        same(f"attention decoding from {first}", single, whole[first : first + 7])


# Last rows of tiles and partials and first ones of the next, with 1 to 4 tiles in the last partial.
NO_LIMIT = 1 << 20
KERNELS = {"decode": (NO_LIMIT, 0), "ahead": (NO_LIMIT, NO_LIMIT), "tail": (1, 0)}  # LEAST_TAILS, AHEAD_BLOCKS
EDGES = [0, 1, 15, 16, 62, 63, 64, 127, 128, 191, 192, 255, 256, 257, 319, 320, 511, 512, 700]


def check_few_rows(machine: Machine, heads: Heads, same: Callable[..., None]) -> None:
    """Decoded, and as drafts of any number that fits: rows up to an edge have the bits that they have in a prompt;
    of one, and of three that may stand on both sides of a partial's border, by each of the kernels."""
    of = context(heads, EDGES[-1] + 17, seed=3)
    prompts = [range(max(0, edge - 15), edge + 17) for edge in EDGES]
    wanted = dict(zip(EDGES, attend(machine, heads, [(of, rows) for rows in prompts]), strict=True))
    for count in range(1, 16 // heads.group + 1):
        few = {edge: range(edge + 1 - count, edge + 1) for edge in EDGES if edge + 1 >= count}
        for least_tails, ahead_blocks in KERNELS.values() if count in (1, 3) else [KERNELS["decode"]]:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(attention_work, "LEAST_TAILS", least_tails)
                patch.setattr(attention, "AHEAD_BLOCKS", ahead_blocks)
                found = attend(machine, heads, [(of, rows) for rows in few.values()], seed=count)
            for (edge, rows), h in zip(few.items(), found, strict=True):
                first = rows.start - max(0, edge - 15)
                same(f"attention of {count} rows up to {edge}", h, wanted[edge][first : first + count])


def behind(of: Context, prefix: Context, length: int) -> Context:
    """A context whose first positions, so many, are those of a prefix."""
    q, k, v = (
        np.concatenate([a[:length], b[length:]]) for a, b in ((prefix.q, of.q), (prefix.k, of.k), (prefix.v, of.v))
    )
    return Context(q, k, v)


def check_shared(machine: Machine, heads: Heads, same: Callable[..., None], scale: int = 1) -> None:
    """Rows have the same bits whether K and V of what sequences share are read once or for each.

    Two prefixes, one of which goes on in two ways, and one that a single sequence has; tails of all lengths; several
    rows of a sequence, also on both sides of a partial's border; a prompt that begins alike. scale: times as many.
    """
    prefixes = [context(heads, 800, seed) for seed in (50, 51, 52)]
    forked = behind(context(heads, 800, 53), prefixes[0], 300)
    few = 16 // heads.group
    lengths = [(prefixes[0], 513 + 7 * i, 1) for i in range(5 * scale)]
    lengths += [(prefixes[0], 769 + i, 1 + i % few) for i in range(3 * scale)]
    lengths += [(forked, 768 + i, 1 + i % few) for i in range(3 * scale)]
    lengths += [(prefixes[1], 257 + 50 * i % 300, 1) for i in range(3 * scale)]
    lengths += [(prefixes[2], 600, 1), (prefixes[0], 530, 16 // heads.group + 1)]
    rng = np.random.default_rng(9)
    parts = []
    for i in rng.permutation(len(lengths)):
        prefix, length, count = lengths[i]
        own = int(rng.integers(0, 40))
        parts.append(
            (behind(context(heads, length, seed=200 + i), prefix, length - own), range(length - count, length))
        )
    wanted = attend(machine, heads, parts, places=200)
    for places in (200, 30):
        found = attend(machine, heads, parts, seed=places, places=places, shared=True)
        for (_, rows), h, alone in zip(parts, found, wanted, strict=True):
            same(f"attention of {len(rows)} rows up to {rows.stop - 1} behind a shared prefix", h, alone)
