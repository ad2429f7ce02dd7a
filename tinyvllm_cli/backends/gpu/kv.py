"""The pool of KV blocks on the GPU."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import numpy as np

from tinyvllm_cli.backends.gpu.device import elem_dtype
from tinyvllm_cli.config import BLOCK_SIZE, DtypeName, KVDtypeName
from tinyvllm_cli.model.parameters import Array

SCALE_BYTES = 2  # of a head in FP8: bf16, the upper half of a float32


def plane_room(head_dim: int, dtype: DtypeName, kv_dtype: KVDtypeName) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and dtype of K or V of a block under one KV head (cuda/kv.cuh): elem[BLOCK_SIZE, D], or in FP8 bytes, those
    of the codes and then of the scales.
    """
    elem = elem_dtype(dtype)
    if kv_dtype == "fp8":
        return (BLOCK_SIZE * (head_dim + SCALE_BYTES),), np.dtype(np.uint8)
    return (BLOCK_SIZE, head_dim), elem


class KVCache:
    """K and V of every block: blocks [num_blocks, num_layers, k|v, Hkv, *plane_room], a block in one piece."""

    def __init__(self, blocks: Array, kv_dtype: KVDtypeName) -> None:
        self.blocks = blocks
        self.kv_dtype = kv_dtype

    @property
    def token_bytes(self) -> int:
        """Of K and V of one token, over all layers."""
        return int(self.blocks.strides[0]) // BLOCK_SIZE

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
