"""Kernels that start before the one before them ends: the same bits whenever each of them comes to its work.

The same steps run three times: plain; with kernels whose warps stand still here and there (-DJITTER of
cuda/common.cuh), so that a dependency which nobody waits for is missed; and behind a kernel that keeps the card busy
for a while before each step, so that the host is far ahead of it and memory that is used again too soon shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu_subject import gpu_backend
from seam import Part, batch, prompt
from tiny import make_tiny_model

from tinyvllm_cli.backends.gpu import backend as backend_module
from tinyvllm_cli.backends.gpu import tuning
from tinyvllm_cli.backends.gpu.backend import GpuBackend
from tinyvllm_cli.backends.gpu.device import Device
from tinyvllm_cli.model.checkpoint import Checkpoint, open_checkpoint
from tinyvllm_cli.types import Batch, SlotOptions

pytestmark = pytest.mark.gpu

SHAPE = {
    "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8,
    "max_position_embeddings": 640,
}  # fmt: skip
SLOTS, EACH = 48, 25  # blocks of a slot
LENGTHS = [3 + slot * 7 % 90 for slot in range(SLOTS - 1)] + [330]  # the last with several partials in attention
SPIN = """
extern "C" __global__ void spin(long long cycles) {
    const long long start = clock64();
    while (clock64() - start < cycles) {
    }
}
"""
CYCLES = 300_000  # a fifth of a millisecond


@pytest.fixture(scope="module", params=[64, 128, 256])  # each has its own way through attention
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(make_tiny_model(tmp_path_factory.mktemp("model"), **SHAPE, head_dim=request.param))


@pytest.fixture(autouse=True)
def _own_kernels_multiply(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is the fastest on this card: they start early, the library's do not."""

    def choose(device: Device, parameters: Any, max_rows: int, cache: Path | None) -> None:
        for product in tuning._products(device, parameters):
            for _, among, choices in tuning._choices(device.blas, product, max_rows):
                choices[-1 if "skinny" in among else 0]()

    monkeypatch.setattr(backend_module, "is_tuned", lambda *arguments: False)
    monkeypatch.setattr(backend_module, "tune", choose)


def part(slot: int, tokens: list[int], computed: int = -1, *, draws: bool = True) -> Part:
    return Part(slot, range(1 + EACH * slot, 1 + EACH * (slot + 1)), computed, tokens, None if draws else ())


def steps() -> Iterator[Batch]:
    """Prompts, whole and in chunks, alone and beside rows that decode; then many rows that decode, then few."""
    for first in range(0, SLOTS, 16):
        decoding = [part(slot, [-1]) for slot in range(first)]
        whole = range(first, min(first + 16, SLOTS - 1))
        yield batch(*decoding, *(part(slot, [-1] * LENGTHS[slot], 0) for slot in whole))
    last, half = SLOTS - 1, LENGTHS[-1] // 2
    yield batch(part(0, [-1]), part(last, [-1] * half, 0, draws=False))
    yield batch(part(1, [-1]), part(last, [-1] * half))
    for count in (SLOTS, SLOTS, 17, 3, 1):
        for _ in range(5):  # enqueued, captured, replayed
            yield batch(*(part(slot, [-1]) for slot in range(last, last - count, -1)))


def drive(backend: GpuBackend, before_step: Callable[[], object]) -> list[bytes]:
    """Tokens, and logprobs to the bit, of all steps, two of them in flight; then logits of few rows and of many."""
    for slot, length in enumerate(LENGTHS):
        options = SlotOptions(temperature=[0.0, 0.9][slot % 2], top_k=slot % 3 * 20, seed=slot, logprobs=True)
        backend.bind(slot, prompt(length, seed=slot), options)
    waiting, read = [], []
    for step in steps():
        if len(waiting) == 2:
            read.append(waiting.pop(0).result())
        before_step()
        waiting.append(backend.step(step))
    read += [each.result() for each in waiting]
    assert all((output.token_ids >= 0).all() for output in read)
    found = [bits for output in read for bits in (output.token_ids.tobytes(), output.logprobs.tobytes())]
    for count in (2, SLOTS):
        before_step()
        found.append(backend.logits(batch(*(part(slot, [-1]) for slot in range(count)))).tobytes())
    return found


def made(checkpoint: Checkpoint) -> GpuBackend:
    return gpu_backend(checkpoint, slots=SLOTS, num_blocks=1 + EACH * SLOTS, max_batch_tokens=2048, max_in_flight=2)


def spinning(backend: GpuBackend) -> Callable[[], object]:
    import cupy

    kernel = cupy.RawKernel(SPIN, "spin")

    def spin() -> None:
        with cupy.cuda.ExternalStream(backend._device.stream.ptr):
            kernel((1,), (1,), (np.int64(CYCLES),))

    return spin


def test_bits_do_not_depend_on_when_kernels_run(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch):
    plain = made(checkpoint)
    wanted = drive(plain, lambda: None)
    counts = plain.counts()
    assert counts["graphs"] >= 12 and any(name.startswith("skinny") for name in counts), counts
    assert drive(plain, lambda: None) == wanted, "the same steps twice"
    assert_same(drive(plain, spinning(plain)), wanted, "behind a kernel that spins")
    plain.close()

    monkeypatch.setattr(backend_module, "load_kernels", partial(backend_module.load_kernels, jitter=True))
    jittering = made(checkpoint)
    for _ in range(3):  # each time other warps wait
        assert_same(drive(jittering, lambda: None), wanted, "with warps that stand still")
    assert_same(drive(jittering, spinning(jittering)), wanted, "with both")
    jittering.close()


def assert_same(found: list[bytes], wanted: list[bytes], how: str) -> None:
    """Names the first step that differs, and how many of its words."""
    for index, (a, b) in enumerate(zip(found, wanted, strict=True)):
        if a != b:
            differing = int((np.frombuffer(a, np.uint32) != np.frombuffer(b, np.uint32)).sum())
            what = "logits" if index >= len(wanted) - 2 else ("tokens", "logprobs")[index % 2]
            pytest.fail(f"{how}: {differing} of {len(a) // 4} {what} of step {index // 2} have other bits")
