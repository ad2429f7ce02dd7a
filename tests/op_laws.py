"""The ops of backends/gpu/ops.py but attention and sample against their formulas in float64, on any device for ops.

test_gpu_ops.py runs these laws on the card, test_emulated_ops.py on the processor. The reference rounds where buffers
hold elements. Buffers are poisoned first, and only what an op hands on may have changed at the end.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from gpu_tools import UNIT, OpDevice, assert_close, assert_same_bits, read, rounded
from kernel_laws import (
    BLOCK,
    EPS,
    EXP_TERMS,
    LAYER,
    NUM_IDS,
    NUM_LAYERS,
    elements,
    finished,
    normed,
    on_device,
    random,
    rope_tables,
    step_rows,
    swiglu,
    written_heads,
    written_rows,
)

from tinyvllm_cli.backends.gpu.cublas import padded_rows
from tinyvllm_cli.model.parameters import Weight


def embed(device: OpDevice, ops: Any, num_rows: int, hidden: int) -> None:
    """Known ids, ids from the token table, and ids that no vocabulary has, given or in the table."""
    rng = np.random.default_rng([num_rows, hidden])
    rows, table = step_rows(rng, num_rows), elements(device, rng, NUM_IDS, hidden)
    wrong = np.array([-2, -(2**31), NUM_IDS, 2**31 - 1, -1], np.int32)  # -1: only in the table
    place = (rows.slots, rows.positions)
    some = np.arange(num_rows) % 4
    rows.token_ids[some == 1] = -1
    rows.token_ids[some == 2] = np.resize(wrong[:4], (some == 2).sum())
    rows.token_ids[some == 3] = -1
    rows.token_table[place] = np.where(some == 3, np.resize(wrong, num_rows), rows.token_table[place])
    tokens = np.where(rows.token_ids == -1, rows.token_table[place], rows.token_ids)
    given, x = on_device(device, rows), device.poisoned((num_rows + 3, hidden), np.float32)
    result = ops.embed(device.with_buffers(x=x), Weight(device.upload(table, device.dtype)), given)
    known = (tokens >= 0) & (tokens < NUM_IDS)
    expected = np.where(known[:, None], table[np.where(known, tokens, 0)], np.float32(np.nan))
    assert result.shape == (num_rows, hidden)
    found = finished(x, num_rows)
    assert_same_bits("embed", np.where(np.isnan(found), np.float32(np.nan), found), expected)
    rows.token_table[place] = tokens
    assert_same_bits("embed's token table", read(given.token_table), rows.token_table)


def place_blocks(device: OpDevice, ops: Any, count: int) -> None:
    """`count` changes in tables of which nothing else may change."""
    rng = np.random.default_rng(count)
    before = rng.integers(0, 99, (7, 61)).astype(np.int32)
    places = rng.permutation(before.size)[:count]
    changes = np.stack([places, rng.integers(100, 199, count)], axis=1).astype(np.int32)
    tables = device.poisoned(before.shape, np.int32, first=before)
    ops.place_blocks(device, SimpleNamespace(block_tables=tables.array, changes=device.upload(changes)))
    expected = before.copy()
    expected.reshape(-1)[changes[:, 0]] = changes[:, 1]
    assert_same_bits("place_blocks", tables.read(), expected)


def qkv_rope_write(
    device: OpDevice, ops: Any, num_rows: int, num_heads: int, num_kv_heads: int, *, extras: bool
) -> None:
    """extras: bias and head norms. The residual stream must stay as it is."""
    rng = np.random.default_rng([num_rows, num_heads])
    head_dim, heads, hidden = device.head_dim, num_heads + 2 * num_kv_heads, 64
    rows, capacity = step_rows(rng, num_rows), padded_rows(num_rows)
    x, norm = random(rng, num_rows, hidden), random(rng, hidden)
    weight = elements(device, rng, heads * head_dim, hidden, scale=hidden**-0.5)
    bias = random(rng, heads * head_dim) if extras else None
    q_norm, k_norm = (random(rng, head_dim) if extras else None for _ in range(2))
    cos, sin = rope_tables(rng, head_dim)
    stream = device.poisoned((capacity, hidden), np.float32, first=x)
    q = device.poisoned((capacity, num_heads, head_dim))
    cache = device.poisoned((rows.num_blocks, NUM_LAYERS, 2, num_kv_heads, BLOCK, head_dim))
    inner = {"normed": device.poisoned((capacity, hidden)), "qkv": device.poisoned((capacity, heads * head_dim))}
    optional = (None if array is None else device.upload(array) for array in (bias, q_norm, k_norm))
    result = ops.qkv_rope_write(
        device.with_buffers(x=stream, q=q, **inner), stream.array[:num_rows],
        SimpleNamespace(blocks=cache.array, num_kv_heads=num_kv_heads, head_dim=head_dim, kv_dtype="auto"),
        on_device(device, rows),
        layer=LAYER, norm=device.upload(norm), eps=EPS, qkv=Weight(device.upload(weight, device.dtype)),
        **dict(zip(("bias", "q_norm", "k_norm"), optional, strict=True)), rope=(device.upload(cos), device.upload(sin)),
    )  # fmt: skip
    y = rounded(rounded(normed(x, norm), device.dtype) @ weight.T.astype(np.float64), device.dtype)
    more = None if bias is None else bias.reshape(heads, head_dim)
    expected = written_heads(
        y.reshape(num_rows, heads, head_dim),
        num_kv_heads,
        more,
        q_norm,
        k_norm,
        cos[rows.positions],
        sin[rows.positions],
    )
    assert result.shape == (num_rows, num_heads, head_dim)
    found = (finished(q, num_rows), *written_rows(cache, rows))
    for name, actual, wanted in zip("qkv", found, expected, strict=True):
        greatest = np.abs(wanted).max(axis=-1, keepdims=True)
        assert_close(f"qkv_rope_write {name}", actual, wanted, dtype=device.dtype, slack=flips(device) * greatest)
    assert_same_bits("the residual stream", finished(stream, num_rows), x)
    for buffer in inner.values():
        buffer.read()


def gate_up_silu(device: OpDevice, ops: Any, num_rows: int, *, bias: bool) -> None:
    rng, hidden, inner = np.random.default_rng(num_rows), 64, 136
    capacity = padded_rows(num_rows)
    x, norm, more = random(rng, num_rows, hidden), random(rng, hidden), random(rng, 2 * inner)
    weight = elements(device, rng, 2 * inner, hidden, scale=2 * hidden**-0.5)
    stream = device.poisoned((capacity, hidden), np.float32, first=x)
    buffers = {
        "normed": device.poisoned((capacity, hidden)),
        "gate_up": device.poisoned((capacity, 2 * inner)),
        "activated": device.poisoned((capacity, inner)),
    }
    result = ops.gate_up_silu(
        device.with_buffers(x=stream, **buffers), stream.array[:num_rows], norm=device.upload(norm), eps=EPS,
        weight=Weight(device.upload(weight, device.dtype)), bias=device.upload(more) if bias else None,
    )  # fmt: skip
    y = rounded(rounded(normed(x, norm), device.dtype) @ weight.T.astype(np.float64), device.dtype)
    pairs = (y.astype(np.float64) + (more if bias else 0)).reshape(num_rows, -1, 2, 8)
    gate, up = (pairs[:, :, which].reshape(num_rows, inner) for which in (0, 1))
    # SiLU is nowhere steeper than 1.1; flips are shares of numbers that are about as great as the greatest of a row.
    greatest = np.abs(pairs).max(axis=(1, 2, 3), keepdims=True).reshape(num_rows, 1)
    slack = flips(device) * greatest * (1.1 * np.abs(up) + np.abs(swiglu(gate, np.ones_like(up))))
    assert result.shape == (num_rows, inner)
    found = finished(buffers["activated"], num_rows)
    assert_close("gate_up_silu", found, swiglu(gate, up), dtype=device.dtype, terms=EXP_TERMS, slack=slack)
    assert_same_bits("the residual stream", finished(stream, num_rows), x)
    for buffer in buffers.values():
        buffer.read()


def projection_add(device: OpDevice, op: Any, buffer: str, num_rows: int, *, bias: bool) -> None:
    """op: out_proj_add or down_proj_add, which reads `buffer`. Rows past the step's may become anything."""
    rng, hidden, inner = np.random.default_rng(num_rows), 64, 136
    capacity = padded_rows(num_rows, add=True)
    x, h, more = random(rng, num_rows, hidden), elements(device, rng, num_rows, inner), random(rng, hidden)
    weight = elements(device, rng, hidden, inner)
    stream = device.poisoned((capacity, hidden), np.float32, first=x)
    given = device.poisoned((capacity, inner), first=h)
    op(
        device.with_buffers(x=stream, **{buffer: given}), stream.array[:num_rows], given.array[:num_rows],
        weight=Weight(device.upload(weight, device.dtype)), bias=device.upload(more) if bias else None,
    )  # fmt: skip
    expected = x + h.astype(np.float64) @ weight.T + (more if bias else 0)
    magnitude = np.abs(x) + np.abs(h.astype(np.float64)) @ np.abs(weight.T) + np.abs(more)
    found = stream.read()[:num_rows]
    assert_close(op.__name__, found, expected, dtype="float32", terms=inner, scale=magnitude)
    assert_same_bits("what a projection reads", finished(given, num_rows), h)


