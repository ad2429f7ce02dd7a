"""The choice of cublasLt's algorithms, over a library whose algorithms have a time and bits of their own."""

from __future__ import annotations

import ctypes
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tinyvllm_cli.backends.gpu import algorithms, cublas, medium, skinny
from tinyvllm_cli.backends.gpu.cublas import padded_rows
from tinyvllm_cli.backends.gpu.tuning import MAX_ROWS, is_tuned, recall, tune
from tinyvllm_cli.errors import DeviceError
from tinyvllm_cli.model.parameters import Weight

K = 64
SHAPES = {"qkv": (48, K), "o": (32, K), "gate_up": (64, K), "down": (32, K), "head": (80, K)}


class HostArray(np.ndarray):
    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.ctypes.data)


def host(shape: tuple[int, ...], dtype: Any = np.float16) -> HostArray:
    """Memory that holds anything: of codes, those of NaN."""
    return np.full(shape, 0x7F if dtype == np.uint8 else np.nan, dtype).view(HostArray)


def summed(a: Any, weight: Any, parts: int, start: Any = 0) -> Any:
    """start + a @ weight.T in float32, term by term: in order, or so many parts of K apart, as split K would. Of float8
    in an accumulator of float16, as a card's has less bits there too."""
    kind = np.float32 if a.dtype.itemsize > 1 else np.float16
    sums = [kind(start), *[kind(0)] * (parts - 1)]
    each = a.shape[1] // parts
    for k in range(each):
        for part in range(parts):
            column = part * each + k
            terms = np.outer(a[:, column].astype(np.float32), weight[:, column].astype(np.float32))
            sums[part] = sums[part] + (terms if kind == np.float32 else (terms / 64).astype(kind))
    return sum(sums)


def scaled(sums: Any, of_rows: Any, of_weight: Any, *, once: bool) -> Any:
    """Times the scales of both: the weight's first, or the two multiplied `once` for all."""
    rows, weight = of_rows.view(np.ndarray)[: len(sums), None], of_weight.view(np.ndarray)
    whole = 64 * sums.astype(np.float32)
    return whole * (rows * weight) if once else whole * weight * rows


