"""Memory on a card: what is planned is what is taken, nothing more comes in a run, and all of it is back at the end."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from gpu_subject import TINY, child_environment, gpu_backend, load_kernels_once
from seam import GREEDY, Part, Run, batch, prompt
from tiny import make_tiny_model

from tinyvllm_cli.backends.gpu.backend import GpuBackend
from tinyvllm_cli.backends.gpu.memory import RESERVE, open_arena, plan_memory
from tinyvllm_cli.config import EngineConfig
from tinyvllm_cli.errors import ModelError
from tinyvllm_cli.model.checkpoint import Checkpoint, open_checkpoint
from tinyvllm_cli.types import SlotOptions

pytestmark = pytest.mark.gpu

MIB = 1 << 20
GRANULARITY = 2 * MIB  # of cudaMalloc
# Beside what is planned, a backend has the handles of the matrix library, and the kernels of it that were used.
LIBRARY = 160 * MIB
TESTS = Path(__file__).parent


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(make_tiny_model(tmp_path_factory.mktemp("tiny"), **TINY))


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> Iterator[None]:
    with load_kernels_once():
        yield


def free_bytes() -> int:
    import cupy

    cupy.cuda.runtime.deviceSynchronize()
    return int(cupy.cuda.runtime.memGetInfo()[0])


def mixed_steps(backend: GpuBackend) -> None:
    """Prefill, chunks, decode, copies, draws of every kind, logits."""
    run = Run(prompt(60), options=SlotOptions(temperature=0.8, top_k=5, top_p=0.9, logit_bias=((9, 1.0),)))
    run.prefill(backend, chunk=25)
    run.decode(backend, 4)
    for slot in range(4):
        backend.bind(slot, prompt(9, seed=slot), GREEDY)
    backend.step(batch(*(Part(slot, (10 + slot,), -1, [-1] * 9) for slot in range(4)))).result()
    backend.copy_blocks([(10, 11), (11, 12)])
    backend.logits(batch(Part(0, (20, 21), 0, prompt(30))))


@pytest.mark.parametrize("num_blocks", [5, 40_000, 400_000])
def test_the_arena_takes_what_is_planned(num_blocks: int, checkpoint: Checkpoint):
    from tinyvllm_cli.backends.gpu.device import open_card

    engine = EngineConfig(slots=4, max_batch_tokens=64, dtype="bfloat16")
    plan = plan_memory(checkpoint.config, engine, wanted=640, num_blocks=num_blocks)
    card, before = open_card(), free_bytes()
    if plan.total > before - RESERVE:
        pytest.skip("the card is too small for this pool")  # the laws above it hold for the smaller ones
    _, address = open_arena(card, plan)
    taken = before - free_bytes()
    card.cuda.free(address)
    assert plan.total <= taken <= plan.total + GRANULARITY, f"planned {plan.total}, taken {taken}"
    assert free_bytes() == before


def test_a_backend_takes_what_is_planned_and_gives_it_back(checkpoint: Checkpoint):
    warm = gpu_backend(checkpoint)
    mixed_steps(warm)
    warm.close()
    before = free_bytes()
    backend = gpu_backend(checkpoint, num_blocks=None, gpu_memory=2 << 30)
    planned, taken = int(backend.facts.details["total_bytes"]), before - free_bytes()
    mixed_steps(backend)
    run = before - free_bytes()
    backend.close()
    left = before - free_bytes()
    print(
        f"\nplanned {planned / MIB:.1f} MiB, taken {taken / MIB:.1f}, after steps {run / MIB:.1f}, "
        f"left {left / MIB:.1f}"
    )
    assert planned <= taken <= run <= planned + GRANULARITY + LIBRARY, (planned, taken, run)
    assert left <= LIBRARY, left


def test_nothing_is_allocated_in_a_run(checkpoint: Checkpoint):
    """The second time: cuBLAS loads a kernel when it is first used."""
    import cupy

    backend = gpu_backend(checkpoint)
    mixed_steps(backend)
    pools = cupy.get_default_memory_pool(), cupy.get_default_pinned_memory_pool()
    before = free_bytes(), pools[0].total_bytes(), pools[1].n_free_blocks()
    for _ in range(20):
        mixed_steps(backend)
    assert (free_bytes(), pools[0].total_bytes(), pools[1].n_free_blocks()) == before
    backend.close()


def test_backends_one_after_another_leave_nothing(checkpoint: Checkpoint):
    def use() -> None:
        backend = gpu_backend(checkpoint)
        backend.step(batch(Part(0, (1,), 0, prompt(5)))).result()
        backend.close()

    # CUDA loads the code of a kernel when it is first launched, and what driver and libraries keep for themselves grows
    # for a while: 16 MiB over the first 50 backends, 2 over as many more (H200).
    for _ in range(50):
        use()
    before = free_bytes()
    for _ in range(10):
        use()
    assert before - free_bytes() <= GRANULARITY, f"{before - free_bytes()} bytes are gone"


def test_a_model_that_does_not_fit_leaves_the_card_as_it_was(checkpoint: Checkpoint):
    before = free_bytes()
    with pytest.raises(ModelError, match=r"the model needs .* GiB free"):
        gpu_backend(checkpoint, num_blocks=None, gpu_memory=20 * MIB)
    with pytest.raises(ModelError, match="in one piece"):
        gpu_backend(checkpoint, num_blocks=1 << 27)
    assert before - free_bytes() <= GRANULARITY


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_process_that_is_ended_gives_its_memory_back(end: signal.Signals, checkpoint: Checkpoint):
    script = f"""
import sys, time
sys.path.insert(0, {str(TESTS)!r})
from pathlib import Path
from gpu_subject import gpu_backend
from tinyvllm_cli.model.checkpoint import open_checkpoint
checkpoint = open_checkpoint(Path({str(checkpoint.path)!r}))
backend = gpu_backend(checkpoint, num_blocks=None, gpu_memory=3 << 30, slots=10_000)
print("ready", flush=True)
time.sleep(60)
"""
    before = free_bytes()
    environment = child_environment()
    command = [sys.executable, "-c", script]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, text=True, env=environment, **pipes) as child:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        taken = before - free_bytes()
        child.send_signal(end)
        child.wait(30)
    assert taken > 2 << 30, taken
    assert wait_until(lambda: before - free_bytes() <= GRANULARITY), f"{before - free_bytes()} bytes are still taken"


def wait_until(holds: Callable[[], bool], seconds: float = 10) -> bool:
    """The driver frees what a process had a moment after its end."""
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.05)
    return holds()
