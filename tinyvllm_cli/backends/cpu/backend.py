"""The NumPy backend: the seam of backends/base.py over the CPU's ops."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from tinyvllm_cli.backends.cpu import ops
from tinyvllm_cli.backends.cpu.gemm import Device
from tinyvllm_cli.backends.cpu.kv import KVCache
from tinyvllm_cli.backends.cpu.rows import Rows, resolve_rows
from tinyvllm_cli.backends.cpu.slots import Slots
from tinyvllm_cli.backends.fp8_rows import rounded_rows
from tinyvllm_cli.backends.machine import available_cpus, available_memory, memory_bound
from tinyvllm_cli.backends.pool import longest_sequence, pool_bounds, wanted_length
from tinyvllm_cli.backends.row_layout import check_mask
from tinyvllm_cli.config import BLOCK_SIZE, EngineConfig, ModelConfig
from tinyvllm_cli.errors import ModelError
from tinyvllm_cli.model.llama import forward
from tinyvllm_cli.model.parameters import Weight, collect_parameters
from tinyvllm_cli.model.rope import rope_tables
from tinyvllm_cli.model.weights.layout import WeightItem, iter_weights
from tinyvllm_cli.model.weights.source import TensorSource
from tinyvllm_cli.said import format_bytes
from tinyvllm_cli.types import F32, I32, U32, BackendFacts, Batch, Limits, SlotOptions, StepOutput

FIRST_POSITIONS = 4096  # of the RoPE tables, before a sequence needs more
FUSED = re.compile(r"\.[qkv]_proj\.|\.(gate|up)_proj\.")  # tensors that become parts of one
ROUNDED = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


class CpuStep:
    """A step whose forward ran when it was enqueued, as the CPU has nothing to run it beside. Its tokens were drawn
    then too, or are when its mask is there."""

    def __init__(self, draw: Callable[[U32 | None], StepOutput], *, waits: bool) -> None:
        self._draw = draw if waits else None
        self._output = None if waits else draw(None)

    @property
    def waits(self) -> bool:
        """For its mask."""
        return self._draw is not None

    def mask(self, bits: U32) -> None:
        if self._draw is None:
            raise ValueError("the step has its tokens: a mask comes once, and to a step with mask_rows")
        self._output = self._draw(bits)
        self._draw = None  # with it go the logits

    def result(self) -> StepOutput:
        if self._output is None:
            raise ValueError("the step waits for its mask: call mask() before result()")
        return self._output


class CpuBackend:
    """A model on the CPU, float32 arithmetic throughout (backends/base.py is the contract)."""

    def __init__(
        self,
        config: ModelConfig,
        tensors: TensorSource,
        engine: EngineConfig,
        *,
        tokenizer_size: int,
        num_blocks: int | None = None,
        max_in_flight: int = 1,
    ) -> None:
        """Load the weights and take the KV pool.

        tokenizer_size: ids from here on are padding and never come out. num_blocks: None is what fits into half of the
        memory that is free once the weights are in place. max_in_flight: steps the engine may enqueue before it reads.
        ModelError where no sequence fits.
        """
        self._eps = config.rms_norm_eps
        self._num_ids = min(tokenizer_size, config.vocab_size)
        _require_memory(tensors)
        items = iter_weights(config, tensors)
        self._parameters = collect_parameters(items, partial(_place, engine=engine))
        num_blocks, max_seq_len = pool_limits(config, engine, num_blocks)
        self._limits = Limits(
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            max_batch_tokens=engine.max_batch_tokens,
            max_slots=engine.slots,
            max_seq_len=max_seq_len,
            vocab_size=config.vocab_size,
            max_in_flight=max_in_flight,
        )
        self._cache = KVCache(config, num_blocks, engine.kv_dtype)
        self._rope_tables = partial(rope_tables, config.rope, config.head_dim)
        self._rope = self._rope_tables(min(FIRST_POSITIONS, max_seq_len))
        self._slots = Slots(engine.slots, max_seq_len)
        self._device = Device(engine.threads or available_cpus())
        self._facts = BackendFacts("cpu", "CPU", engine.dtype, self._cache.token_bytes)
        self._last: CpuStep | None = None
        self._closed = False

    def mask_memory(self) -> U32:
        return np.empty((self._limits.max_slots, -(-self._limits.vocab_size // 32)), np.uint32)

    @property
    def limits(self) -> Limits:
        return self._limits

    @property
    def facts(self) -> BackendFacts:
        return self._facts

    def bind(self, slot: int, token_ids: Seq[int] | I32, options: SlotOptions) -> None:
        known = np.asarray(token_ids, np.int32)
        if known.size and not 0 <= known.min() <= known.max() < self._limits.vocab_size:
            raise ValueError(f"token ids of slot {slot} are not in the vocabulary")
        self._require_drawn()
        self._slots.bind(slot, known, options)

    def step(self, batch: Batch) -> CpuStep:
        rows, logits = self._forward(batch)
        self._last = CpuStep(partial(self._draw, rows, logits), waits=rows.mask_rows is not None)
        return self._last

    def logits(self, batch: Batch) -> F32:
        return self._forward(batch)[1]

    def copy_blocks(self, pairs: Seq[tuple[int, int]]) -> None:
        self._cache.copy(pairs)

    def counts(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._device.close()
            del self._parameters, self._cache

    def _forward(self, batch: Batch) -> tuple[Rows, F32]:
        """Write tokens, K and V of all rows; the logits of the sampled ones."""
        if self._closed:
            raise RuntimeError("the backend is closed")
        self._require_drawn()
        rows = resolve_rows(batch, self._limits, self._slots)
        self._slots.token_table[rows.slots, rows.positions] = rows.token_ids
        self._slots.counted[rows.slots] = rows.positions + 1  # of a slot's rows the last one stays
        self._reach(int(rows.positions.max()))
        with self._device.running(len(rows.positions)):
            logits = forward(ops, self._device, self._parameters, self._cache, rows, eps=self._eps, rope=self._rope)
        return rows, logits

    def _draw(self, rows: Rows, logits: F32, masks: U32 | None) -> StepOutput:
        if masks is not None and rows.mask_rows is not None:
            check_mask(masks, rows.mask_rows, self._limits.vocab_size)
        return ops.sample(self._device, logits, replace(rows, masks=masks), self._slots, num_ids=self._num_ids)

    def _require_drawn(self) -> None:
        """What comes after a step may not change what its tokens are drawn from."""
        if self._last is not None and self._last.waits:
            raise ValueError("a step waits for its mask: call its mask() before bind() and the next step()")

    def _reach(self, position: int) -> None:
        """Make the RoPE tables long enough: twice as long each time, for most contexts are never used to their end."""
        length = len(self._rope[0])
        if position >= length:
            self._rope = self._rope_tables(min(max(2 * length, position + 1), self._limits.max_seq_len))


def _require_memory(tensors: TensorSource) -> None:
    """ModelError where the weights do not fit: better than to be killed half way.

    They become float32 in memory of their own, but those of a float32 file, which stay mapped unless they are fused.
    """
    sizes = {name: 4 * math.prod(tensors.shape(name)) for name in tensors.names()}
    mapped = tensors.nbytes >= sum(sizes.values())
    needed = sum(size for name, size in sizes.items() if not mapped or FUSED.search(name))
    free = available_memory()
    if needed > free:
        raise ModelError(
            f"the weights need {format_bytes(needed)} in float32 and {format_bytes(free)} are free for this process "
            f"({memory_bound()}): take a smaller model, or free some memory or raise its limit"
        )


def pool_limits(config: ModelConfig, engine: EngineConfig, num_blocks: int | None) -> tuple[int, int]:
    """(num_blocks, max_seq_len); None: what half of the free memory holds.

    ModelError where max_model_len, or any sequence, does not fit into that.
    """
    wanted = wanted_length(config, engine)
    if num_blocks is None:
        # A block with its share of what the backend keeps for each position: cos and sin, and the token of each slot.
        position_bytes = 4 * (
            config.num_layers * 2 * config.num_kv_heads * config.head_dim + config.head_dim + engine.slots
        )
        block_bytes = BLOCK_SIZE * position_bytes
        fewest, most = pool_bounds(wanted, engine)
        half = available_memory() // 2
        num_blocks = min(most, half // block_bytes)
        if num_blocks < fewest:
            raise ModelError(
                f"the KV cache of one sequence needs {format_bytes(fewest * block_bytes)}, half of the free memory is "
                f"{format_bytes(half)} ({memory_bound()}): free some or raise its limit, or give a smaller "
                "--max-model-len or model"
            )
    return num_blocks, longest_sequence(wanted, num_blocks)


def _place(item: WeightItem, engine: EngineConfig) -> Weight | F32:
    """In float32, rounded to the dtype asked for; what is float32 already stays where it lies (mapped)."""
    array: npt.NDArray[Any] = item.array
    if engine.elem in ROUNDED:
        with np.errstate(over="ignore"):  # an infinity shows in the logits
            array = array.astype(ROUNDED[engine.elem])
    placed = np.ascontiguousarray(array, np.float32)
    if placed.ndim == 1:
        return placed
    in_fp8 = engine.dtype == "fp8" and item.layer is not None
    return Weight(rounded_rows(placed), format="fp8") if in_fp8 else Weight(placed)
