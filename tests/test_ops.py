"""Each op against its formula written out in float64, over every number of rows that takes another way through it."""

import inspect
import threading
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from threadpoolctl import threadpool_info

from tinyvllm_cli.backends.cpu import backend as backend_module
from tinyvllm_cli.backends.cpu import ops
from tinyvllm_cli.backends.cpu.gemm import MAX_TILED_ROWS, MAX_TRANSPOSED_ROWS, Device
from tinyvllm_cli.backends.cpu.kv import KVCache
from tinyvllm_cli.backends.cpu.rows import Rows, resolve_rows
from tinyvllm_cli.backends.cpu.slots import Slots
from tinyvllm_cli.config import ModelConfig, RopeConfig
from tinyvllm_cli.model import llama
from tinyvllm_cli.model.parameters import Weight
from tinyvllm_cli.model.rope import rope_tables
from tinyvllm_cli.types import Batch, Limits

Array = npt.NDArray[np.float32]

HQ, HKV, D, H, INNER, V = 6, 2, 8, 32, 72, 1000
BLOCKS, SLOTS = 60, 8
EPS = 0.1  # large enough to be seen
LIMITS = Limits(BLOCKS, 16, 2048, SLOTS, 640, V, 1)
CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    hidden_size=H,
    intermediate_size=INNER,
    num_layers=2,
    num_heads=HQ,
    num_kv_heads=HKV,
    head_dim=D,
    vocab_size=V,
    max_position=640,
    rms_norm_eps=EPS,
    rope=RopeConfig(),
    tied_head=False,
)
ROPE = rope_tables(CONFIG.rope, D, 640)
ROWS = [1, 2, 7, MAX_TILED_ROWS, MAX_TILED_ROWS + 1, MAX_TRANSPOSED_ROWS, MAX_TRANSPOSED_ROWS + 1]


def random(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng([seed, *shape]).standard_normal(shape, dtype=np.float32)


@pytest.fixture(params=[(1, True), (3, True), (3, False)], ids=["alone", "small-kernels", "no-small-kernels"])
def device(request: pytest.FixtureRequest):
    """Both forms of a product, whatever this processor's would be, and weights split among threads."""
    threads, small_kernels = request.param
    device = Device(threads)
    device._small_kernels = small_kernels
    with device.running(2), pytest.MonkeyPatch.context() as patch:
        patch.setattr("tinyvllm_cli.backends.cpu.gemm.PART", 64)
        yield device
    device.close()


@dataclass
class Sequence:
    slot: int
    blocks: list[int]
    computed: int
    rows: int


# Consecutive and scattered blocks, a first chunk, a later one, single rows of very different lengths, a long prompt.
SEQUENCES = [
    Sequence(0, [1, 2, 3], 0, 40),
    Sequence(1, [9, 7, 8], 21, 20),
    Sequence(2, [10], 0, 1),
    Sequence(3, [12, 11], 30, 1),
    Sequence(4, list(range(13, 33)), 310, 1),
    Sequence(5, [35], 8, 1),
    Sequence(6, list(range(36, 46)), 0, 150),
]


def rows_of(sequences: list[Sequence], logits_indices: list[int] | None = None) -> Rows:
    ends = np.cumsum([sequence.rows for sequence in sequences])
    width = max(len(sequence.blocks) for sequence in sequences)
    indices = np.array(ends - 1 if logits_indices is None else logits_indices, np.int32)
    batch = Batch(
        query_start_loc=np.array([0, *ends], np.int32),
        slots=np.array([sequence.slot for sequence in sequences], np.int32),
        block_tables=np.array([s.blocks + [0] * (width - len(s.blocks)) for s in sequences], np.int32),
        num_computed=np.array([sequence.computed for sequence in sequences], np.int32),
        token_ids=np.arange(ends[-1], dtype=np.int32) % V,
        logits_indices=indices,
        sample_slots=np.zeros_like(indices),
    )
    return resolve_rows(batch, LIMITS, Slots(SLOTS, 640))


def some_rows(count: int) -> Rows:
    return rows_of([Sequence(0, list(range(1, 41)), 0, count)])


def normed(x: Array, weight: Array) -> npt.NDArray[np.float64]:
    wide = x.astype(np.float64)
    return wide / np.sqrt((wide**2).mean(-1, keepdims=True) + EPS) * weight


def close(actual: Array, expected: npt.ArrayLike) -> None:
    assert actual.dtype == np.float32
    np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=2e-5)


