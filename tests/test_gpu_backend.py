"""The GPU backend on a card: the seam's contract for equal bits, steps in flight, and what a fault leaves."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from gpu_subject import TINY, child_environment, load_kernels_once, subject_over, to_host
from seam import GREEDY, Part, Run, Subject, batch, prompt
from seam_contract import LAWS
from tiny import make_tiny_model

from tinyvllm_cli.backends.gpu.backend import GpuBackend
from tinyvllm_cli.backends.gpu.in_flight import InFlight
from tinyvllm_cli.model.checkpoint import Checkpoint, open_checkpoint
from tinyvllm_cli.types import SlotOptions, StepOutput

pytestmark = pytest.mark.gpu

TESTS = Path(__file__).parent


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(make_tiny_model(tmp_path_factory.mktemp("tiny"), **TINY))


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> Iterator[None]:
    with load_kernels_once():
        yield


@pytest.fixture
def make(checkpoint: Checkpoint) -> Iterator[Callable[..., GpuBackend]]:
    made: list[GpuBackend] = []
    yield subject_over(checkpoint, made).make  # type: ignore[misc]
    for backend in made:
        backend.close()


@pytest.fixture
def subject(checkpoint: Checkpoint) -> Iterator[Subject]:
    made: list[GpuBackend] = []
    yield subject_over(checkpoint, made)
    for backend in made:
        backend.close()


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_contract(law: Callable[[Subject], None], subject: Subject):
    law(subject)


# ---------------------------------------------------------------- steps in flight


def test_steps_in_flight_are_counted_and_read_in_any_order(make: Callable[..., GpuBackend]):
    backend, plain = make(max_in_flight=3), make()
    alone = Run(prompt(33))
    alone.prefill(plain)
    wanted = alone.decode(plain, 2)
    backend.bind(0, alone.ids, GREEDY)
    pending = [backend.step(batch(Part(0, (1, 2, 3), -1, [-1] * count))) for count in (33, 1, 1)]
    with pytest.raises(ValueError, match="3 steps are in flight"):
        backend.step(batch(Part(0, (1, 2, 3), -1, [-1])))
    tokens = {index: int(pending[index].result().token_ids[0, 0]) for index in (1, 2, 0)}
    assert [tokens[index] for index in range(3)] == wanted
    outputs = [step.result() for step in pending]
    backend.step(batch(Part(1, (4,), 0, prompt(3)))).result()
    backend.close()
    assert [int(step.result().token_ids[0, 0]) for step in pending] == wanted
    assert all(step.result() is output for step, output in zip(pending, outputs, strict=True))


def test_a_long_run_ahead_of_its_results_is_the_run_step_by_step(make: Callable[..., GpuBackend]):
    """Uploads, results and the token table are used again while earlier steps are still running."""
    options = [SlotOptions(temperature=1.0, seed=slot, logprobs=True) for slot in range(8)]
    parts = [Part(slot, range(1 + 4 * slot, 5 + 4 * slot), -1, [-1] * 20) for slot in range(8)]

    steps = [parts, *([replace(part, tokens=[-1]) for part in parts[: 1 + turn % 8]] for turn in range(40))]

    def run(backend: GpuBackend) -> list[tuple[bytes, bytes]]:
        for slot in range(8):
            backend.bind(slot, prompt(20, seed=slot), options[slot])
        waiting: list[InFlight] = []
        read: list[StepOutput] = []
        for step in steps:
            if len(waiting) == backend.limits.max_in_flight:
                read.append(waiting.pop(0).result())
            waiting.append(backend.step(batch(*step)))
        read += [each.result() for each in waiting]
        return [(output.token_ids.tobytes(), output.logprobs.tobytes()) for output in read]

    limits = {"slots": 8, "max_batch_tokens": 160}
    assert run(make(max_in_flight=4, **limits)) == run(make(max_in_flight=1, **limits))


def test_every_slot_may_be_bound_before_a_step_with_prompts_of_any_length(make: Callable[..., GpuBackend]):
    """More than the pinned memory holds; the row of every slot is its own, whatever stood there before."""
    backend = make(slots=256, num_blocks=41)
    length = backend.limits.max_seq_len
    rows = [prompt(1 + (slot * 7) % length, seed=slot) for slot in range(256)]
    for slot, ids in enumerate(rows):
        backend.bind(slot, ids, GREEDY)
    for _ in range(20):  # the first to come are not overwritten by the later ones
        for slot in range(128, 256):
            backend.bind(slot, rows[slot], GREEDY)
    table = to_host(backend, backend._slots.token_table)
    wrong = [slot for slot, ids in enumerate(rows) if table[slot, : len(ids)].tolist() != ids]
    assert not wrong, f"slots {wrong[:8]} of {len(wrong)}"


def test_nothing_that_is_enqueued_waits_for_the_card(make: Callable[..., GpuBackend]):
    """It is kept busy with copies within the pool, a tenth of a second of them at 4 TB/s."""
    backend = make(max_in_flight=2, num_blocks=1 << 16)
    step = batch(Part(0, (1,), 0, prompt(16)))
    backend.step(step).result()  # finds the algorithms of its products
    cuda, pool, stream = backend._card.cuda, backend._cache.blocks, backend._device.stream
    half = pool.nbytes // 2
    for _ in range(400):
        cuda.memcpyAsync(pool.data.ptr, pool.data.ptr + half, half, cuda.memcpyDeviceToDevice, stream.ptr)
    pending = []
    for _ in range(2):
        for slot in range(4):
            backend.bind(slot, prompt(600), GREEDY)
        backend.copy_blocks([(1, 2), (2, 3)])
        pending.append(backend.step(step))
    assert cuda.streamQuery(stream.ptr), "the card had done it all before the host was through"
    assert len({int(each.result().token_ids[0, 0]) for each in pending}) == 1


# ---------------------------------------------------------------- faults and the end


def run_script(text: str, checkpoint: Checkpoint, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """A process of its own, for a card that fails stays so until the process ends."""
    header = f"""
        import sys
        sys.path.insert(0, {str(TESTS)!r})
        from pathlib import Path
        import numpy as np
        from gpu_subject import gpu_backend
        from seam import GREEDY, Part, batch, prompt
        from tinyvllm_cli.errors import DeviceError
        from tinyvllm_cli.model.checkpoint import open_checkpoint
        checkpoint = open_checkpoint(Path({str(checkpoint.path)!r}))
    """
    code = textwrap.dedent(header) + textwrap.dedent(text)
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=child_environment(),
        check=False,
    )


def test_a_fault_of_the_card_is_named_and_nothing_hangs(checkpoint: Checkpoint):
    """A kernel writes to address 0, with a step before it and one after."""
    script = """
        backend = gpu_backend(checkpoint, max_in_flight=3)
        part = Part(0, (1,), 0, prompt(5))
        first = backend.step(batch(part))
        token = first.result().token_ids
        backend._device.launch("add_bias", (1,), 256, (None, None, np.int32(8), np.int32(8)))
        calls = [lambda: backend.step(batch(part)).result(), lambda: backend.step(batch(part)),
                 lambda: backend.bind(0, [5], GREEDY), lambda: backend.logits(batch(part)),
                 lambda: backend.copy_blocks([(1, 2)])]
        for call in calls:
            try:
                call()
            except DeviceError as error:
                print(error)
        assert first.result().token_ids is token
        backend.close()
        backend.close()
    """
    done = run_script(script, checkpoint)
    lines = done.stdout.splitlines()
    assert (done.returncode, done.stderr) == (0, ""), done.stderr[-2000:]
    assert len(lines) == 5 and len(set(lines)) == 1, lines
    assert "failed: cudaErrorIllegalAddress" in lines[0], lines[0]


def test_a_process_that_ends_without_close_is_quiet(checkpoint: Checkpoint):
    script = """
        backend = gpu_backend(checkpoint, max_in_flight=2)
        unread = backend.step(batch(Part(0, (1,), 0, prompt(5))))
        read = backend.step(batch(Part(0, (1,), 0, prompt(5)))).result()
        print(read.token_ids.shape)
    """
    done = run_script(script, checkpoint)
    assert (done.returncode, done.stdout, done.stderr) == (0, "(1, 1)\n", ""), done.stderr[-2000:]


def test_facts_say_what_it_runs_on(make: Callable[..., GpuBackend]):
    import cupy

    facts = make().facts
    name = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    assert (facts.name, facts.device, facts.dtype) == ("gpu", name, "bfloat16")
    assert facts.details["cupy"] == cupy.__version__
    for library in ("driver", "cuda_runtime", "cublas", "nvrtc"):
        major = int(str(facts.details[library]).split(".")[0])
        assert major in (12, 13), f"{library} {facts.details[library]}"
