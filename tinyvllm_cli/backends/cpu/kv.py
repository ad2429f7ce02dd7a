"""The pool of KV blocks, and how many blocks fit."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence as Seq

import numpy as np

from tinyvllm_cli.backends.cpu.machine import available_memory
from tinyvllm_cli.config import BLOCK_SIZE, EngineConfig, ModelConfig
from tinyvllm_cli.errors import ModelError, UsageError
from tinyvllm_cli.types import F32, I32

MAX_BLOCKS = 2**31 // BLOCK_SIZE  # rows of the pool are counted in i32


class KVCache:
    """K and V of every block.

    blocks f32[layer, k|v, kv_head, block, BLOCK_SIZE, head_dim]; tokens is the same memory with the last block axes
    joined. On a GPU the block comes first, so that it is one piece of memory; here it comes after the head, so that
    consecutive blocks of a sequence are a [tokens, head_dim] matrix for each head as they lie, for BLAS without a copy.
    """

    def __init__(self, config: ModelConfig, num_blocks: int) -> None:
        """Memory is taken from the system only as blocks are written. ModelError where it refuses so much."""
        shape = (config.num_layers, 2, config.num_kv_heads, num_blocks, BLOCK_SIZE, config.head_dim)
        self.blocks: F32 = _untouched(math.prod(shape)).reshape(shape)
        self.tokens: F32 = self.blocks.reshape(*shape[:3], -1, config.head_dim)

    def write(self, layer: int, which: int, kv_rows: I32, heads: F32) -> None:
        """Put K (which = 0) or V (1) [T, kv_heads, head_dim] at kv_rows (block * BLOCK_SIZE + offset) i32[T]."""
        self.tokens[layer, which][:, kv_rows] = heads.transpose(1, 0, 2)

    def read(self, layer: int, blocks: int | I32, length: int) -> F32:
        """K and V [2, kv_heads, length, head_dim] of positions 0..length-1.

        blocks: the first of consecutive blocks (a view is returned), or i32 of all (a copy).
        """
        if isinstance(blocks, int):
            first = blocks * BLOCK_SIZE
            return self.tokens[layer, :, :, first : first + length]
        picked = self.blocks[layer][:, :, blocks]
        joined: F32 = picked.reshape(*picked.shape[:2], -1, picked.shape[-1])
        return joined[:, :, :length]

    def copy(self, pairs: Seq[tuple[int, int]]) -> None:
        for source, target in pairs:
            self.blocks[:, :, :, target] = self.blocks[:, :, :, source]


def _untouched(size: int) -> F32:
    """Floats [size] that take memory a small page at a time.

    np.empty asks for huge pages, and each of the pool's many regions (a head of a layer) would take one for its first
    block: half a gigabyte before anything is full.
    """
    try:
        memory = mmap.mmap(-1, 4 * size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError):  # the system promises no more than it has, or a limit is set on the process
        raise ModelError(
            f"the system refuses {4 * size >> 20} MiB for the KV cache: give fewer --slots or a smaller --max-model-len"
        ) from None
    if hasattr(mmap, "MADV_NOHUGEPAGE"):  # Linux
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, np.float32)


def pool_size(config: ModelConfig, engine: EngineConfig, num_blocks: int | None) -> tuple[int, int]:
    """(num_blocks, max_seq_len): what all slots can use at full length, or what fits.

    num_blocks None: bounded by half of the memory that is free. Block 0 is the null block, nobody's.
    UsageError where max_model_len is more than the model's context, ModelError where it, or any sequence, does not fit.
    """
    wanted = engine.max_model_len or config.max_position
    if wanted > config.max_position:
        raise UsageError(f"--max-model-len {wanted} is more than the model's context, at most {config.max_position}")
    # A block with its share of what the backend keeps for each position: cos and sin, and the token of each slot.
    position_bytes = 4 * (
        config.num_layers * 2 * config.num_kv_heads * config.head_dim + config.head_dim + engine.slots
    )
    block_bytes = BLOCK_SIZE * position_bytes
    blocks_each = -(-wanted // BLOCK_SIZE)
    if num_blocks is None:
        num_blocks = min(1 + engine.slots * blocks_each, available_memory() // 2 // block_bytes, MAX_BLOCKS)
        needed = 1 + (blocks_each if engine.max_model_len else 1)
        if num_blocks < needed:
            raise ModelError(
                f"the KV cache of one sequence needs {needed * block_bytes >> 20} MiB, half of the free memory is "
                f"{max(0, num_blocks) * block_bytes >> 20} MiB: free some, or give a smaller --max-model-len or model"
            )
    return num_blocks, min(wanted, (num_blocks - 1) * BLOCK_SIZE)