# ---------------------------------------------------------------- products and threads


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("n", "k"), [(48, 32), (1, 5), (15, 64), (1000, 33), (320, 129)])
def test_product(rows: int, n: int, k: int, device: Device):
    x, w = random(rows, k), random(n, k)
    close(device.product(x, w), x.astype(np.float64) @ w.T.astype(np.float64))


@given(st.integers(1, 700), st.integers(1, 700), st.integers(1, 9))
def test_the_parts_of_a_weight_are_its_rows_once_each(n: int, rows: int, threads: int):
    device = Device(threads)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tinyvllm_cli.backends.cpu.gemm.PART", 64)
        patch.setattr("tinyvllm_cli.backends.cpu.gemm.OUTPUT", 1 << 12)
        parts = device.split(np.empty((n, 8), np.float32), rows)
    assert [row for part in parts for row in range(part.start, part.stop)] == list(range(n))
    assert all(part.start % 16 == 0 for part in parts)  # a part of gate_up holds whole groups of gate and up


def test_every_part_runs_once_and_an_error_in_any_thread_is_raised():
    device = Device(4)
    done: list[int] = []
    device.run(done.append, range(100))
    assert sorted(done) == list(range(100))

    def fail(part: int) -> None:
        if part == 60:
            raise ArithmeticError

    for _ in range(20):
        with pytest.raises(ArithmeticError):
            device.run(fail, range(100))
    device.close()


