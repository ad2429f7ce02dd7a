"""What a decode step costs the host, counted where CUDA would be called: one launch, one upload, two copies back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import emulated_gpu
import pytest
from emulated_cuda import Runtime
from gpu_subject import TINY, gpu_backend
from seam import GREEDY, Part, batch, prompt
from tiny import make_tiny_model

from tinyvllm_cli.backends.gpu.backend import GpuBackend
from tinyvllm_cli.model.checkpoint import open_checkpoint

pytestmark = pytest.mark.emulated

SLOTS = 64
CONTEXT = 40


@pytest.fixture
def backend(cuda: Runtime, tmp_path: Path) -> Iterator[GpuBackend]:
    """Decoding in every slot, its shape captured."""
    checkpoint = open_checkpoint(make_tiny_model(tmp_path, **TINY | {"num_hidden_layers": 1}))
    made = gpu_backend(checkpoint, slots=SLOTS, max_batch_tokens=256, num_blocks=1 + 3 * SLOTS, max_in_flight=1)
    for slot in range(SLOTS):
        made.bind(slot, prompt(CONTEXT), GREEDY)
    for computed in (0, 1, 2):
        made.step(decode_step(computed)).result()
    yield made
    made.close()


def decode_step(computed: int) -> Any:
    """The next known token of every slot."""
    return batch(*(Part(slot, range(1 + 3 * slot, 4 + 3 * slot), computed, [-1]) for slot in range(SLOTS)))


def test_a_decode_step_is_one_launch_one_upload_and_two_copies_back(
    backend: GpuBackend, cuda: Runtime, monkeypatch: pytest.MonkeyPatch
):
    calls: Counter[str] = Counter()
    uploaded = []

    def counted(name: str, holder: Any) -> None:
        real = getattr(holder, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            if name == "memcpyAsync" and args[3] == cuda.memcpyHostToDevice:
                uploaded.append(args[2])
            return real(*args, **kwargs)

        monkeypatch.setattr(holder, name, call)

    for name in ("memcpyAsync", "memcpy2DAsync", "malloc", "hostAlloc", "streamSynchronize", "deviceSynchronize"):
        counted(name, cuda)
    counted("launch", emulated_gpu.Graph)
    counted("launch", emulated_gpu.Kernels)
    pending = backend.step(decode_step(3))
    assert calls == {"launch": 1, "memcpyAsync": 3}
    # Of each row 9 numbers, 10 words of options, one block of its table and an item of attention, which has 3 numbers.
    assert uploaded == [pytest.approx(4 * SLOTS * (9 + 10 + 1 + 3), abs=64)]
    pending.result()
    assert calls == {"launch": 1, "memcpyAsync": 3}


def test_a_step_with_a_prompt_allocates_and_waits_for_nothing_either(
    backend: GpuBackend, cuda: Runtime, monkeypatch: pytest.MonkeyPatch
):
    for name in ("malloc", "hostAlloc", "streamSynchronize", "deviceSynchronize", "memcpy"):
        monkeypatch.setattr(cuda, name, lambda *args, name=name: pytest.fail(f"{name} in a step"))
    parts = [Part(slot, range(1 + 3 * slot, 4 + 3 * slot), 3, [-1]) for slot in range(8)]
    backend.step(batch(Part(9, range(28, 31), 0, prompt(30)), *parts)).result()
    monkeypatch.undo()
