"""Products against column-major libraries made for a test, without a card: the transpose identity and the plans."""

from __future__ import annotations

import ctypes
from collections import Counter
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinyvllm_cli.backends.gpu import medium
from tinyvllm_cli.backends.gpu.algorithms import CODE_CLUSTERS, CODE_TILES
from tinyvllm_cli.backends.gpu.cublas import FAST_ACCUMULATION, Blas, padded_rows
from tinyvllm_cli.backends.gpu.cublas_api import Heuristic
from tinyvllm_cli.errors import DeviceError

Array = npt.NDArray[Any]
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
NUMPY_TYPES = {14: np.dtype(ml_dtypes.bfloat16), 2: np.dtype(np.float16), 0: np.dtype(np.float32), 28: E4M3}
SPLITS = (4, 1, 2, 1)  # parts of K of the algorithms that the library offers, the fastest first


@dataclass
class HostArray:
    """Looks like a CuPy array and lies in host memory."""

    host: Array

    def __getattr__(self, name: str) -> Any:
        return getattr(self.host, name)

    @property
    def data(self) -> SimpleNamespace:
        return SimpleNamespace(ptr=self.host.ctypes.data)


def column_major(pointer: int, dtype: int, rows: int, columns: int, ld: int) -> Array:
    """The matrix that cuBLAS sees at an address, as a view."""
    kind = NUMPY_TYPES[dtype]
    memory = (ctypes.c_uint8 * (((columns - 1) * ld + rows) * kind.itemsize)).from_address(pointer)
    strides = (kind.itemsize, ld * kind.itemsize)
    return np.ndarray((rows, columns), kind, memory, strides=strides)


def multiply(a: Array, b: Array, out: Array, beta: int, scales: Array | int = 1) -> None:
    """out = a^T b * scales + beta out, with column-major matrices."""
    scale = ctypes.c_float.from_address(beta).value
    old = scale * out.astype(np.float64) if scale else 0  # beta = 0: what was there is not read
    out[...] = (a.astype(np.float64).T @ b.astype(np.float64) * scales + old).astype(out.dtype)


def floats(pointer: int, count: int) -> Array:
    return np.frombuffer((ctypes.c_float * count).from_address(pointer), np.float32)