def norm_lm_head(device: OpDevice, ops: Any, num_rows: int, num_sampled: int) -> None:
    """With a vocabulary that is no multiple of the padding, rows that repeat, and no rows at all."""
    rng, hidden, num_ids = np.random.default_rng([num_rows, num_sampled]), 64, 1000
    x, norm = random(rng, num_rows, hidden), random(rng, hidden)
    head = elements(device, rng, num_ids, hidden)
    picks = rng.integers(0, num_rows, num_sampled).astype(np.int32)
    capacity = padded_rows(num_sampled or 1)
    picked, logits = device.poisoned((capacity, hidden)), device.poisoned((capacity, 1024), np.float32)
    stream = device.poisoned((num_rows, hidden), np.float32, first=x)
    result = ops.norm_lm_head(
        device.with_buffers(x=stream, picked=picked, logits=logits), stream.array,
        SimpleNamespace(num_sampled=num_sampled, logits_indices=device.upload(picks)),
        norm=device.upload(norm), eps=EPS, head=Weight(device.upload(head, device.dtype)),
    )  # fmt: skip
    assert result.shape == (num_sampled, num_ids)
    rows = rounded(normed(x[picks], norm), device.dtype).astype(np.float64)
    scale = np.abs(rows) @ np.abs(head.T)
    slack = flips(device) * np.abs(rows).max(initial=0) * np.abs(head).max()
    found = logits.read()[:num_sampled, :num_ids]
    assert_close("norm_lm_head", found, rows @ head.T, dtype="float32", terms=hidden, scale=scale, slack=slack)


def flips(device: OpDevice) -> float:
    """Share of a number that an intermediate rounding may move it by, beyond that of the reference.

    A float32 sum that lies all but on the border between two elements is rounded to the other one than in float64: the
    element is off by two units, and one of a few that a product sums.
    """
    return 6 * UNIT[device.dtype]
