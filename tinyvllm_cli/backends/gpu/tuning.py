"""What runs a product the fastest, an algorithm of cublasLt's or our own kernel: timed once on a card, and remembered.

For some shapes the library's own first choice is far behind its best (docs/performance.md). Only what gives a row the
bits that it has among the most rows is taken, so what is chosen, and whether it is remembered, changes no answer. All
are compared and timed on numbers of our own, before a model is loaded: one with zeros or NaN would tell nothing, and
other models of its shapes use what was remembered.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np

from tinyvllm_cli.backends.gpu import algorithms, cublas, medium, skinny
from tinyvllm_cli.backends.gpu.cublas import Blas, own_kernels, padded_rows
from tinyvllm_cli.backends.gpu.device import Device
from tinyvllm_cli.backends.gpu.plan import Scales
from tinyvllm_cli.errors import DeviceError
from tinyvllm_cli.model.parameters import Array, Parameters, Weight
from tinyvllm_cli.model.weights.source import Array as HostArray

MAX_ROWS = 256  # what decodes; products of more rows are within 4 % of their best as the library picks them
ROUNDS = 2  # over the weights of several layers, so that they come from memory, as in a step
MAX_WEIGHTS = 16
BLOCK_NUMBERS = 1 << 20  # random weights; larger matrices repeat them
NOISE = 2.0**-9  # what is left of a sum, as a share of its terms
CODES_DEVIATION = 32  # of e4m3, which goes to 448
# Of scales, in turns: sums of hundreds times the largest overflow, and come not back by the smallest, so that it shows
# in what order they are multiplied.
SCALE_EXPONENTS = (-116, 0, 120)
CHECKED_ROWS, CHECKED_COLUMNS = 16, 4096
BEFORE = 0x3F  # every byte of a result before a product: 0.75 as float32, so that it shows where a sum starts from it

Choice: TypeAlias = Callable[[], None]  # from now on a product runs this way
Enqueue: TypeAlias = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Product:
    """out (+)= a @ weight.T for each of the weights, which have one shape."""

    out: Array
    a: Array
    weights: Sequence[Array]
    add: bool
    scales: Sequence[Scales] = ()  # of each weight, where all are codes

    def padded(self, rows: int) -> int:
        """So many it runs on."""
        return padded_rows(rows, add=self.add, codes=bool(self.scales))

    def run(self, blas: Blas, rows: int, weight: int = 0) -> None:
        scales = self.scales[weight] if self.scales else None
        blas.product(**self.arguments(rows, weight), scales=scales)

    def arguments(self, rows: int, weight: int = 0) -> dict[str, Any]:
        """Of Blas.product."""
        return {"out": self.out, "a": self.a, "weight": self.weights[weight], "rows": rows, "add": self.add}

    def name(self, rows: int, among: str) -> str:
        """among: what the choice is from; a number means something else among others."""
        (n, k), sign = self.weights[0].shape, "+" if self.add else ""
        out = f"{sign}{self.out.dtype.name}[{self.out.shape[1]}]"
        return f"{rows} rows {n}x{k} {self.a.dtype.name}, {out} among {among}"


def is_tuned(device: Device, parameters: Parameters, max_rows: int, cache: Path | None) -> bool:
    """Whether recall() will find all that it needs."""
    return _all_name(_products(device, parameters), max_rows) in _read(_path(device, cache))


def recall(device: Device, parameters: Parameters, max_rows: int, cache: Path | None) -> None:
    """Choose what tune() has chosen for these, the first that there is where it is not remembered. Touches no memory of
    the device: weights may be on their way."""
    known = _read(_path(device, cache))
    for product in _products(device, parameters):
        for rows, among, choices in _choices(device.blas, product, min(max_rows, MAX_ROWS)):
            index = known.get(product.name(rows, among), 0)
            choices[index if index in range(len(choices)) else 0]()


def tune(device: Device, parameters: Parameters, max_rows: int, cache: Path | None) -> None:
    """Choose what runs the products of steps of up to max_rows rows. Overwrites the device's buffers and the
    parameters.

    cache: the user's folder; None, or one that cannot be written: they are timed at each start.
    """
    path = _path(device, cache)
    known = _read(path)
    before = dict(known)
    products = _products(device, parameters)
    known[_all_name(products, max_rows)] = 0
    for product in products:
        wanted = None
        decisions = list(_choices(device.blas, product, min(max_rows, MAX_ROWS)))
        for rows, among, choices in decisions:
            name = product.name(rows, among)
            if known.get(name, -1) not in range(len(choices)):
                if wanted is None:
                    _fill(device, product)
                    most, _, of_most = max(decisions, key=lambda decision: decision[0])
                    wanted = _first_result(device, product, most, of_most)
                norm = None if product.add else partial(_norm, device, parameters.final_norm, rows)
                known[name] = _fastest(device, product, rows, choices, wanted, norm)
            choices[known[name]]()
    if known != before:
        _write(path, known)


def _choices(blas: Blas, product: Product, max_rows: int) -> Iterator[tuple[int, str, Sequence[Choice]]]:
    """(rows, what the choice is from, each of that) in turn: first cublasLt's algorithms for every number of rows that
    it is asked for, then for few rows the one that was chosen, or our own kernel.
    """
    row_counts = range(1, max_rows + 1)
    for rows in sorted({product.padded(rows) for rows in row_counts}):
        if rows <= len(product.a):
            arguments = product.arguments(rows)
            choices = [partial(blas.choose, index, **arguments) for index in range(blas.num_algorithms(**arguments))]
            if choices:
                yield rows, f"{len(choices)} algorithms", choices
    for rows in sorted({padded_rows(rows) for rows in row_counts}):
        arguments = product.arguments(rows)
        if rows <= len(product.a) and blas.offers_own(**arguments):
            kernels = own_kernels(arguments["weight"], rows)
            own = f"{kernels.__name__.rpartition('.')[2]} {kernels.digest()}"
            yield (
                rows,
                f"cublasLt and {own}",
                [partial(blas.choose_own, chosen, **arguments) for chosen in (False, True)],
            )


def _all_name(products: Sequence[Product], max_rows: int) -> str:
    """What stands for all choices for these products, as this version of the code has them."""
    files = (algorithms.__file__, cublas.__file__, skinny.__file__, medium.__file__, __file__)
    code = b"".join(Path(file).read_bytes() for file in files)
    names = [product.name(max_rows, f"{skinny.digest()} {medium.digest()}") for product in products]
    return "all of " + hashlib.sha256(code + repr(names).encode()).hexdigest()[:16]


def _path(device: Device, cache: Path | None) -> Path | None:
    card = device.card  # a part of a card has its name
    name = re.sub(r"[^\w .-]", "_", f"{card.name} {card.multiprocessors} {device.blas.version}.json")
    return None if cache is None else cache / "algorithms" / name


def _products(device: Device, parameters: Parameters) -> list[Product]:
    """As ops.py asks for them: the same buffers, so the same plans."""
    buffers, layers = device.buffers, parameters.layers[:MAX_WEIGHTS]

    def product(out: Array, a: Array, weights: Sequence[Weight], *, add: bool) -> Product:
        scales = [(buffers.row_scales, weight.scale) for weight in weights if weight.scale is not None]
        return Product(out, a, [weight.data for weight in weights], add, scales)

    attended = buffers.attended if buffers.attended_codes is None else buffers.attended_codes
    return [
        product(buffers.qkv, buffers.normed, [layer.qkv for layer in layers], add=False),
        product(buffers.x, attended, [layer.o for layer in layers], add=True),
        product(buffers.gate_up, buffers.normed, [layer.gate_up for layer in layers], add=False),
        product(buffers.x, buffers.activated, [layer.down for layer in layers], add=True),
        product(buffers.logits, buffers.picked, [parameters.head], add=False),
    ]


def _fill(device: Device, product: Product) -> None:
    """Random numbers whose sums over the second half of K take back nearly all of those over the first, so that another
    order of adding shows: the bits in which it differs are few, and rounding to elem would hide most of them.
    """
    a, cuda, random = product.a, device.card.cuda, np.random.default_rng(0)
    half = a.shape[1] // 2
    num_weights = min(len(product.weights[0]), -(-BLOCK_NUMBERS // half))
    make = _codes if product.scales else _elements
    rows, block = make(random, min(len(a), MAX_ROWS), num_weights, half, a.dtype)
    source = product.weights[0].data.ptr
    for target, values in ((a.data.ptr, rows), (source, block)):
        cuda.memcpy(target, values.ctypes.data, values.nbytes, cuda.memcpyHostToDevice)
    for scale in {id(scale): scale for pair in product.scales for scale in pair}.values():
        factors = np.ldexp(1 + random.random(len(scale), np.float32), np.resize(SCALE_EXPONENTS, len(scale)))
        cuda.memcpy(scale.data.ptr, factors.ctypes.data, factors.nbytes, cuda.memcpyHostToDevice)
    for weight in product.weights:
        for start in range(0, weight.nbytes, block.nbytes):
            target, nbytes = weight.data.ptr + start, min(block.nbytes, weight.nbytes - start)
            if target != source:
                cuda.memcpy(target, source, nbytes, cuda.memcpyDeviceToDevice)
    cuda.deviceSynchronize()  # copies may be under way still, and our stream waits for no other


def _elements(
    random: np.random.Generator, num_rows: int, num_weights: int, half: int, dtype: np.dtype[Any]
) -> tuple[HostArray, HostArray]:
    rows = random.standard_normal((num_rows, half), np.float32).astype(dtype).astype(np.float32)
    weights = random.standard_normal((num_weights, half), np.float32)
    rows = np.hstack([rows, NOISE * random.standard_normal(rows.shape, np.float32) - rows])
    return rows.astype(dtype), np.hstack([weights, weights]).astype(dtype)


def _codes(
    random: np.random.Generator, num_rows: int, num_weights: int, half: int, dtype: np.dtype[Any]
) -> tuple[HostArray, HostArray]:
    """The same in FP8: what is left of a sum is the last bit of an eighth of the rows' codes."""
    numbers = random.standard_normal((num_rows + num_weights, half), np.float32) * np.float32(CODES_DEVIATION)
    rows, weights = np.split(numbers.astype(ml_dtypes.float8_e4m3fn).view(dtype), [num_rows])
    minus_rows = rows ^ 0x80 ^ (random.integers(0, 8, rows.shape, dtype) == 0)
    return np.hstack([rows, minus_rows]), np.hstack([weights, weights])


