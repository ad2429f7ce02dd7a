"""Products of at most 16 rows by our own kernels, which have the bits of cublasLt's algorithms without split K."""

from __future__ import annotations

from typing import Any, NamedTuple

from tinyvllm_cli.backends.gpu.kernels import Kernels, sources_digest

MAX_ROWS = 16
# The kernels that norm do so in every block, row after row: of more rows one kernel for each is quicker.
MAX_NORMED_ROWS, MAX_NORMED_COLUMNS, NORMED_THREADS = 2, 4096, 256
PAIR = 32  # columns of two steps of an mma


class Tiling(NamedTuple):
    """How a block of threads works, as of cuda/skinny.cuh."""

    multipliers: int
    columns: int
    stages: int

    @property
    def rows(self) -> int:
        return 16 * self.multipliers

    def shared_bytes(self, rows: int) -> int:
        """Of the ring: in each stage its rows of the weight, and so many of activations."""
        return self.stages * (self.rows + rows) * (2 * self.columns + 16)


DEEP, LOW, HIGH = Tiling(2, 512, 6), Tiling(2, 512, 3), Tiling(4, 256, 3)
DEEP_ROWS = 4  # of activations, at most, beside a ring so deep in the shared memory of a multiprocessor of Hopper
HIGH_FROM = 8192  # rows of a weight


def normed_shared_bytes(tiling: Tiling, rows: int, k: int) -> int:
    """A ring of the weight alone, and all of the normed rows."""
    return tiling.shared_bytes(0) + rows * (2 * (-(-k // PAIR) * PAIR) + 16)


def digest() -> str:
    """Of the kernels' sources and compiler: what was found out about other ones does not hold for them."""
    return sources_digest("skinny.cu", "skinny.cuh", "mma.cuh", "common.cuh")


def fits(kernels: Kernels, out: Any, weight: Any, rows: int, *, add: bool) -> bool:  # noqa: ARG001  as medium.fits
    """Whether there is a kernel for such a product."""
    return rows <= MAX_ROWS and (out.dtype.name == "float32" or not add)


def multiply(kernels: Kernels, stream: Any, out: Any, a: Any, weight: Any, rows: int, *, add: bool) -> None:
    """out[:rows, :N] = a[:rows] @ weight.T, or += with `add`, of arrays as Blas.product takes them; nothing else of
    `out` is touched."""
    (n, k), deep = weight.shape, rows <= DEEP_ROWS and kernels.shared_limit >= DEEP.shared_bytes(DEEP_ROWS)
    if add:
        name, tiling = ("add_deep", DEEP) if deep else ("add_low", LOW)
    else:
        kind = "f32" if out.dtype.name == "float32" else "elem"
        name, tiling = (f"{kind}_high", HIGH) if n >= HIGH_FROM else (f"{kind}_low", LOW)
    args = (out, a, weight, rows, n, k, out.shape[1])
    threads, shared = 32 * (tiling.multipliers + 2), tiling.shared_bytes(rows)
    kernels.launch(f"skinny_{name}", (-(-n // tiling.rows),), threads, args, stream=stream, shared=shared)


def normed_product(
    kernels: Kernels, stream: Any, out: Any, x: Any, norm: Any, weight: Any, rows: int, eps: float
) -> None:
    """out[:rows, :N] = rms_norm(x[:rows]) @ weight.T, with the bits that both apart have; out elem [capacity, ld]."""
    n, k = weight.shape
    args = (out, x, norm, weight, rows, n, k, out.shape[1], eps)
    _launch_normed(kernels, stream, "normed_product", args, LOW, weight, rows)


def normed_qkv(kernels: Kernels, stream: Any, weight: Any, args: tuple[Any, ...], rows: int) -> None:
    """The arguments of the kernel normed_qkv (cuda/normed_qkv.cu)."""
    _launch_normed(kernels, stream, "normed_qkv", args, LOW, weight, rows)


def normed_silu(
    kernels: Kernels, stream: Any, out: Any, x: Any, norm: Any, weight: Any, bias: Any | None, rows: int, eps: float
) -> None:
    """out[:rows] = SiLU(gate) * up of rms_norm(x[:rows]) @ weight.T (+ bias), with the bits that all apart have; out
    elem [capacity, N / 2]."""
    n, k = weight.shape
    args = (out, x, norm, weight, bias, rows, n, k, eps)
    _launch_normed(kernels, stream, "normed_silu", args, HIGH, weight, rows)


def _launch_normed(
    kernels: Kernels, stream: Any, name: str, args: tuple[Any, ...], tiling: Tiling, weight: Any, rows: int
) -> None:
    n, k = weight.shape
    shared = normed_shared_bytes(tiling, rows, k)
    kernels.launch(name, (-(-n // tiling.rows),), NORMED_THREADS, args, stream=stream, shared=shared)
