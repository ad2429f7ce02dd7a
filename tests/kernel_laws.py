"""The kernels around products and attention against their formulas in float64, on any device for ops.

test_gpu_ops.py runs these laws on the card, test_emulated_ops.py on the processor. Every output is poisoned first; rows
past a step's end, and K and V of any other position, must stay so.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
from gpu_tools import Array, OpDevice, Output, assert_close, rounded

from tinyvllm_cli.backends.gpu.ops import rope_shape
from tinyvllm_cli.backends.gpu.timing import READ_BLOCK, READ_PART

F64 = npt.NDArray[np.float64]

EPS = 1e-3
BLOCK = 16
MAX_POSITION = 100
NUM_LAYERS, LAYER = 3, 1
NUM_IDS = 1000
NORM_TERMS = 64  # of float32 sums in a norm: of one thread, then of a tree
EXP_TERMS = 300  # the quick exp of SiLU is off by 2^-16, 256 units of float32
EXP_SLACK = 2.0**-116  # and gives infinity from exp(87.3) on, where |x / (1 + exp(-x))| is less


def random(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> npt.NDArray[np.float32]:
    return rng.standard_normal(shape, np.float32) * np.float32(scale)


def elements(device: OpDevice, rng: np.random.Generator, *shape: int, scale: float = 1.0) -> npt.NDArray[np.float32]:
    """Random numbers that elements hold exactly, as float32."""
    return rounded(random(rng, *shape, scale=scale), device.dtype)


# ---------------------------------------------------------------- the rows of a step


def step_rows(rng: np.random.Generator, num_rows: int) -> SimpleNamespace:
    """Host arrays of Rows (backends/gpu/rows.py): chunks of all sizes and single rows, in scattered blocks."""
    sizes = []
    while sum(sizes) < num_rows:
        sizes.append(min(num_rows - sum(sizes), int(rng.choice([1, 1, 2, 17, 40]))))
    first = rng.integers(0, MAX_POSITION - 40, len(sizes))
    width = -(-MAX_POSITION // BLOCK)
    max_slots = len(sizes) + 3
    blocks = 1 + rng.permutation(max_slots * width).reshape(-1, width)
    slots = rng.permutation(max_slots)[: len(sizes)]
    return SimpleNamespace(
        num_rows=num_rows,
        num_sampled=min(num_rows, 5),
        width=width,
        num_blocks=blocks.size + 1,
        positions=np.concatenate([np.arange(n) + p for n, p in zip(sizes, first, strict=True)]).astype(np.int32),
        slots=np.repeat(slots, sizes).astype(np.int32),
        block_tables=blocks.astype(np.int32),
        token_ids=rng.integers(0, NUM_IDS, num_rows).astype(np.int32),
        token_table=rng.integers(0, NUM_IDS, (max_slots, MAX_POSITION)).astype(np.int32),
        logits_indices=rng.integers(0, num_rows, min(num_rows, 5)).astype(np.int32),
    )


def on_device(device: OpDevice, rows: SimpleNamespace) -> Any:
    fields = {name: device.upload(v) if isinstance(v, np.ndarray) else v for name, v in vars(rows).items()}
    return SimpleNamespace(**fields)


def finished(output: Output, num_rows: int) -> Array:
    """The rows of a step; those past it must be as they were."""
    values = output.read()
    written = np.argwhere(~np.isnan(values[num_rows:]))
    assert not len(written), (
        f"{len(written)} numbers past the step's {num_rows} rows were written, "
        f"the first at {[num_rows + int(written[0][0]), *written[0][1:].tolist()]}"
    )
    return values[:num_rows]


# ---------------------------------------------------------------- formulas


def normed(x: Array, weight: Array) -> F64:
    wide = x.astype(np.float64)
    result: F64 = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + EPS) * weight
    return result


def rotated(heads: F64, cos: Array, sin: Array) -> F64:
    """[T, heads, D] by cos, sin [T, D / 2]: the pair (i, i + D / 2) as a complex number, turned."""
    half = heads.shape[-1] // 2
    turned = (heads[..., :half] + 1j * heads[..., half:]) * (cos + 1j * sin.astype(np.float64))[:, None]
    return np.concatenate([turned.real, turned.imag], axis=-1)


def swiglu(gate: F64, up: F64) -> F64:
    with np.errstate(over="ignore", invalid="ignore"):
        return gate / (1 + np.exp(-gate)) * up


def interleaved(gate: Array, up: Array) -> Array:
    """The last axis: 8 of gate, 8 of up, 8 of gate, ..."""
    shape = (*gate.shape[:-1], -1, 8)
    pairs = np.stack([gate.reshape(shape), up.reshape(shape)], axis=-2)
    return pairs.reshape(*gate.shape[:-1], -1)


# ---------------------------------------------------------------- kernels


def rms_norm(device: OpDevice, num_rows: int, hidden: int, *, picked: bool) -> None:
    """Rows of zeros, of small, of great numbers, one with a NaN that spoils no other."""
    rng = np.random.default_rng([num_rows, hidden])
    x, weight = random(rng, num_rows, hidden), random(rng, hidden)
    scales = np.array([1, 0, 1e-4, 3e3, 1], np.float32)
    x *= scales[np.arange(num_rows) % len(scales)][:, None]
    x[num_rows // 2, hidden - 1] = np.nan
    rows = rng.integers(0, num_rows, num_rows).astype(np.int32) if picked else None
    y = device.poisoned((num_rows + 3, hidden))
    sizes = (np.int32(num_rows), np.int32(hidden), np.float32(EPS))
    places = None if rows is None else device.upload(rows)
    device.launch("rms_norm", (num_rows,), 256, (y, device.upload(x), device.upload(weight), places, *sizes))
    expected = normed(x if rows is None else x[rows], weight)
    assert_close("rms_norm", finished(y, num_rows), expected, dtype=device.dtype, terms=NORM_TERMS)


def rope_write(device: OpDevice, num_rows: int, num_heads: int, num_kv_heads: int, *, bias: bool, norms: bool) -> None:
    rng = np.random.default_rng([num_rows, num_heads, device.head_dim])
    head_dim, heads = device.head_dim, num_heads + 2 * num_kv_heads
    rows = step_rows(rng, num_rows)
    qkv = elements(device, rng, num_rows, heads, head_dim)
    qkv[-1, 0, 0] = np.nan  # which spoils this head of this row, and no other
    more = random(rng, heads, head_dim) if bias else None
    q_norm, k_norm = (random(rng, head_dim) if norms else None for _ in range(2))
    cos, sin = rope_tables(rng, head_dim)
    q = device.poisoned((num_rows + 3, num_heads, head_dim))
    cache = device.poisoned((rows.num_blocks, NUM_LAYERS, 2, num_kv_heads, BLOCK, head_dim))
    given = on_device(device, rows)
    optional = (None if array is None else device.upload(array) for array in (more, q_norm, k_norm))
    places = (given.positions, given.slots, given.block_tables)
    sizes = map(np.int32, (num_rows, num_heads, num_kv_heads, rows.width, LAYER, NUM_LAYERS))
    args = (q, cache, device.upload(qkv, device.dtype), *optional, device.upload(cos), device.upload(sin), *places)
    device.launch("rope_write", *rope_shape(num_rows, heads, head_dim), (*args, *sizes, np.float32(EPS)))
    expected = written_heads(qkv, num_kv_heads, more, q_norm, k_norm, cos[rows.positions], sin[rows.positions])
    found = (finished(q, num_rows), *written_rows(cache, rows))
    for name, actual, wanted in zip("qkv", found, expected, strict=True):
        greatest = np.nan_to_num(np.abs(wanted)).max(axis=-1, keepdims=True)
        op = f"rope_write {name}{' normed' if norms else ''}"
        assert_close(op, actual, wanted, dtype=device.dtype, terms=NORM_TERMS, scale=greatest)


def rope_tables(rng: np.random.Generator, head_dim: int) -> tuple[Array, Array]:
    """cos and sin f32[positions, D / 2] of angles that are no function of anything."""
    angles = rng.uniform(-4, 4, (MAX_POSITION, head_dim // 2)).astype(np.float32)
    return np.cos(angles), np.sin(angles)


def written_heads(
    qkv: Array,
    num_kv_heads: int,
    bias: Array | None,
    q_norm: Array | None,
    k_norm: Array | None,
    cos: Array,
    sin: Array,
) -> tuple[F64, F64, F64]:
    """q [T, Hq, D], K and V [T, Hkv, D]."""
    heads = qkv.astype(np.float64) + (0 if bias is None else bias)
    q, k, v = np.split(heads, [-2 * num_kv_heads, -num_kv_heads], axis=1)
    if q_norm is not None and k_norm is not None:
        q, k = normed(q, q_norm), normed(k, k_norm)
    return rotated(q, cos, sin), rotated(k, cos, sin), v


def written_rows(cache: Output, rows: SimpleNamespace) -> tuple[Array, Array]:
    """K and V [T, Hkv, D] of the rows of a step; everything else in the pool must be as it was."""
    pool = cache.read().copy()
    blocks, offsets = rows.block_tables[rows.slots, rows.positions // BLOCK], rows.positions % BLOCK
    k, v = (pool[blocks, LAYER, which][np.arange(len(blocks)), :, offsets] for which in (0, 1))
    pool[blocks, LAYER, :, :, offsets] = np.nan
    others = np.argwhere(~np.isnan(pool))
    assert not len(others), (
        f"{len(others)} numbers of the pool were written that are no row's, first {others[0].tolist()}"
    )
    return k, v


def silu_mul(device: OpDevice, num_rows: int, inner: int, *, bias: bool) -> None:
    """With numbers so far out that exp(-gate) is infinite or nothing, and a NaN and infinities in the last row."""
    rng = np.random.default_rng([num_rows, inner])
    gate, up = elements(device, rng, num_rows, inner, scale=3), elements(device, rng, num_rows, inner)
    gate[0, :8], up[0, :8] = [-30000, -100, -88, -80, 80, 100, 30000, 0], 0.5
    gate[-1, :3], up[-1, :3] = [np.nan, np.inf, -np.inf], 1
    gate_bias, up_bias = random(rng, inner), random(rng, inner)
    h = device.poisoned((num_rows + 3, inner))
    args = (
        device.upload(interleaved(gate, up), device.dtype),
        device.upload(interleaved(gate_bias, up_bias)) if bias else None,
    )
    sizes = (np.int32(num_rows), np.int32(inner))
    device.launch("silu_mul", (-(-num_rows * inner // 2048),), 256, (h, *args, *sizes))
    g, u = (a.astype(np.float64) + (b if bias else 0) for a, b in ((gate, gate_bias), (up, up_bias)))
    slack = EXP_SLACK * (1 + np.abs(u))
    expected = swiglu(g, u)
    assert_close("silu_mul", finished(h, num_rows), expected, dtype=device.dtype, terms=EXP_TERMS, slack=slack)


def add_bias(device: OpDevice, num_rows: int, hidden: int) -> None:
    rng = np.random.default_rng([num_rows, hidden])
    x, bias = random(rng, num_rows, hidden), random(rng, hidden)
    out = device.poisoned((num_rows + 3, hidden), np.float32, first=x)
    sizes = (np.int32(num_rows), np.int32(hidden))
    device.launch("add_bias", (-(-num_rows * hidden // 2048),), 256, (out, device.upload(bias), *sizes))
    assert_close("add_bias", finished(out, num_rows), x.astype(np.float64) + bias, dtype="float32")


def sum_words(device: OpDevice, blocks: int) -> None:
    """Every word once, and none behind them."""
    rng = np.random.default_rng(blocks)
    words, before = rng.integers(0, 2**32, blocks * READ_PART // 4, np.uint32), np.array([12345], np.uint32)
    out = device.poisoned((1,), np.uint32, first=before)
    device.launch("sum_words", (blocks,), READ_BLOCK, (device.upload(np.append(words, before)), out))
    assert out.read() == before + words.sum(dtype=np.uint32)
