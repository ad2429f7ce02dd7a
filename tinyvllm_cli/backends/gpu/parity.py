"""Lockstep: each op of a step on the GPU, then NumPy's on the same inputs, so that a faulty op is named itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import closing
from types import ModuleType
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from tinyvllm_cli.backends.cpu import ops as reference
from tinyvllm_cli.backends.cpu.gemm import Device
from tinyvllm_cli.backends.cpu.kv import KVCache
from tinyvllm_cli.backends.cpu.rows import resolve_rows
from tinyvllm_cli.backends.cpu.slots import Slots
from tinyvllm_cli.backends.fp8_rows import dequantize_rows
from tinyvllm_cli.backends.gpu import tolerance
from tinyvllm_cli.backends.gpu.comparison import Comparison, compare_arrays
from tinyvllm_cli.backends.machine import available_cpus
from tinyvllm_cli.config import BLOCK_SIZE
from tinyvllm_cli.model.parameters import Array, Weight
from tinyvllm_cli.types import F32, I32, Batch, SlotOptions

AS_COUNTED = AS_KEPT = -1  # what the device holds: in num_computed, and in token_ids
DRAWS = (
    SlotOptions(logprobs=True),
    SlotOptions(temperature=0.8, top_k=50, top_p=0.95, min_p=0.01, seed=7, logit_bias=((3, -2.0),), logprobs=True),
)


class Lockstep:
    """Stands in for the module of ops: has the names and arguments of backends/cpu/ops.py.

    Each op runs on the GPU and hands its own result on; NumPy's op gets the inputs as they lay on the GPU, the weights
    as it holds them, and K, V and tokens as they were before the op. So what an op did wrong is not held against the
    ops after it. `comparisons` gets an entry for each output; device memory is read through a synchronizing copy.
    """

    def __init__(self, backend: Any, ops: Any) -> None:
        """backend: a GpuBackend with a small pool, as it is mirrored in memory; ops: backends/gpu/ops.py."""
        self.comparisons: list[Comparison] = []
        self._backend = backend
        self._gpu = ops
        self._stream = backend._device.stream
        self._roundoff = tolerance.ROUNDOFF[backend._device.dtype]
        self._cpu = Device(available_cpus())
        limits = backend.limits
        self._cache = KVCache(backend._config, limits.num_blocks)
        self._magnitudes = KVCache(backend._config, limits.num_blocks)  # K, and |V|
        self._slots = Slots(limits.max_slots, limits.max_seq_len)
        self._written = np.zeros(0, np.int32)  # rows of the pool that hold K and V
        self._downloaded: dict[int, tuple[Array, Any]] = {}  # by id, with the array that has it

    def close(self) -> None:
        self._cpu.close()

    def bind(self, slot: int, token_ids: Sequence[int], options: SlotOptions) -> None:
        self._backend.bind(slot, token_ids, options)
        self._slots.bind(slot, token_ids, options)

    def step(self, batch: Batch) -> None:
        """Run one step on both sides."""
        self._rows = rows = resolve_rows(batch, self._backend.limits, self._slots)
        self._slots.token_table[rows.slots, rows.positions] = rows.token_ids
        self._slots.counted[rows.slots] = rows.positions + 1
        self._written = np.union1d(self._written, rows.kv_rows)
        with np.errstate(all="ignore"), self._cpu.running(len(rows.positions)):
            self._backend.run(batch, cast(ModuleType, self))

    # ---------------------------------------------------------------- the ops

    def embed(self, device: Any, table: Weight, rows: Any) -> Array:
        x = self._gpu.embed(device, table, rows)
        self._compare("embed", "x", None, self._host(x), reference.embed(self._cpu, self._held(table), self._rows), 0)
        self._compare_tokens("embed", self._rows.slots, self._rows.positions)
        return x

    def qkv_rope_write(self, device: Any, x: Array, cache: Any, rows: Any, *, layer: int, **arguments: Any) -> Array:
        self._layer = layer
        x_host, held = self._host(x), self._held(arguments)
        q = self._gpu.qkv_rope_write(device, x, cache, rows, layer=layer, **arguments)
        wanted = reference.qkv_rope_write(self._cpu, x_host, self._cache, self._rows, layer=layer, **held)
        held.pop("rope")
        num_kv_heads, head_dim = self._cache.tokens.shape[2], self._cache.tokens.shape[4]
        errors = tolerance.qkv(
            self._cpu, x_host, roundoff=self._roundoff, num_kv_heads=num_kv_heads, head_dim=head_dim, **held
        )
        self._compare("qkv_rope_write", "q", layer, self._host(q), wanted, errors[0] + self._roundoff.of(wanted))
        self._compare_kv(cache, layer, np.stack(errors[1:]))
        return q

    def attention(self, device: Any, q: Array, cache: Any, rows: Any, *, layer: int) -> Array:
        q_host = self._host(q)
        h = self._gpu.attention(device, q, cache, rows, layer=layer)
        wanted = reference.attention(self._cpu, q_host, self._cache, self._rows, layer=layer)
        allowed = tolerance.attention(
            self._cpu,
            q_host,
            wanted,
            self._cache,
            self._magnitudes,
            self._rows,
            layer=layer,
            roundoff=self._roundoff,
        )
        self._compare("attention", "h", layer, self._host(h), wanted, allowed)
        return h

    def out_proj_add(self, device: Any, x: Array, h: Array, *, weight: Weight, bias: Array | None) -> None:
        self._product_add("out_proj_add", device, x, h, weight, bias)

    def gate_up_silu(self, device: Any, x: Array, **arguments: Any) -> Array:
        x_host, held = self._host(x), self._held(arguments)
        h = self._gpu.gate_up_silu(device, x, **arguments)
        wanted = reference.gate_up_silu(self._cpu, x_host, **held)
        allowed = tolerance.gate_up_silu(self._cpu, x_host, wanted, roundoff=self._roundoff, **held)
        self._compare("gate_up_silu", "h", self._layer, self._activations(h), wanted, allowed)
        return h

    def down_proj_add(self, device: Any, x: Array, h: Array, *, weight: Weight, bias: Array | None) -> None:
        self._product_add("down_proj_add", device, x, h, weight, bias)

    def norm_lm_head(self, device: Any, x: Array, rows: Any, **arguments: Any) -> Array:
        x_host, held = self._host(x), self._held(arguments)
        logits = self._gpu.norm_lm_head(device, x, rows, **arguments)
        wanted = reference.norm_lm_head(self._cpu, x_host, self._rows, **held)
        allowed = tolerance.norm_lm_head(self._cpu, x_host, self._rows, roundoff=self._roundoff, **held)
        self._compare("norm_lm_head", "logits", None, self._host(logits), wanted, allowed)
        return logits

    def sample(self, device: Any, logits: Array, rows: Any, slots: Any, *, num_ids: int) -> tuple[Array, Array]:
        logits_host = self._host(logits)
        token_ids, logprobs = self._gpu.sample(device, logits, rows, slots, num_ids=num_ids)
        wanted = reference.sample(self._cpu, logits_host, self._rows, self._slots, num_ids=num_ids)
        self._compare("sample", "token ids", None, self._get(token_ids), wanted.token_ids[0], 0)
        allowed = tolerance.logprobs(wanted.logprobs[0], logits.shape[1])
        self._compare("sample", "logprobs", None, self._host(logprobs), wanted.logprobs[0], allowed)
        positions = self._rows.positions[self._rows.logits_indices] + 1
        fits = positions < self._slots.token_table.shape[1]
        self._compare_tokens("sample", self._rows.sample_slots[fits], positions[fits])
        return token_ids, logprobs

    # ---------------------------------------------------------------- comparing

    def _product_add(self, op: str, device: Any, x: Array, h: Array, weight: Weight, bias: Array | None) -> None:
        before, h_host, weight_host = self._host(x), self._activations(h), self._held(weight)
        getattr(self._gpu, op)(device, x, h, weight=weight, bias=bias)
        wanted = before.copy()
        getattr(reference, op)(self._cpu, wanted, h_host, weight=weight_host, bias=self._held(bias))
        allowed = tolerance.product_add(self._cpu, before, wanted, h_host, weight_host)
        self._compare(op, "x", self._layer, self._host(x), wanted, allowed)

    def _compare_kv(self, cache: Any, layer: int, errors: F32) -> None:
        """K and V of all positions: those of earlier steps must be as they were. Then the GPU's are taken over.

        errors [k|v, T, Hkv, D]: of the rows of this step.
        """
        mirror, rows = self._cache.tokens[layer], self._written
        found, allowed = np.zeros_like(mirror), np.zeros_like(mirror)
        for block in np.unique(rows // BLOCK_SIZE):
            first = block * BLOCK_SIZE
            found[:, :, first : first + BLOCK_SIZE] = self._host(cache.blocks[int(block), layer])
        new = self._rows.kv_rows
        allowed[:, :, new] = errors.transpose(0, 2, 1, 3) + self._roundoff.of(mirror[:, :, new])
        for which, name in enumerate(("K", "V")):
            self._compare(
                "qkv_rope_write", name, layer, found[which][:, rows], mirror[which][:, rows], allowed[which][:, rows]
            )
        mirror[:, :, rows] = found[:, :, rows]
        self._magnitudes.tokens[layer] = mirror[0], np.abs(mirror[1])

    def _compare_tokens(self, op: str, slots: I32, positions: I32) -> None:
        """The token table at (slot, position). Then the GPU's entries are taken over."""
        table: I32 = self._get(self._backend._slots.token_table)
        found, wanted = table[slots, positions], self._slots.token_table[slots, positions]
        self._compare(op, "token table", None, found, wanted, 0)
        self._slots.token_table[slots, positions] = found

    def _compare(self, op: str, output: str, layer: int | None, found: Any, wanted: Any, allowed: Any) -> None:
        if wanted.size:  # a step may sample no row
            self.comparisons.append(compare_arrays(op, output, layer, found, wanted, allowed))

    # ---------------------------------------------------------------- downloads

    def _host(self, array: Array) -> F32:
        """A device array in float32, once all that was enqueued before has run."""
        return self._get(array).astype(np.float32)

    def _activations(self, h: Array) -> F32:
        """Elements, or what codes stand for under their scales."""
        if h.dtype != np.uint8:
            return self._host(h)
        scales: F32 = self._get(self._backend._device.buffers.row_scales[: len(h)])
        return dequantize_rows(self._get(h), scales)

    def _get(self, array: Array) -> npt.NDArray[Any]:
        if array.size and not array.flags.c_contiguous:  # logits, whose rows are padded
            return np.stack([self._get(row) for row in array])
        values: npt.NDArray[Any] = array.get(stream=self._stream)
        return values

    def _held(self, value: Any) -> Any:
        """What never changes (weights, norms, biases, RoPE tables), alone or as arguments: downloaded once."""
        if isinstance(value, Weight):
            return self._held_weight(value)
        if isinstance(value, dict):
            return {name: self._held(item) for name, item in value.items()}
        if isinstance(value, tuple):
            return tuple(map(self._held, value))
        if value is None or isinstance(value, float):
            return value
        if id(value) not in self._downloaded:
            self._downloaded[id(value)] = value, self._host(value)
        return self._downloaded[id(value)][1]

    def _held_weight(self, weight: Weight) -> Weight:
        """As the CPU holds it."""
        if weight.scale is None:
            return Weight(self._held(weight.data))
        if id(weight) not in self._downloaded:
            self._downloaded[id(weight)] = weight, dequantize_rows(self._get(weight.data), self._get(weight.scale))
        return Weight(self._downloaded[id(weight)][1], format=weight.format)