def test_blas_threads_wait_where_several_rows_are_shared_out():
    def blas_threads() -> set[int]:
        return {library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"}

    device, before = Device(2), blas_threads()
    with device.running(2):
        assert blas_threads() == {1}
    with device.running(1):
        assert blas_threads() == {2}
    assert blas_threads() == before
    device.close()


@pytest.mark.filterwarnings("error")
def test_an_overflow_is_no_fault_in_any_thread():
    device, together = Device(2), threading.Barrier(2)

    def overflow(_: int) -> None:
        together.wait(timeout=10)  # each part in a thread of its own
        np.exp(np.full(4, 1000, np.float32))

    with device.running(2):
        device.run(overflow, range(2))
    device.close()


# ---------------------------------------------------------------- ops


def test_embed(device: Device):
    rows = some_rows(20)
    table = random(V, H)
    rows.token_ids[3] = -1
    x = ops.embed(device, Weight(table), rows)
    assert np.isnan(x[3]).all()
    kept = np.arange(20) != 3
    assert np.array_equal(x[kept], table[rows.token_ids[kept]])


def test_rms_norm():
    x, weight = random(5, H) * 30, random(H)
    close(ops.rms_norm(x, weight, EPS), normed(x, weight))
    assert np.array_equal(ops.rms_norm(np.zeros((1, H), np.float32), weight, EPS), np.zeros((1, H)))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("with_bias", [False, True])
def test_gate_up_silu(rows: int, with_bias: bool, device: Device):
    x, norm, gate, up = random(rows, H), random(H), random(INNER, H), random(INNER, H, seed=1)
    gate_bias, up_bias = random(INNER), random(INNER, seed=1)
    weight, bias = np.empty((2 * INNER, H), np.float32), np.empty(2 * INNER, np.float32)
    for row in range(INNER):  # groups of 8 gate rows, then the 8 up rows of the same columns
        place = row // 8 * 16 + row % 8
        weight[place], weight[place + 8] = gate[row], up[row]
        bias[place], bias[place + 8] = gate_bias[row], up_bias[row]
    h = ops.gate_up_silu(device, x, norm=norm, eps=EPS, weight=Weight(weight), bias=bias if with_bias else None)
    g = normed(x, norm) @ gate.T + (gate_bias if with_bias else 0)
    u = normed(x, norm) @ up.T + (up_bias if with_bias else 0)
    close(h, g / (1 + np.exp(-g)) * u)


@pytest.mark.filterwarnings("error")
def test_silu_of_far_numbers_is_zero_or_the_number(device: Device):
    weight = np.zeros((16, 1), np.float32)
    weight[:8], weight[8:] = [[-500], [500], [-1], [1], [-100], [100], [-89], [0]], 1
    x = np.ones((3, 1), np.float32)
    h = ops.gate_up_silu(device, x, norm=np.ones(1, np.float32), eps=0.0, weight=Weight(weight), bias=None)
    close(h, [[0, 500, -0.26894143, 0.7310586, 0, 100, 0, 0]] * 3)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("op", [ops.out_proj_add, ops.down_proj_add])
@pytest.mark.parametrize("bias", [None, random(H)])
def test_projections_add_to_the_residual_in_place(rows: int, op, bias: Array | None, device: Device):
    x, h, weight = random(rows, H), random(rows, INNER), random(H, INNER)
    expected = x + h.astype(np.float64) @ weight.T + (0 if bias is None else bias)
    op(device, x, h, weight=Weight(weight), bias=bias)
    close(x, expected)


def test_norm_lm_head_takes_the_sampled_rows(device: Device):
    x, norm, head = random(9, H), random(H), random(V, H)
    for indices in ([8], [0, 0, 5], [], list(range(1, 9))):
        rows = rows_of([Sequence(0, [1], 0, 9)], indices)
        logits = ops.norm_lm_head(device, x, rows, norm=norm, eps=EPS, head=Weight(head))
        assert logits.shape == (len(indices), V)
        close(logits, (normed(x, norm) @ head.T)[indices])


def rotated(heads: npt.NDArray[np.float64], positions: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """[T, heads, D]: the pair (i, i + D / 2) turned by position / theta^(2 i / D)."""
    angles = np.outer(positions, CONFIG.rope.theta ** (-np.arange(0, D, 2) / D))
    turned = (heads[..., : D // 2] + 1j * heads[..., D // 2 :]) * np.exp(1j * angles)[:, None]
    return np.concatenate([turned.real, turned.imag], axis=-1)


@pytest.mark.parametrize("extras", [False, True], ids=["plain", "bias-and-head-norms"])
@pytest.mark.parametrize("sequences", [SEQUENCES, SEQUENCES[:1], SEQUENCES[2:3], SEQUENCES[2:4]])
def test_qkv_rope_write(sequences: list[Sequence], extras: bool, device: Device):
    rows, cache = rows_of(sequences), KVCache(CONFIG, BLOCKS)
    cache.blocks[:] = np.nan
    x, norm, weight = random(len(rows.positions), H), random(H), random((HQ + 2 * HKV) * D, H)
    bias, q_norm, k_norm = (random(size) if extras else None for size in (len(weight), D, D))
    q = ops.qkv_rope_write(
        device, x, cache, rows, layer=1, norm=norm, eps=EPS, qkv=Weight(weight), bias=bias, q_norm=q_norm,
        k_norm=k_norm, rope=ROPE,
    )  # fmt: skip
    y = (normed(x, norm) @ weight.T + (bias if extras else 0)).reshape(len(x), -1, D)
    heads_q, heads_k, heads_v = y[:, :HQ], y[:, HQ : HQ + HKV], y[:, HQ + HKV :]
    if extras:
        heads_q, heads_k = normed(heads_q, q_norm), normed(heads_k, k_norm)
    close(q, rotated(heads_q, rows.positions))
    blocks, offsets = rows.kv_rows // 16, rows.kv_rows % 16
    close(cache.blocks[1, 0, :, blocks, offsets], rotated(heads_k, rows.positions))
    close(cache.blocks[1, 1, :, blocks, offsets], heads_v)
    assert np.isfinite(cache.blocks).sum() == 2 * HKV * D * len(x)


@pytest.mark.parametrize("sequences", [SEQUENCES, SEQUENCES[1:3], SEQUENCES[3:4], SEQUENCES[6:]])
def test_attention(sequences: list[Sequence], device: Device):
    rows, cache = rows_of(sequences), KVCache(CONFIG, BLOCKS)
    cache.blocks[:] = np.nan
    q = random(len(rows.positions), HQ, D)
    expected, row = np.empty((len(q), HQ, D)), 0
    for sequence in sequences:
        length = sequence.computed + sequence.rows
        k, v = (random(length, HKV, D, seed=10 * sequence.slot + which) for which in (1, 2))
        for position in range(length):
            place = (slice(None), sequence.blocks[position // 16], position % 16)
            cache.blocks[1, 0][place], cache.blocks[1, 1][place] = k[position], v[position]
        for position in range(sequence.computed, length):
            for head in range(HQ):
                keys, values = k[: position + 1, head // 3], v[: position + 1, head // 3]
                weights = np.exp(keys.astype(np.float64) @ q[row, head] / np.sqrt(D))
                expected[row, head] = weights @ values / weights.sum()
            row += 1
    close(ops.attention(device, q, cache, rows, layer=1), expected.reshape(len(q), -1))


def test_attention_of_far_scores_is_the_value_of_the_nearest_key(device: Device):
    """exp of a score itself would be infinite."""
    rows, cache = rows_of([Sequence(0, [5], 2, 1)]), KVCache(CONFIG, BLOCKS)
    cache.blocks[:] = 0
    cache.blocks[1, 0, :, 5, 1] = 100
    cache.blocks[1, 1, :, 5, :3] = np.array([1, 2, 3])[:, None]
    q = np.full((1, HQ, D), 100, np.float32)
    close(ops.attention(device, q, cache, rows, layer=1), np.full((1, HQ * D), 2))


# ---------------------------------------------------------------- how rows are grouped


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 200), st.booleans()), min_size=1, max_size=SLOTS))
def test_groups_hold_every_row_once_with_all_its_keys(drawn: list[tuple[int, int, bool]]):
    sequences = [
        Sequence(slot, list(range(1, 40))[:: 1 if consecutive else -1], computed, max(rows, slot == 0))
        for slot, (computed, rows, consecutive) in enumerate(drawn)
    ]
    rows = rows_of(sequences)
    seen = []
    for group in rows.groups:
        assert group.length == max(tile.length for tile in group.tiles)
        assert group.num_rows == 1 or len(group.tiles) == 1
        for tile in group.tiles:
            last = tile.start + group.num_rows - 1
            assert tile.length == rows.positions[last] + 1
            assert rows.slots[tile.start] == rows.slots[last]
            seen += range(tile.start, last + 1)
    assert sorted(seen) == list(range(len(rows.positions)))


def test_single_rows_share_a_softmax_only_with_rows_of_like_length():
    sequences = [Sequence(slot, list(range(1, 41)), n - 1, 1) for slot, n in enumerate([21, 300, 10, 20, 11, 500])]
    assert [[tile.length for tile in group.tiles] for group in rows_of(sequences).groups] == [
        [10, 11, 20],
        [21],
        [300, 500],
    ]


def test_consecutive_blocks_are_read_where_they_lie():
    """Whatever stands in a block table past the sequence's end."""
    sequences = [Sequence(0, [4, 5, 6], 40, 1), Sequence(1, [7], 3, 1), Sequence(2, [9, 8], 20, 1)]
    blocks = {tile.start: tile.blocks for group in rows_of(sequences).groups for tile in group.tiles}
    assert [blocks[0], blocks[1]] == [4, 7]
    assert isinstance(blocks[1], int)
    assert np.array_equal(blocks[2], [9, 8])
    cache = KVCache(CONFIG, BLOCKS)
    assert np.shares_memory(cache.read(1, 0, 4, 41), cache.blocks)


def test_the_forward_needs_the_ops_that_are_declared():
    source = inspect.getsource(llama)
    used = source + inspect.getsource(backend_module)
    assert {name for name in ops.__all__ if f"ops.{name}(" in used} == set(ops.__all__)