class FakeLibraries:
    """libcublas and libcublasLt in one, by their documented semantics. Counts what is made and not destroyed."""

    def __init__(
        self, *, splits: tuple[int, ...] = SPLITS, failing: str = "", tiles: tuple[int, ...] = (), scales: bool = True
    ) -> None:
        """tiles: ids that an algorithm may be given. scales: whether it knows of one for each row."""
        self.splits, self.failing, self.tiles, self.scales = splits, failing, tiles, scales
        self.objects: dict[int, Any] = {}
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.calls.append(name)
            plain = tuple(a.value if isinstance(a, ctypes.c_void_p | ctypes.c_size_t) else a for a in arguments)
            return 13 if name == self.failing else (self._run(name, plain) or 0)

        return call

    def _run(self, name: str, arguments: tuple[Any, ...]) -> int | None:
        if "Create" in name:
            number = 1 + max(self.objects, default=0)
            self.objects[number] = {"arguments": arguments[1:]}
            arguments[0]._obj.value = number
        elif "Destroy" in name:
            del self.objects[arguments[0]]
        elif name == "cublasLtMatmulAlgoConfigSetAttribute":
            target, attribute, value, size = arguments
            Heuristic.from_address(target).algo[min(attribute, 7)] = value._obj.value
        elif name.endswith("SetAttribute"):
            target, attribute, value, size = arguments
            assert ctypes.sizeof(value._obj) == size
            if attribute in (31, 32) and not self.scales:
                return 7
            self.objects[target][attribute] = value._obj.value
        elif hasattr(type(self), f"_{name}"):
            return getattr(self, f"_{name}")(*arguments)
        return None

    def _cublasLtMatmulAlgoGetHeuristic(self, handle, desc, a, b, c, d, preference, wanted, results, count) -> int:
        assert self.objects[preference][1] == 64 and self.objects[preference][3] == 0  # workspace, no reductions
        described = self.objects[desc]
        if 31 in described and not described.get(17) and not described.get(18):  # scales, and nowhere to find them
            return 7
        count._obj.value = len(self.splits)
        for index, split in enumerate(self.splits):
            results[index].algo[0], results[index].state = split, 0
        return 0 if self.splits else 15

    def _cublasLtMatmulAlgoConfigGetAttribute(self, found, attribute, value, size, written) -> None:
        """Its number and its stages are those of the kind that may have other tiles."""
        value._obj.value = {0: 66, 2: found._obj.algo[0], 6: 36}.get(attribute, 0)

    def _cublasLtMatmulAlgoInit(self, handle, computed, scaled, a, b, c, d, number, algo) -> None:
        assert (computed, scaled, a, b, number) == (68, 0, 28, 28, 66) and c == d
        Heuristic.from_address(algo).algo[0] = 1  # parts of K

    def _cublasLtMatmulAlgoCheck(self, handle, desc, a, b, c, d, algo, result) -> int:
        configured = Heuristic.from_address(algo).algo
        return 0 if configured[1] in self.tiles and configured[6] == 36 and configured[7] in CODE_CLUSTERS else 15

    def _cublasLtMatmul(self, handle, desc, alpha, a, la, b, lb, beta, c, lc, d, ld, algo, workspace, size, stream):
        assert ctypes.c_float.from_address(alpha).value == 1 and (c, lc, size) == (d, ld, 64)
        assert ctypes.c_uint64.from_address(algo).value == 1  # parts of K
        described = dict(self.objects[desc])
        scales = described.pop(17, None), described.pop(18, None)
        in_codes = {31: 3, 32: 3, 25: FAST_ACCUMULATION} if scales[0] else {}
        assert described == {"arguments": (68, 0), 3: 1} | in_codes  # sums in float32; A transposed, B not
        seen = [
            column_major(pointer, *self.objects[layout]["arguments"]) for pointer, layout in ((a, la), (b, lb), (d, ld))
        ]
        of_products = 1
        if scales[0]:
            of_products = np.outer(*(floats(pointer, n) for pointer, n in zip(scales, seen[2].shape, strict=True)))
        multiply(*seen, beta, of_products)

    def _cublasGemmEx(self, handle, ta, tb, m, n, k, alpha, a, at, lda, b, bt, ldb, beta, c, ct, ldc, compute, algo):
        assert (ta, tb, compute) == (1, 0, 68) and ctypes.c_float.from_address(alpha).value == 1
        seen = (column_major(a, at, k, m, lda), column_major(b, bt, k, n, ldb), column_major(c, ct, m, n, ldc))
        multiply(*seen, beta)


class FakeKernels:
    """Keeps what is launched."""

    shared_limit = 227 << 10

    def __init__(self, arch: str = "sm_90a") -> None:
        self.arch = arch
        self.counts: Counter[str] = Counter()
        self.launched: list[tuple[str, int]] = []  # kernel, rows

    def launch(self, name: str, grid: Any, block: int, args: Any, **how: Any) -> None:
        self.launched.append((name, args[3]))


def make_blas(libraries: FakeLibraries, kernels: Any = None) -> Blas:
    return Blas(libraries, libraries, SimpleNamespace(ptr=1), HostArray(np.zeros(64, np.uint8)), kernels)