class Library:
    """times[i]: milliseconds of algorithm i; other_bits: algorithms that sum otherwise; broken: those that fail.

    own: milliseconds of our own kernels, None where there is none; own_sums: "in order", "split",
    "on" from what it is to add to, which the others add at the end, or "once" as `scaled` has it.
    """

    version = "1.2.3"

    def __init__(
        self,
        times: list[float],
        other_bits: tuple[int, ...] = (),
        broken: tuple[int, ...] = (),
        own: float | None = None,
        own_sums: str = "in order",
    ) -> None:
        self.times, self.other_bits, self.broken = times, other_bits, broken
        self.own, self.own_sums = own, own_sums
        self.chosen: dict[tuple[Any, ...], int] = {}
        self.own_chosen: dict[tuple[Any, ...], bool] = {}
        self.products, self.clock, self.started = 0, 0.0, 0.0
        self.captured: list[float] | None = None  # milliseconds of what is being captured

    def num_algorithms(self, out: Any, a: Any, weight: Any, rows: int, *, add: bool) -> int:
        assert min(len(out), len(a)) >= rows == padded_rows(rows, add=add, codes=weight.dtype == np.uint8)
        return len(self.times)

    def choose(self, index: int, out: Any, a: Any, weight: Any, rows: int, *, add: bool) -> None:
        self.chosen[weight.shape, rows, add] = index

    def offers_own(self, out: Any, a: Any, weight: Any, rows: int, *, add: bool) -> bool:
        assert rows == padded_rows(rows)
        return self.own is not None and bool(self.times)

    def choose_own(self, chosen: bool, out: Any, a: Any, weight: Any, rows: int, *, add: bool) -> None:
        self.own_chosen[weight.shape, rows, add] = chosen

    def product(self, out: Any, a: Any, weight: Any, rows: int, *, add: bool, scales: Any) -> None:
        """Past its rows an algorithm of cublasLt's leaves anything."""
        padded, sums_on = padded_rows(rows, add=add, codes=scales is not None), False
        once = False
        if self.own_chosen.get((weight.shape, rows, add), False):
            took, splits, sums_on, padded = self.own, self.own_sums == "split", self.own_sums == "on", rows
            once = self.own_sums == "once"
        else:
            index = self.chosen[weight.shape, padded, add]
            if index in self.broken:
                raise DeviceError("no room")
            took, splits = self.times[index], index in self.other_bits
        self.products += 1
        if self.captured is not None:
            self.captured.append(took)
            return
        self.clock += 1  # launched one by one, the host decides
        if scales is not None:
            a, weight = (codes.view(np.ndarray).view(ml_dtypes.float8_e4m3fn) for codes in (a, weight))
        target, parts = out[:rows, : len(weight)], 2 if splits else 1
        before = np.array(target) if add else np.zeros_like(target)
        if sums_on:
            target[:] = summed(a[:rows], weight, parts, before)
        else:
            sums = summed(a[:rows], weight, parts)
            target[:] = before + (sums if scales is None else scaled(sums, *scales, once=once))
        out[rows:padded] = np.nan

    # what is used of a stream and of a graph
    ptr = 1

    def synchronize(self) -> None:
        """Everything is done at once."""

    def begin_capture(self) -> None:
        assert self.captured is None
        self.captured = []

    def end_capture(self) -> Any:
        took, self.captured = self.captured, None
        return SimpleNamespace(launch=lambda stream: self.pass_time(sum(took)), close=lambda: None)

    def launch(self, name: str, grid: tuple[int, ...], block: int, args: tuple[Any, ...]) -> None:
        """A kernel that stands before a product where that is timed, and takes no time."""
        assert self.captured is not None and name == "rms_norm" and grid[0] <= 272

    def pass_time(self, milliseconds: float) -> None:
        self.clock += milliseconds

    # what is used of cupy.cuda.runtime
    memcpyHostToDevice, memcpyDeviceToHost, memcpyDeviceToDevice = 1, 2, 3

    def memcpy(self, target: int, source: int, nbytes: int, kind: int) -> None:
        ctypes.memmove(target, source, nbytes)

    def memcpy2DAsync(
        self, target: int, pitch: int, source: int, source_pitch: int, width: int, rows: int, kind: int, stream: int
    ) -> None:
        assert width <= min(pitch, source_pitch)
        for row in range(rows):
            ctypes.memmove(target + row * pitch, source + row * source_pitch, width)

    def deviceSynchronize(self) -> None:
        """Everything is done at once."""

    def memsetAsync(self, target: int, value: int, nbytes: int, stream: int) -> None:
        ctypes.memset(target, value, nbytes)

    def eventCreate(self) -> int:
        return 0

    def eventRecord(self, event: int, stream: int) -> None:
        self.started, self.took = self.clock, self.clock - self.started

    def eventElapsedTime(self, start: int, end: int) -> float:
        return self.took

    def eventSynchronize(self, event: int) -> None:
        """Everything is done at once."""

    eventDestroy = eventSynchronize


def tuned(
    library: Library, cache: Path | None, max_rows: int = 20, card: str = "a card", *, codes: bool = False
) -> Library:
    tune(*subject(library, card, codes=codes), max_rows, cache)
    return library


def subject(library: Library, card: str = "a card", *, codes: bool = False) -> tuple[Any, Any]:
    """Device and parameters. codes: the layers' weights are in FP8."""
    operand = np.uint8 if codes else np.float16
    arrays = {name: host((272, K), operand) for name in ("normed", "activated")}
    arrays |= {name: host((272, K)) for name in ("attended", "picked")}
    arrays |= {"attended_codes": host((272, K), np.uint8) if codes else None, "row_scales": host((272,), np.float32)}
    outs = {"qkv": host((272, 48)), "gate_up": host((272, 64)), "x": host((272, 32), np.float32)}
    outs |= {"q": host((272, 2, 16))}
    logits = host((272, 128), np.float32)
    weights = {name: Weight(host(shape, operand)) for name, shape in SHAPES.items()}
    if codes:
        weights = {
            name: replace(weight, scale=host((len(weight.data),), np.float32)) for name, weight in weights.items()
        }
    layer = SimpleNamespace(**weights | {"head": Weight(host(SHAPES["head"]))})
    device = SimpleNamespace(
        blas=library,
        card=SimpleNamespace(name=card, multiprocessors=7, cuda=library),
        stream=library,
        buffers=SimpleNamespace(**arrays, **outs, logits=logits),
        launch=library.launch,
    )
    return device, SimpleNamespace(layers=[layer] * 3, head=layer.head, final_norm=None)