def compare_prompts(backend: Any, prompts: Sequence[Sequence[int]], num_decodes: int, ops: Any) -> list[Comparison]:
    """Answer some prompts in lockstep: each in two chunks, then so many tokens of their own, all in one batch.

    The first is drawn from greedily, as every second one; the others with each filter. prompts: of two tokens at
    least; ops: backends/gpu/ops.py.
    """
    halves = [len(ids) // 2 for ids in prompts]
    lengths = [len(ids) + num_decodes for ids in prompts]
    first = [(0, ids[:half]) for ids, half in zip(prompts, halves, strict=True)]
    second = [(half, ids[half:]) for ids, half in zip(prompts, halves, strict=True)]
    with closing(Lockstep(backend, ops)) as lockstep:
        for slot, ids in enumerate(prompts):
            lockstep.bind(slot, ids, DRAWS[slot % len(DRAWS)])
        lockstep.step(_batch(first, lengths, sampled=False))
        lockstep.step(_batch(second, lengths, sampled=True))
        for _ in range(num_decodes):
            lockstep.step(_batch([(AS_COUNTED, [AS_KEPT]) for _ in prompts], lengths, sampled=True))
        return lockstep.comparisons


def worst_by_op(comparisons: Iterable[Comparison]) -> dict[str, Comparison]:
    """Of each op the output that is worst beside its tolerance, in the order in which the ops run."""
    worst: dict[str, Comparison] = {}
    for comparison in comparisons:
        if comparison.op not in worst or comparison.ratio > worst[comparison.op].ratio:
            worst[comparison.op] = comparison
    return worst


def _batch(parts: Sequence[tuple[int, Sequence[int]]], lengths: Sequence[int], *, sampled: bool) -> Batch:
    """(tokens computed, new tokens) of the sequence in each slot; it has blocks of its own for all of its length."""
    num_blocks = [-(-length // BLOCK_SIZE) for length in lengths]
    tables = np.zeros((len(parts), max(num_blocks)), np.int32)
    free = 1  # block 0 is nobody's
    for table, count in zip(tables, num_blocks, strict=True):
        table[:count] = np.arange(free, free + count)
        free += count
    ends = np.cumsum([len(tokens) for _, tokens in parts], dtype=np.int32)
    slots = np.arange(len(parts), dtype=np.int32)
    return Batch(
        query_start_loc=np.concatenate([np.zeros(1, np.int32), ends]),
        slots=slots,
        block_tables=tables,
        num_computed=np.array([computed for computed, _ in parts], np.int32),
        token_ids=np.array([token for _, tokens in parts for token in tokens], np.int32),
        logits_indices=ends - 1 if sampled else ends[:0],
        sample_slots=slots if sampled else slots[:0],
    )
