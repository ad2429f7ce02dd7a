"""Which of cublasLt's algorithms is the fastest for a product: timed once on a card, and remembered on disk.

For some shapes the library's own first choice is far behind its best (docs/performance.md). Only algorithms that give
the first one's bits are taken, so what is chosen, and whether it is remembered, changes no answer. They are compared
and timed on numbers of our own, before a model is loaded: one with zeros or NaN would tell nothing, and others of its
shapes use what was remembered.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tinyvllm_cli.backends.gpu.cublas import padded_rows
from tinyvllm_cli.backends.gpu.device import Device
from tinyvllm_cli.errors import DeviceError
from tinyvllm_cli.model.parameters import Array, Parameters

MAX_ROWS = 256  # what decodes; products of more rows are within 4 % of their best as the library picks them
ROUNDS = 2  # over the weights of several layers, so that they come from memory, as in a step
MAX_WEIGHTS = 8
BLOCK_NUMBERS = 1 << 20  # random weights; larger matrices repeat them
NOISE = 2.0**-9  # what is left of a sum, as a share of its terms
CHECKED_ROWS = 16


@dataclass(frozen=True, slots=True)
class Product:
    """out (+)= a @ weight.T for each of the weights, which have one shape."""

    out: Array
    a: Array
    weights: Sequence[Array]
    add: bool

    def name(self, rows: int, number: int) -> str:
        """number: of algorithms; other lists count them otherwise."""
        (n, k), sign = self.weights[0].shape, "+" if self.add else ""
        return f"{rows} rows {n}x{k} {self.a.dtype.name}, {sign}{self.out.dtype.name}[{self.out.shape[1]}] of {number}"


def tune(device: Device, parameters: Parameters, max_rows: int, cache: Path | None) -> None:
    """Choose the algorithms of all products of steps of up to max_rows rows. Overwrites the device's buffers and the
    parameters.

    cache: the user's folder; None, or one that cannot be written: they are timed at each start.
    """
    path = None if cache is None else cache / "algorithms" / _file_name(device)
    known = _read(path)
    before = dict(known)
    for product in _products(device, parameters):
        filled = False
        counts = {padded_rows(rows, add=product.add) for rows in range(1, min(max_rows, MAX_ROWS) + 1)}
        for rows in sorted(count for count in counts if count <= len(product.a)):
            number = device.blas.num_algorithms(product.out, product.a, product.weights[0], rows, add=product.add)
            if number == 0:
                continue
            name = product.name(rows, number)
            if known.get(name, -1) not in range(number):
                if not filled:
                    _fill(device, product)
                    filled = True
                known[name] = _fastest(device, product, rows, number)
            _choose(device, product, rows, known[name])
    if known != before:
        _write(path, known)


def _file_name(device: Device) -> str:
    return re.sub(r"[^\w .-]", "_", f"{device.card.name} {device.blas.version}.json")


def _products(device: Device, parameters: Parameters) -> list[Product]:
    """As ops.py asks for them: the same buffers, so the same plans."""
    buffers, layers = device.buffers, parameters.layers[:MAX_WEIGHTS]
    return [
        Product(buffers.qkv, buffers.normed, [layer.qkv.data for layer in layers], add=False),
        Product(buffers.x, buffers.attended, [layer.o.data for layer in layers], add=True),
        Product(buffers.gate_up, buffers.normed, [layer.gate_up.data for layer in layers], add=False),
        Product(buffers.x, buffers.activated, [layer.down.data for layer in layers], add=True),
        Product(buffers.logits, buffers.picked, [parameters.head.data], add=False),
    ]


def _fill(device: Device, product: Product) -> None:
    """Random numbers whose sums over the second half of K take back nearly all of those over the first, so that another
    order of adding shows: the bits in which it differs are few, and rounding to elem would hide most of them.
    """
    a, cuda, random = product.a, device.card.cuda, np.random.default_rng(0)
    half = a.shape[1] // 2
    rows = random.standard_normal((min(len(a), MAX_ROWS), half), np.float32).astype(a.dtype).astype(np.float32)
    rows = np.hstack([rows, NOISE * random.standard_normal(rows.shape, np.float32) - rows]).astype(a.dtype)
    cuda.memcpy(a.data.ptr, rows.ctypes.data, rows.nbytes, cuda.memcpyHostToDevice)
    weights = random.standard_normal((min(len(product.weights[0]), -(-BLOCK_NUMBERS // half)), half), np.float32)
    block = np.hstack([weights, weights]).astype(a.dtype)
    source = product.weights[0].data.ptr
    cuda.memcpy(source, block.ctypes.data, block.nbytes, cuda.memcpyHostToDevice)
    for weight in product.weights:
        for start in range(0, weight.nbytes, block.nbytes):
            target, nbytes = weight.data.ptr + start, min(block.nbytes, weight.nbytes - start)
            if target != source:
                cuda.memcpy(target, source, nbytes, cuda.memcpyDeviceToDevice)
    cuda.deviceSynchronize()  # copies may be under way still, and our stream waits for no other


def _choose(device: Device, product: Product, rows: int, index: int) -> None:
    device.blas.choose(index, product.out, product.a, product.weights[0], rows, add=product.add)


def _fastest(device: Device, product: Product, rows: int, number: int) -> int:
    """Of the algorithms that give the bits of the first."""
    wanted, best, shortest = None, 0, float("inf")
    for index in range(number):
        _choose(device, product, rows, index)
        try:
            bits = _bits(device, product, rows)
        except DeviceError:  # no room for its code, say
            continue
        wanted = bits if wanted is None else wanted
        if bits == wanted and (took := _time(device, product, rows)) < shortest:
            best, shortest = index, took
    return best


def _bits(device: Device, product: Product, rows: int) -> bytes:
    """Of rows all over the product, the last among them."""
    cuda, stream, out = device.card.cuda, device.stream, product.out
    pitch, step = out.strides[0], max(1, rows // CHECKED_ROWS)
    cuda.memsetAsync(out.data.ptr, 0, rows * pitch, stream.ptr)
    device.blas.product(out, product.a, product.weights[0], rows, add=product.add)
    host = np.empty((rows // step, product.weights[0].shape[0]), out.dtype)
    width, source, kind = host.strides[0], out.data.ptr + (step - 1) * pitch, cuda.memcpyDeviceToHost
    cuda.memcpy2DAsync(host.ctypes.data, width, source, step * pitch, width, len(host), kind, stream.ptr)
    stream.synchronize()
    return host.tobytes()


def _time(device: Device, product: Product, rows: int) -> float:
    """Milliseconds of the quickest round."""
    cuda, stream = device.card.cuda, device.stream.ptr
    start, end = cuda.eventCreate(), cuda.eventCreate()
    times = []
    for _ in range(ROUNDS):
        cuda.eventRecord(start, stream)
        for weight in product.weights:
            device.blas.product(product.out, product.a, weight, rows, add=product.add)
        cuda.eventRecord(end, stream)
        cuda.eventSynchronize(end)
        times.append(cuda.eventElapsedTime(start, end))
    cuda.eventDestroy(start)
    cuda.eventDestroy(end)
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