def test_the_quickest_with_the_bits_of_the_first_is_chosen():
    library = tuned(Library([5.0, 1.0, 3.0, 2.0], other_bits=(1,), broken=(3,)), None)
    assert set(library.chosen.values()) == {2}
    assert {rows for shape, rows, add in library.chosen if not add} == {1, 2, 4, 8, 16, 32}
    assert {rows for shape, rows, add in library.chosen if add} == {128}


@pytest.mark.parametrize(
    ("milliseconds", "sums", "plain", "adding"),
    [
        (0.5, "in order", True, True),
        (2.0, "in order", False, False),
        (0.5, "split", False, False),
        (0.5, "on", True, False),  # which only shows where there is something to add to
    ],
)
def test_our_own_kernel_runs_where_it_is_quicker_and_has_the_bits(
    milliseconds: float, sums: str, plain: bool, adding: bool
):
    library = tuned(Library([5.0, 1.0], own=milliseconds, own_sums=sums), None)
    assert library.own_chosen == {
        (shape, rows, add): adding if add else plain
        for name, shape in SHAPES.items()
        for rows in (1, 2, 4, 8, 16, 32)
        for add in [name in ("o", "down")]
    }
    assert set(library.chosen.values()) == {1}


def test_few_rows_have_the_bits_of_the_most():
    """On a card where the number of rows decides how a sum goes: what sums as the most rows do is taken."""

    class ByRows(Library):
        def product(self, out: Any, a: Any, weight: Any, rows: int, *, add: bool, scales: Any) -> None:
            self.other_bits = (0,) if padded_rows(rows, add=add) < 16 else ()
            super().product(out, a, weight, rows, add=add, scales=scales)

    library = tuned(ByRows([1.0, 5.0]), None)
    picked = {rows: index for (_, rows, add), index in library.chosen.items() if not add}
    assert picked == {1: 1, 2: 1, 4: 1, 8: 1, 16: 0, 32: 0}


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_products_of_codes_are_chosen_by_their_bits_too():
    library = tuned(Library([5.0, 1.0, 3.0, 2.0], other_bits=(1,), broken=(3,)), None, codes=True)
    layers = {rows: index for (shape, rows, _), index in library.chosen.items() if shape != SHAPES["head"]}
    assert layers == {16: 2, 32: 2}


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
@pytest.mark.parametrize(("sums", "chosen"), [("in order", True), ("once", False)])
def test_our_own_kernel_has_to_multiply_by_the_scales_in_the_same_order(sums: str, chosen: bool):
    library = tuned(Library([1.0], own=0.5, own_sums=sums), None, codes=True)
    of_layers = {of_own for (shape, *_), of_own in library.own_chosen.items() if shape != SHAPES["head"]}
    assert of_layers == {chosen}