def _first_result(device: Device, product: Product, rows: int, choices: Sequence[Choice]) -> HostArray:
    """Of all rows, by the first choice that runs; of no row where none does."""
    for choose in choices:
        choose()
        with contextlib.suppress(DeviceError):  # no room for its code, say
            return _result(device, product, rows, 1)
    return np.empty((0, 0))


def _fastest(
    device: Device, product: Product, rows: int, choices: Sequence[Choice], wanted: HostArray, before: Enqueue | None
) -> int:
    """Of those that give each row the bits that it has in `wanted`, each time behind before(), if that is given; the
    first where none does."""
    best, shortest, step = 0, float("inf"), max(1, rows // CHECKED_ROWS)
    bits = wanted[step - 1 : rows : step].tobytes()
    for index, choose in enumerate(choices):
        choose()
        try:
            found = _result(device, product, rows, step)
        except DeviceError:
            continue
        if found.tobytes() == bits and (took := _time(device, product, rows, before)) < shortest:
            best, shortest = index, took
    return best


def _result(device: Device, product: Product, rows: int, step: int) -> HostArray:
    """Each step-th row of a product, and its last columns: those before have the same weights."""
    cuda, stream, out = device.card.cuda, device.stream, product.out
    pitch, columns = out.strides[0], product.weights[0].shape[0]
    cuda.memsetAsync(out.data.ptr, BEFORE, rows * pitch, stream.ptr)
    product.run(device.blas, rows)
    host = np.empty((rows // step, min(columns, CHECKED_COLUMNS)), out.dtype)
    first = (columns - host.shape[1]) * out.dtype.itemsize
    width, source, kind = host.strides[0], out.data.ptr + (step - 1) * pitch + first, cuda.memcpyDeviceToHost
    cuda.memcpy2DAsync(host.ctypes.data, width, source, step * pitch, width, len(host), kind, stream.ptr)
    stream.synchronize()
    return host


def _norm(device: Device, weight: Array, rows: int) -> None:
    """Enqueue the kernel that in a step stands before products that do not add, here with a result that nobody reads:
    then a kernel that starts ahead of the end of the one before shows what it gains by that."""
    x, unread = device.buffers.x, device.buffers.q
    count = min(rows, unread.size // x.shape[1])
    device.launch("rms_norm", (count,), 256, (unread, x, weight, None, count, x.shape[1], 1e-5))


def _time(device: Device, product: Product, rows: int, before: Enqueue | None) -> float:
    """Milliseconds of the quickest round. Captured, as steps are: else the host would be slower than the card."""
    cuda, stream = device.card.cuda, device.stream
    stream.begin_capture()
    try:
        for weight in range(len(product.weights)):
            if before is not None:
                before()
            product.run(device.blas, rows, weight)
    finally:
        graph = stream.end_capture()
    start, end = cuda.eventCreate(), cuda.eventCreate()
    times = []
    for _ in range(ROUNDS):
        cuda.eventRecord(start, stream.ptr)
        graph.launch(stream)
        cuda.eventRecord(end, stream.ptr)
        cuda.eventSynchronize(end)
        times.append(cuda.eventElapsedTime(start, end))
    cuda.eventDestroy(start)
    cuda.eventDestroy(end)
    graph.close()
    return float(min(times))


def _read(path: Path | None) -> dict[str, int]:
    """What was remembered; nothing where it cannot be read."""
    try:
        known = json.loads(path.read_text(encoding="utf-8")) if path else {}
    except (OSError, ValueError):
        return {}
    return {name: index for name, index in known.items() if isinstance(index, int)} if isinstance(known, dict) else {}


def _write(path: Path | None, known: dict[str, int]) -> None:
    """With what another process has kept meanwhile. Under another name first: none may see half a file. What cannot be
    kept is timed again.
    """
    if path is None:
        return
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(_read(path) | known, indent=0, sort_keys=True), encoding="utf-8")
        part.replace(path)
