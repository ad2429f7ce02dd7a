"""What tests of the kernels are written with: elem arrays, poisoned outputs, a device for ops, errors in a table."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from tinyvllm_cli.config import DtypeName, KVDtypeName

Array = npt.NDArray[Any]

DTYPES: tuple[DtypeName, ...] = ("bfloat16", "float16")
NUMPY_DTYPE: dict[DtypeName, np.dtype[Any]] = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
}
# Greatest error of rounding to the nearest number of a format: as a share of the number (half the distance from 1 to
# the next), and near zero (half the least number above it).
UNIT: dict[DtypeName, float] = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}
SMALLEST: dict[DtypeName, float] = {"bfloat16": 2.0**-134, "float16": 2.0**-25, "float32": 2.0**-126}
POISON = 0xFF  # as every byte: NaN as bf16, fp16 and float32, -1 as an integer
GUARD = 512  # bytes before and after an output; keeps what lies between aligned


# ---------------------------------------------------------------- to the device and back


def rounded(values: npt.ArrayLike, dtype: DtypeName) -> npt.NDArray[np.float32]:
    """The nearest numbers of the dtype, as float32."""
    with np.errstate(over="ignore"):
        return np.asarray(values, np.float32).astype(NUMPY_DTYPE[dtype]).astype(np.float32)


def to_gpu(host: Array) -> Any:
    """A device array of the host array's dtype."""
    import cupy

    array = cupy.asarray(np.ascontiguousarray(host).reshape(-1).view(np.uint8)).view(host.dtype).reshape(host.shape)
    cupy.cuda.runtime.deviceSynchronize()  # the stream of the tests does not wait for the one that copies
    return array


def read(array: Any) -> Array:
    """A device array on the host, once all work on the device is done; 16-bit elements as float32.

    An array that is not contiguous is one of float32: CuPy copies no others.
    """
    if not isinstance(array, np.ndarray):
        import cupy

        cupy.cuda.runtime.deviceSynchronize()
        array = array.reshape(-1).view(np.uint8).get().view(array.dtype).reshape(array.shape)
    host: Array = np.array(array)
    return host.astype(np.float32) if host.dtype.itemsize == 2 else host


@dataclass(frozen=True)
class Output:
    """A device array full of POISON between two guards: what a kernel leaves out shows, and what it writes outside."""

    array: Any
    whole: Any  # bytes: guard, array, guard

    def read(self) -> Array:
        """On the host as `read` gives it; AssertionError where a guard has changed."""
        result, whole = read(self.array), read(self.whole)
        changed = [*np.flatnonzero(whole[:GUARD] != POISON) - GUARD, *np.flatnonzero(whole[-GUARD:] != POISON)]
        assert not changed, (
            f"{len(changed)} bytes outside of an output {self.array.shape} {self.array.dtype} were written, "
            f"at {_index(changed[:8])} (before its start where negative, else past its end)"
        )
        return result


# ---------------------------------------------------------------- the device, as ops and kernels see it


@dataclass(frozen=True)
class OpDevice:
    """What an op asks of backends/gpu/device.py's Device; each test brings its own buffers.

    open_device makes one of the card, test_emulated_ops.py one of the processor.
    """

    dtype: DtypeName
    head_dim: int
    kernels: Any
    blas: Any
    stream: Any
    place: Callable[[Array], Any]  # a host array on the device
    buffers: SimpleNamespace = field(default_factory=SimpleNamespace)

    def launch(self, name: str, grid: tuple[int, ...], block: int, args: tuple[Any, ...], *, shared: int = 0) -> None:
        """args: as Kernels.launch has them, or Outputs."""
        self.kernels.launch(name, grid, block, tuple(map(_array, args)), stream=self.stream, shared=shared)

    def with_buffers(self, **buffers: Any) -> OpDevice:
        """Arrays or Outputs, by the names of Buffers."""
        return replace(self, buffers=SimpleNamespace(**{name: _array(buffer) for name, buffer in buffers.items()}))

    def upload(self, values: npt.ArrayLike, dtype: DtypeName | None = None) -> Any:
        """A device array: rounded to the dtype, else with the dtype that the values have."""
        host = np.asarray(values)
        return self.place(np.array(host) if dtype is None else host.astype(NUMPY_DTYPE[dtype]))

    def poisoned(
        self, shape: tuple[int, ...], dtype: npt.DTypeLike | None = None, first: Array | None = None
    ) -> Output:
        """dtype: NumPy's; None is that of elements. first: what its first rows hold, in place of poison."""
        dtype = NUMPY_DTYPE[self.dtype] if dtype is None else np.dtype(dtype)
        nbytes = math.prod(shape) * dtype.itemsize
        host = np.full(nbytes + 2 * GUARD, POISON, np.uint8)
        if first is not None:
            start = first.astype(dtype).reshape(-1).view(np.uint8)
            host[GUARD : GUARD + len(start)] = start
        whole = self.place(host)
        return Output(whole[GUARD : GUARD + nbytes].view(dtype).reshape(shape), whole)


def _array(value: Any) -> Any:
    return value.array if isinstance(value, Output) else value


