"""The pool of KV blocks on the GPU."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

from tinyvllm_cli.model.parameters import Array


class KVCache:
    """K and V of every block: blocks elem[num_blocks, num_layers, k|v, Hkv, BLOCK_SIZE, D], a block in one piece."""

    def __init__(self, blocks: Array) -> None:
        self.blocks = blocks

    @property
    def num_kv_heads(self) -> int:
        return int(self.blocks.shape[3])

    @property
    def head_dim(self) -> int:
        return int(self.blocks.shape[5])

    def copy(self, cuda: Any, pairs: Seq[tuple[int, int]], stream: int) -> None:
        """Enqueue copies of whole blocks, (source, target), in order. ValueError for a block that is not there."""
        num_blocks = len(self.blocks)
        if not all(0 <= block < num_blocks for pair in pairs for block in pair):
            raise ValueError(f"copies of blocks {list(pairs)}, wanted 0 to {num_blocks - 1}")
        first, size = self.blocks.data.ptr, self.blocks.strides[0]
        for source, target in pairs:
            if source != target:
                addresses = (first + target * size, first + source * size)
                cuda.memcpyAsync(*addresses, size, cuda.memcpyDeviceToDevice, stream)
