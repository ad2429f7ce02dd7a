"""Products of at most 16 rows by our own kernels, which have the bits of cublasLt's algorithms without split K."""

from __future__ import annotations

import hashlib
from functools import cache
from typing import Any

from tinyvllm_cli.backends.gpu.kernels import Kernels, kernel_sources
from tinyvllm_cli.backends.gpu.nvrtc import load_nvrtc

MAX_ROWS = 16
# The constants of cuda/skinny.cu.
COLUMNS, STAGES, MULTIPLIERS = 512, 3, 4
BLOCK_ROWS, THREADS = 8 * MULTIPLIERS, 32 * (MULTIPLIERS + 2)
ROW_BYTES = 2 * COLUMNS + 16


def shared_bytes(rows: int) -> int:
    """Of a block of threads: in each stage its rows of the weight, and those of activations. Up to 147 KiB: some cards
    have 99 KiB, do without, and products take cublasLt there."""
    return STAGES * (BLOCK_ROWS + rows) * ROW_BYTES


@cache
def digest() -> str:
    """Of the kernels' sources and compiler: what was found out about other ones does not hold for them."""
    sources = kernel_sources()
    text = "".join(sources[name] for name in ("skinny.cu", "mma.cuh", "common.cuh"))
    return hashlib.sha256(f"{load_nvrtc().version} {text}".encode()).hexdigest()[:12]


def fits(out: Any, rows: int, *, add: bool) -> bool:
    """Whether there is a kernel for such a product."""
    return rows <= MAX_ROWS and (out.dtype.name == "float32" or not add)


def multiply(kernels: Kernels, stream: Any, out: Any, a: Any, weight: Any, rows: int, *, add: bool) -> None:
    """out[:rows, :N] = a[:rows] @ weight.T, or += with `add`, of arrays as Blas.product takes them; nothing else of
    `out` is touched."""
    name = "skinny_add" if add else "skinny_f32" if out.dtype.name == "float32" else "skinny_elem"
    n, k = weight.shape
    args = (out, a, weight, rows, n, k, out.shape[1])
    kernels.launch(name, (-(-n // BLOCK_ROWS),), THREADS, args, stream=stream, shared=shared_bytes(rows))