@pytest.mark.parametrize(("module", "rows"), [(skinny, {1, 2, 4, 8, 16}), (medium, {32})])
def test_other_kernels_are_timed_again(module: Any, rows: set[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    first = tuned(Library([1.0], own=0.5), tmp_path)
    again = tuned(Library([1.0], own=2.0), tmp_path)
    assert again.products == 0 and again.own_chosen == first.own_chosen
    monkeypatch.setattr(module, "digest", lambda: "another")
    others = tuned(Library([1.0], own=2.0), tmp_path).own_chosen
    assert {of_rows for (_, of_rows, _), chosen in others.items() if not chosen} == rows


def test_only_what_decodes_is_timed():
    library = tuned(Library([2.0, 1.0]), None, max_rows=10_000)
    assert max(rows for shape, rows, add in library.chosen) == MAX_ROWS


def test_what_was_timed_is_remembered_for_card_and_library(tmp_path: Path):
    first = tuned(Library([5.0, 1.0]), tmp_path)
    again = tuned(Library([1.0, 5.0]), tmp_path)
    assert first.products > 0 == again.products
    assert again.chosen == first.chosen
    assert [path.name for path in (tmp_path / "algorithms").iterdir()] == ["a card 7 1.2.3.json"]


@pytest.mark.parametrize("module", [algorithms, cublas, skinny, medium])
def test_what_another_version_remembered_is_not_relied_on(module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its numbers may mean something else, and what it did not look for was not timed."""
    given = (*subject(tuned(Library([5.0, 1.0]), tmp_path)), 20, tmp_path)
    assert is_tuned(*given)
    other = tmp_path / "other.py"
    other.write_text("changed")
    monkeypatch.setattr(module, "__file__", str(other))
    assert not is_tuned(*given)


def test_what_is_remembered_is_chosen_without_touching_the_card(tmp_path: Path):
    first, again = tuned(Library([5.0, 1.0], own=0.5), tmp_path), Library([5.0, 1.0], own=0.5)
    device, parameters = subject(again)
    assert is_tuned(device, parameters, 20, tmp_path)
    device.stream = device.card.cuda = None
    recall(device, parameters, 20, tmp_path)
    assert (again.chosen, again.own_chosen) == (first.chosen, first.own_chosen)


def test_all_is_remembered_only_of_the_same_kernels_and_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    made = subject(Library([5.0, 1.0]))
    assert not is_tuned(*made, 20, tmp_path) and not is_tuned(*made, 20, None)
    tuned(Library([5.0, 1.0]), tmp_path)
    assert is_tuned(*made, 20, tmp_path)
    assert not is_tuned(*made, 21, tmp_path)
    monkeypatch.setattr(skinny, "digest", lambda: "another")
    assert not is_tuned(*made, 20, tmp_path)


def test_what_is_not_remembered_after_all_runs_by_the_first_choice(tmp_path: Path):
    tuned(Library([5.0, 4.0, 1.0]), tmp_path)
    library = Library([5.0, 1.0])
    recall(*subject(library), 20, tmp_path)
    assert set(library.chosen.values()) == {0}


@pytest.mark.parametrize("content", ["", "[1]", '{"4 rows": "x"}', "\0", json.dumps({"x": 10**30})])
def test_a_damaged_memory_is_made_again(content: str, tmp_path: Path):
    path = tmp_path / "algorithms" / "a card 7 1.2.3.json"
    path.parent.mkdir()
    path.write_text(content)
    assert set(tuned(Library([5.0, 1.0]), tmp_path).chosen.values()) == {1}
    assert set(json.loads(path.read_text()).values()) >= {1}


def test_a_number_that_no_algorithm_has_is_timed_again(tmp_path: Path):
    tuned(Library([5.0, 4.0, 3.0, 1.0]), tmp_path)
    assert set(tuned(Library([5.0, 1.0]), tmp_path).chosen.values()) == {1}


def test_what_another_process_has_kept_meanwhile_stays(tmp_path: Path):
    class Other(Library):
        """Another model's choices come into the file while this one's are timed."""

        def eventCreate(self) -> int:
            path = tmp_path / "algorithms" / "a card 7 1.2.3.json"
            path.parent.mkdir(exist_ok=True)
            path.write_text('{"another product": 3}')
            return 0

    tuned(Other([5.0, 1.0]), tmp_path)
    (path,) = (tmp_path / "algorithms").iterdir()
    kept = json.loads(path.read_text())
    assert kept["another product"] == 3 and len(kept) > 1


def test_a_card_of_any_name_has_its_file_in_the_folder(tmp_path: Path):
    first = tuned(Library([5.0, 1.0]), tmp_path, card="/../A/B\0")
    again = tuned(Library([1.0, 5.0]), tmp_path, card="/../A/B\0")
    assert first.products > 0 == again.products
    assert [path.is_file() for path in (tmp_path / "algorithms").iterdir()] == [True]


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path):
    (tmp_path / "algorithms").write_text("a file")
    assert set(tuned(Library([5.0, 1.0]), tmp_path).chosen.values()) == {1}


def test_a_product_without_algorithms_is_left_alone():
    library = tuned(Library([], own=1.0), None)
    assert library.chosen == library.own_chosen == {}