@pytest.mark.parametrize("split", [SPLITS, ()], ids=["cublasLt", "GemmEx"])
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("out_type", ["elem", "float32"])
@pytest.mark.parametrize("elem", [np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)], ids=str)
@pytest.mark.parametrize(("rows", "n", "k", "ld"), [(1, 5, 8, 5), (3, 33, 24, 64), (8, 16, 8, 16), (17, 7, 16, 8)])
def test_a_product_is_the_row_major_one(
    rows: int, n: int, k: int, ld: int, elem: np.dtype[Any], out_type: str, add: bool, split: tuple[int, ...]
):
    padded, rng = padded_rows(rows, add=add), np.random.default_rng(0)
    capacity = padded + 1
    a, weight = (rng.integers(-4, 5, shape).astype(elem) for shape in ((capacity, k), (n, k)))
    out = rng.integers(-4, 5, (capacity, ld)).astype(elem if out_type == "elem" else np.float32)
    expected, before = out.copy(), out.copy()
    expected[:rows, :n] = a[:rows].astype(int) @ weight.T.astype(int) + (out[:rows, :n].astype(int) if add else 0)
    blas = make_blas(FakeLibraries(splits=split))
    blas.product(HostArray(out), HostArray(a), HostArray(weight), rows, add=add)
    np.testing.assert_array_equal(out[:rows], expected[:rows])  # small integers: exact in every type
    np.testing.assert_array_equal(out[padded:], before[padded:])
    np.testing.assert_array_equal(out[:, n:], before[:, n:])
    assert blas.fallbacks == ([] if split else [(padded, n, k)])


def codes(rng: np.random.Generator, *shape: int) -> HostArray:
    """Of small integers."""
    return HostArray(rng.integers(-4, 5, shape).astype(E4M3).view(np.uint8))


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("rows", [1, 16, 17])
def test_a_product_of_codes_is_scaled_by_row_and_by_feature(rows: int, add: bool):
    """On a multiple of 16 rows; each layer has scales of its own."""
    n, k, padded, rng = 32, 48, 16 if rows <= 16 else 32, np.random.default_rng(0)
    libraries = FakeLibraries()
    blas = make_blas(libraries)
    for _layer in range(2):
        a, weight = codes(rng, padded, k), codes(rng, n, k)
        scales = [HostArray(2.0 ** rng.integers(-2, 3, size).astype(np.float32)) for size in (padded, n)]
        before = rng.integers(-4, 5, (padded + 1, n)).astype(np.float32)
        out = HostArray(before.copy())
        blas.product(out, a, weight, rows, add=add, scales=tuple(scales))
        whole = (array.host.view(E4M3).astype(np.float32) for array in (a, weight))
        values = [array * scale.host[:, None] for array, scale in zip(whole, scales, strict=True)]
        np.testing.assert_array_equal(out.host[:rows], (values[0] @ values[1].T + before[:padded] * add)[:rows])
        np.testing.assert_array_equal(out.host[padded:], before[padded:])
    assert libraries.calls.count("cublasLtMatmulAlgoGetHeuristic") == 1


def test_products_of_codes_may_have_other_tiles():
    """Those that the library takes; the first is its own choice."""
    rng, scales = np.random.default_rng(0), tuple(HostArray(np.ones(16, np.float32)) for _ in range(2))
    arrays = {"a": codes(rng, 16, 16), "weight": codes(rng, 16, 16), "out": HostArray(np.zeros((16, 16), np.float32))}
    blas = make_blas(FakeLibraries(splits=(1,), tiles=(CODE_TILES["64x64"], CODE_TILES["80x192"])))
    assert blas.num_algorithms(**arrays, rows=1) == 1 + 2 * len(CODE_CLUSTERS)
    blas.choose(3, **arrays, rows=1)
    blas.product(**arrays, rows=1, scales=scales)
    assert not blas.offers_own(**arrays, rows=1)


@pytest.mark.parametrize(("dtype", "add", "name"), [(np.float16, False, "1"), (np.float32, True, "add")])
def test_products_of_codes_run_by_our_own_kernel_once_it_is_chosen(
    dtype: Any, add: bool, name: str, monkeypatch: pytest.MonkeyPatch
):
    """Of few rows too, with both scales."""
    monkeypatch.setattr(medium, "tensor_map", lambda *arguments: arguments)
    rng, scales = np.random.default_rng(0), tuple(HostArray(np.ones(16, np.float32)) for _ in range(2))
    arrays = {"a": codes(rng, 16, 16), "weight": codes(rng, 16, 16), "out": HostArray(np.zeros((16, 16), dtype))}
    libraries, kernels = FakeLibraries(), FakeKernels()
    blas = make_blas(libraries, kernels)
    for rows in (1, 16):
        assert blas.offers_own(**arrays, rows=rows, add=add)
        blas.choose_own(True, **arrays, rows=rows, add=add)
        blas.product(**arrays, rows=rows, add=add, scales=scales)
    assert kernels.launched == [(f"medium_codes_{name}", 1), (f"medium_codes_{name}", 16)]
    assert "cublasLtMatmul" not in libraries.calls


