"""Products of 17 to 256 rows, in FP8 of 1 to 256, by our own kernels for Hopper, with the bits of cublasLt's algorithms
without split K.

How a product is cut into tiles decides nothing about its bits.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from tinyvllm_cli.backends.gpu.kernels import KERNELS, Kernels, sources_digest
from tinyvllm_cli.backends.gpu.plan import Scales
from tinyvllm_cli.backends.gpu.tensor_maps import SLAB_BYTES, tensor_map

ARCH = "sm_90a"  # whose instructions the kernels are made of
MAX_ROWS = 256
BLOCKS = 132  # that a card runs at once: one on each multiprocessor of an H100 or H200
GROUP_ROWS, GROUP_THREADS, LOADERS = 64, 128, 64  # of the warps that multiply together; threads that load
RING_BYTES = 225 << 10  # of shared memory, at most
BARRIER_BYTES = 3 * 8  # of a stage
FEW_ROWS = 80  # up to which a block that has all of them is quicker than two that have half of them each
MIN_STAGES = 2  # whose room the results take at the end
SLABS = {1: 2, 2: 1}  # of a stage, by groups
# Numbers of tokens that a block may have, as the kernels are compiled.
TOKENS = {
    "medium_elem_1": (32, 48, 64, 72, 80, 88, 96, 104, 112, 128),
    "medium_elem_2": (32, 48, 64, 72, 80, 88, 96, 112, 128, 144, 192, 256),
    "medium_add": (32, 40, 48, 56, 64, 72, 80, 88, 96, 104, 112, 128),
    "medium_codes_1": (16, 32, 48, 64, 80, 96, 112, 128),
    "medium_codes_2": (16, 32, 48, 64, 72, 80, 96, 112, 128, 144),
    "medium_codes_add": (16, 32, 48, 64, 72, 80, 96, 112, 128),
}


class Plan(NamedTuple):
    """How a product is cut into blocks of threads, as of cuda/medium.cuh: each has 64 rows of the weight a group, and
    so many tokens."""

    groups: int
    tokens: int
    stages: int
    grid: tuple[int, int]
    cluster: tuple[int, int]

    @property
    def shared_bytes(self) -> int:
        return self.stages * (stage_bytes(self.groups, self.tokens) + BARRIER_BYTES)


def stage_bytes(groups: int, tokens: int) -> int:
    return SLABS[groups] * (groups * GROUP_ROWS + tokens) * SLAB_BYTES


@cache  # asked for in every layer
def plan(name: str, groups: int, n: int, row_bytes: int, rows: int) -> Plan:
    """Of a kernel's product, whose operands have rows of row_bytes: as many parts of the tokens as there are
    multiprocessors for, in blocks that get the weight by one copy for two of them."""
    row_tiles = -(-n // (groups * GROUP_ROWS))
    parts = next(parts for parts in (4, 2, 1) if parts == 1 or (row_tiles * parts <= BLOCKS and rows > 16 * parts))
    parts = max(parts, -(-rows // TOKENS[name][-1]))
    tokens = next(tokens for tokens in TOKENS[name] if tokens * parts >= rows)
    sharers = min(-(-rows // tokens), 2)
    parts = sharers * -(-rows // (tokens * sharers))
    room = RING_BYTES // (stage_bytes(groups, tokens) + BARRIER_BYTES)
    stages = max(min(room, -(-row_bytes // (SLAB_BYTES * SLABS[groups]))), MIN_STAGES)
    return Plan(groups, tokens, stages, (row_tiles, parts), (1, sharers))


def _groups(n: int, rows: int) -> int:
    """That a block has of a product which does not add: two for weights of many rows, and where there are
    multiprocessors for two parts of the tokens only if blocks have as many rows."""
    row_tiles = -(-n // GROUP_ROWS)
    return 2 if row_tiles > BLOCKS or (2 * row_tiles > BLOCKS and rows > FEW_ROWS) else 1


def digest() -> str:
    """As of skinny.digest."""
    files = sorted({file for name, file in KERNELS.items() if name.startswith("medium_")})
    headers = ("medium_codes.cuh", "medium_results.cuh", "medium.cuh", "wgmma.cuh", "mma.cuh", "common.cuh")
    return sources_digest(*files, *headers)


def fits(kernels: Kernels, out: Any, weight: Any, rows: int, *, add: bool) -> bool:
    """Whether there is a kernel for such a product."""
    kinds = ("float32",) if add else ("bfloat16", "float16") if weight.itemsize == 1 else (weight.dtype.name,)
    return (
        kernels.arch == ARCH
        and rows <= MAX_ROWS
        and out.dtype.name in kinds
        and weight.shape[0] % 8 == out.shape[1] % 8 == 0
    )


def multiply(
    kernels: Kernels,
    stream: Any,
    out: Any,
    a: Any,
    weight: Any,
    rows: int,
    scales: Scales | None = None,
    *,
    add: bool,
) -> None:
    """out[:rows, :N] = a[:rows] @ weight.T, or += with `add`, of arrays as Blas.product takes them and `fits` wants
    them; nothing else of `out` is touched."""
    (n, k), itemsize = weight.shape, weight.itemsize
    groups = 1 if add else _groups(n, rows)
    if scales is None:
        name = "medium_add" if add else f"medium_elem_{groups}"
    else:
        name = f"medium_codes_{'add' if add else groups}"
    cut = plan(name, groups, n, itemsize * k, rows)
    maps = (
        tensor_map(weight.data.ptr, n, k, groups * GROUP_ROWS, itemsize),
        tensor_map(a.data.ptr, *a.shape, cut.tokens, itemsize),
    )
    args = (*maps, out, rows, n, k, out.shape[1], cut.tokens, cut.stages, *(scales or ()))
    threads = GROUP_THREADS * groups + LOADERS
    kernels.launch(name, cut.grid, threads, args, stream=stream, shared=cut.shared_bytes, cluster=cut.cluster)
