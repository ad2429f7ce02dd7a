"""The pool of KV blocks."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence as Seq

import numpy as np

from tinyvllm_cli.backends import fp8
from tinyvllm_cli.config import BLOCK_SIZE, KVDtypeName, ModelConfig
from tinyvllm_cli.errors import ModelError
from tinyvllm_cli.said import format_bytes
from tinyvllm_cli.types import F32, I32


class KVCache:
    """K and V of every block.

    blocks f32[layer, k|v, kv_head, block, BLOCK_SIZE, head_dim]; tokens is the same memory with the last block axes
    joined. On a GPU the block comes first, so that it is one piece of memory; here it comes after the head, so that
    consecutive blocks of a sequence are a [tokens, head_dim] matrix for each head as they lie, for BLAS without a copy.
    """

    def __init__(self, config: ModelConfig, num_blocks: int, kv_dtype: KVDtypeName = "auto") -> None:
        """Memory is taken from the system only as blocks are written. ModelError where it refuses so much.

        fp8 rounds K and V as they are written; they are held in float32 all the same.
        """
        self.kv_dtype = kv_dtype
        shape = (config.num_layers, 2, config.num_kv_heads, num_blocks, BLOCK_SIZE, config.head_dim)
        self.blocks: F32 = _untouched(math.prod(shape)).reshape(shape)
        self.tokens: F32 = self.blocks.reshape(*shape[:3], -1, config.head_dim)
        self.token_bytes = self.blocks.nbytes // (num_blocks * BLOCK_SIZE)  # K and V of one, over all layers

    def write(self, layer: int, which: int, kv_rows: I32, heads: F32) -> None:
        """Put K (which = 0) or V (1) [T, kv_heads, head_dim] at kv_rows (block * BLOCK_SIZE + offset) i32[T]."""
        if self.kv_dtype == "fp8":
            heads = fp8.rounded(heads)
        self.tokens[layer, which][:, kv_rows] = heads.transpose(1, 0, 2)

    def read(self, layer: int, which: int, blocks: int | I32, length: int) -> F32:
        """K (which = 0) or V (1) [kv_heads, length, head_dim] of positions 0..length-1.

        blocks: the first of consecutive blocks (a view is returned), or i32 of all (a copy).
        """
        if isinstance(blocks, int):
            first = blocks * BLOCK_SIZE
            return self.tokens[layer, which, :, first : first + length]
        picked = self.blocks[layer, which][:, blocks]
        joined: F32 = picked.reshape(len(picked), -1, picked.shape[-1])
        return joined[:, :length]

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
            f"the system refuses {format_bytes(4 * size)} for the KV cache: give fewer --slots or a smaller "
            "--max-model-len"
        ) from None
    if hasattr(mmap, "MADV_NOHUGEPAGE"):  # Linux
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, np.float32)