@pytest.mark.parametrize("libraries", [FakeLibraries(splits=()), FakeLibraries(scales=False)], ids=["none", "old"])
def test_a_library_without_products_of_codes_is_told_with_what_mends_it(libraries: FakeLibraries):
    rng = np.random.default_rng(0)
    arrays = (HostArray(np.zeros((16, 16), np.float32)), codes(rng, 16, 16), codes(rng, 16, 16))
    with pytest.raises(DeviceError, match=r"^cuBLAS 0\.0\.0 .*: --dtype fp8 needs .* cuBLAS 12\.9 .* bfloat16$"):
        make_blas(libraries).product(*arrays, 1, scales=arrays[:2])


def operands(rows: int = 8, *, capacity: int = 16, n: int = 16, k: int = 8) -> tuple[Any, ...]:
    half = np.dtype(np.float16)
    return (*(HostArray(np.ones(shape, half)) for shape in ((capacity, n), (capacity, k), (n, k))), rows)


def test_a_shape_is_planned_once():
    libraries = FakeLibraries()
    blas = make_blas(libraries)
    for rows in (5, 6, 8, 7):  # all of them run on 8 rows
        blas.product(*operands(rows))
    assert libraries.calls.count("cublasLtMatmulAlgoGetHeuristic") == 1
    assert libraries.calls[-3:] == ["cublasLtMatmul"] * 3
    for other in (operands(9), operands(capacity=17), operands(n=24), operands(k=16)):
        blas.product(*other)
    blas.product(*operands(capacity=128), add=True)
    assert libraries.calls.count("cublasLtMatmulAlgoGetHeuristic") == 6


def out_of(dtype: Any, capacity: int = 128) -> HostArray:
    return HostArray(np.zeros((capacity, 16), dtype))


@pytest.mark.parametrize(
    ("name", "dtype", "add"),
    [("elem_low", np.float16, False), ("f32_low", np.float32, False), ("add_deep", np.float32, True)],
)
def test_few_rows_run_by_our_own_kernel_once_it_is_chosen(name: str, dtype: Any, add: bool):
    libraries, kernels = FakeLibraries(), FakeKernels()
    blas = make_blas(libraries, kernels)
    _, a, weight, _ = operands(capacity=128)
    product = {"out": out_of(dtype), "a": a, "weight": weight, "add": add}
    blas.product(**product, rows=3)
    blas.choose_own(True, **product, rows=4)
    for rows in (2, 3, 4, 5, 16):  # 3 and 4 are padded to 4
        assert blas.is_own(product["out"], a, weight, rows) == (rows in (3, 4) and not add)
        assert blas.offers_own(**product, rows=rows)
        blas.product(**product, rows=rows)
    assert kernels.launched == [(f"skinny_{name}", 3), (f"skinny_{name}", 4)]
    blas.choose_own(False, **product, rows=4)
    assert not blas.is_own(product["out"], a, weight, 4)
    blas.product(**product, rows=3)
    assert len(kernels.launched) == 2
    assert libraries.calls.count("cublasLtMatmul") == kernels.counts["cublasLt"] == 5


def test_our_own_kernel_is_offered_where_there_is_one_and_bits_that_it_must_have():
    _, a, weight, _ = operands(capacity=128)
    product = {"a": a, "weight": weight}
    blas = make_blas(FakeLibraries(), FakeKernels())
    assert blas.offers_own(out_of(np.float16), **product, rows=16)
    assert blas.offers_own(out_of(np.float16), **product, rows=17)
    assert not make_blas(FakeLibraries(), FakeKernels("sm_89")).offers_own(out_of(np.float16), **product, rows=17)
    assert not blas.offers_own(out_of(np.float16), **product, rows=16, add=True)
    assert not make_blas(FakeLibraries()).offers_own(out_of(np.float16), **product, rows=16)
    assert not make_blas(FakeLibraries(splits=()), FakeKernels()).offers_own(out_of(np.float16), **product, rows=16)