@functools.cache
def open_device(dtype: DtypeName, head_dim: int = 64, kv_dtype: KVDtypeName = "auto") -> OpDevice:
    """Kernels compiled once for a run of the tests, and kept on disk as a backend keeps them."""
    import cupy

    from tinyvllm_cli.backends.gpu.kernels import load_kernels
    from tinyvllm_cli.model.storage import cache_dir

    card = cupy.cuda.Device()
    major, minor = int(card.compute_capability[:-1]), int(card.compute_capability[-1])
    shared_limit = cupy.cuda.runtime.getDeviceProperties(card.id)["sharedMemPerBlockOptin"]
    return OpDevice(
        dtype=dtype,
        head_dim=head_dim,
        kernels=load_kernels((major, minor), dtype, head_dim, kv_dtype, cache_dir(), shared_limit=shared_limit),
        blas=_blas(),
        stream=_stream(),
        place=to_gpu,
    )


@functools.cache
def _stream() -> Any:
    import cupy

    return cupy.cuda.Stream(non_blocking=True)


@functools.cache
def _blas() -> Any:
    from tinyvllm_cli.backends.gpu.cublas import Blas

    return Blas.create(_stream(), to_gpu(np.zeros(32 << 20, np.uint8)))


# ---------------------------------------------------------------- comparing


@dataclass(frozen=True)
class Record:
    """One comparison, at the number that is worst beside its tolerance."""

    op: str
    dtype: DtypeName
    count: int  # of numbers
    error: float
    tolerance: float
    share: float  # error over tolerance


RECORDS: list[Record] = []


def assert_close(
    op: str,
    actual: Array,
    expected: Array,
    *,
    dtype: DtypeName,
    terms: float = 0,
    scale: npt.ArrayLike | None = None,
    slack: npt.ArrayLike = 0,
) -> None:
    """|actual - expected| <= u(dtype) |expected| + terms u(float32) scale + slack, up to the least number of the dtype.

    dtype: what the result was rounded to. terms: of the longest float32 sum on its way, scale: of that sum the sum of
    its terms' magnitudes, |expected| unless given (the forward error of a sum: Higham, "Accuracy and Stability of
    Numerical Algorithms", section 3.1). slack: what else may be off, as roundings of intermediate results.
    NaN equals NaN, and an infinity itself. Every comparison goes into the table of errors.
    """
    actual64, expected64 = actual.astype(np.float64), np.asarray(expected, np.float64)
    assert actual64.shape == expected64.shape, f"{op}: shape {actual64.shape}, wanted {expected64.shape}"
    if not actual64.size:
        return
    with np.errstate(invalid="ignore"):
        error, magnitude = np.abs(actual64 - expected64), np.abs(expected64)
        sums = terms * UNIT["float32"] * (magnitude if scale is None else np.asarray(scale, np.float64))
        tolerance = UNIT[dtype] * magnitude + sums + np.asarray(slack, np.float64) + SMALLEST[dtype]
    tolerance = np.where(np.isfinite(tolerance), tolerance, SMALLEST[dtype])
    error[(actual64 == expected64) | (np.isnan(actual64) & np.isnan(expected64))] = 0
    error[~np.isfinite(error)] = np.inf
    share = error / tolerance
    worst = np.unravel_index(int(share.argmax()), share.shape)
    RECORDS.append(Record(op, dtype, error.size, *(float(of[worst]) for of in (error, tolerance, share))))
    beyond = np.argwhere(share > 1)
    assert not len(beyond), (
        f"{op} {dtype} {actual.shape}: {len(beyond)} of {error.size} numbers are beyond their tolerance, "
        f"the first at {_index(beyond[0])}: {_both(actual64, expected64, beyond[0])}; the worst at "
        f"{_index(worst)}: {_both(actual64, expected64, worst)}, off by {error[worst]:.4g} "
        f"where {tolerance[worst]:.4g} is allowed"
    )


def assert_same_bits(op: str, actual: Array, expected: Array) -> None:
    """Bit for bit, NaN and the sign of zero included."""
    assert actual.shape == expected.shape and actual.dtype == expected.dtype, (
        f"{op}: {actual.dtype} {actual.shape}, wanted {expected.dtype} {expected.shape}"
    )
    unsigned = f"u{actual.dtype.itemsize}"
    bits, wanted = (np.ascontiguousarray(array).view(unsigned) for array in (actual, expected))
    differ = np.argwhere(bits != wanted)
    assert not len(differ), (
        f"{op} {actual.shape}: {len(differ)} of {bits.size} numbers have other bits, the first at {_index(differ[0])}: "
        f"{_both(actual, expected, differ[0])} ({_both(bits, wanted, differ[0])})"
    )


def error_table() -> list[str]:
    """Lines of the table: for each op and dtype, the comparison that came nearest to its tolerance. Empty if none."""
    if not RECORDS:
        return []
    lines = [f"{'error against float64':<28}{'dtype':<10}{'numbers':>12}{'worst':>12}{'allowed':>12}{'share':>8}"]
    for op, dtype in sorted({(record.op, record.dtype) for record in RECORDS}):
        records = [record for record in RECORDS if (record.op, record.dtype) == (op, dtype)]
        worst = max(records, key=lambda record: record.share)
        count = sum(record.count for record in records)
        lines.append(f"{op:<28}{dtype:<10}{count:>12,}{worst.error:>12.3g}{worst.tolerance:>12.3g}{worst.share:>8.2f}")
    return lines


def _both(actual: Array, expected: Array, index: Sequence[Any]) -> str:
    place = tuple(map(int, index))
    return f"found {actual[place]:.9g}, wanted {expected[place]:.9g}"


def _index(index: Sequence[Any]) -> str:
    return str([int(i) for i in index])