def test_the_workspace_is_given_after_the_stream():
    libraries = FakeLibraries()
    make_blas(libraries)
    assert libraries.calls.index("cublasSetStream_v2") < libraries.calls.index("cublasSetWorkspace_v2")


def test_no_rows_are_no_call():
    libraries = FakeLibraries()
    blas = make_blas(libraries)
    libraries.calls.clear()
    blas.product(*operands(0))
    blas.gemm_ex(*operands(0))
    assert libraries.calls == []


def test_everything_is_destroyed():
    libraries = FakeLibraries()
    blas = make_blas(libraries)
    blas.product(*operands())
    assert libraries.objects
    blas.close()
    blas.close()
    assert libraries.objects == {}


@pytest.mark.parametrize(
    "function", ["cublasLtCreate", "cublasSetStream_v2", "cublasSetWorkspace_v2", "cublasSetMathMode"]
)
def test_a_library_that_fails_at_the_start_leaves_nothing(function: str):
    libraries = FakeLibraries(failing=function)
    with pytest.raises(DeviceError, match=rf"^{function} failed with cuBLAS status 13 \(execution failed\)$"):
        make_blas(libraries)
    assert libraries.objects == {}


def test_a_product_that_fails_is_an_error():
    blas = make_blas(FakeLibraries(failing="cublasLtMatmul"))
    with pytest.raises(DeviceError, match="cublasLtMatmul failed"):
        blas.product(*operands())


@pytest.mark.parametrize(
    "wrong",
    [
        {"out": np.zeros((16, 15), np.float16)},  # fewer columns than rows of the weight
        {"out": np.zeros((7, 16), np.float16)},  # fewer rows than the product runs on
        {"a": np.zeros((7, 8), np.float16)},
        {"a": np.zeros((16, 16), np.float16)},  # another K
        {"a": np.zeros((16, 8), np.float32)},
        {"out": np.zeros((16, 16), ml_dtypes.bfloat16)},
        {"out": np.zeros((16, 16), np.int32)},
        {"weight": np.zeros((16, 16), np.float16)[:, ::2]},  # rows that are not dense
        {"a": np.zeros((16, 12), np.float16), "weight": np.zeros((16, 12), np.float16)},  # K is no multiple of 8
    ],
    ids=lambda wrong: ", ".join(f"{name} {array.dtype} {array.shape}" for name, array in wrong.items()),
)
@pytest.mark.parametrize("function", ["product", "gemm_ex"])
def test_arrays_that_do_not_fit_are_refused(wrong: dict[str, Array], function: str):
    out, a, weight, rows = operands()
    arrays = {"out": out, "a": a, "weight": weight} | {name: HostArray(array) for name, array in wrong.items()}
    libraries = FakeLibraries()
    with pytest.raises(ValueError, match="no product of 8 rows for out, a, weight = "):
        getattr(make_blas(libraries), function)(*arrays.values(), rows)
    assert not {"cublasLtMatmul", "cublasGemmEx"} & set(libraries.calls)


@given(st.integers(1, 20_000))
def test_padded_rows_hold_the_rows_and_little_more(rows: int):
    padded = padded_rows(rows)
    assert 0 <= padded - rows < (rows if rows <= 8 else 16 if rows <= 256 else 64 if rows <= 1024 else 256)
    assert padded_rows(padded) == padded


def test_rows_are_padded_to_few_numbers():
    assert [padded_rows(rows, add=True) for rows in (1, 127, 129)] == [128, 128, 144]
    assert [padded_rows(rows) for rows in (1, 2, 3, 5, 8, 9, 17, 256, 257, 1024, 1025)] == (
        [1, 2, 4, 8, 8, 16, 32, 256, 320, 1024, 1280]
    )
    assert len({padded_rows(rows) for rows in range(1, 8193)}) == 4 + 16 + 12 + 28
