"""The CUDA backend without a card: over the emulated one, whose streams wait until somebody does (emulated_gpu.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from emulated_cuda import ILLEGAL_ADDRESS, CUDARuntimeError, Runtime
from gpu_subject import TINY, gpu_backend, subject_over
from seam import GREEDY, NUM_IDS, Part, Run, Subject, batch, i32, prompt, step
from seam_contract import LAWS
from tiny import make_tiny_model

from tinyvllm_cli.backends.cpu.backend import CpuBackend
from tinyvllm_cli.backends.gpu.backend import GpuBackend, check_model
from tinyvllm_cli.config import EngineConfig
from tinyvllm_cli.errors import DeviceError, ModelError
from tinyvllm_cli.model.checkpoint import Checkpoint, open_checkpoint

pytestmark = pytest.mark.emulated


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(make_tiny_model(tmp_path_factory.mktemp("tiny"), **TINY))


@pytest.fixture
def subject(checkpoint: Checkpoint, cuda: Runtime) -> Iterator[Subject]:
    made: list[GpuBackend] = []
    yield subject_over(checkpoint, made)
    for backend in made:
        backend.close()


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_contract(law: Callable[[Subject], None], subject: Subject):
    law(subject)


# ---------------------------------------------------------------- what it computes


@pytest.mark.parametrize(
    "architecture",
    [
        {"tie_word_embeddings": True},
        {"attention_bias": True, "mlp_bias": True},
        {"architecture": "Qwen3ForCausalLM"},
        {"num_key_value_heads": 1, "rope_theta": 5000.0, "rope_scaling": {"type": "linear", "factor": 4.0}},
    ],
    ids=lambda architecture: next(iter(architecture)),
)
def test_logits_are_those_of_the_same_weights_on_a_cpu(architecture: dict, cuda: Runtime, tmp_path: Path):
    """Every tensor in its place, every row at its position: what is left of the difference are roundings to bf16."""
    checkpoint = open_checkpoint(make_tiny_model(tmp_path / "model", **TINY | architecture))
    rows = batch(Part(0, (3, 1), 0, prompt(30)), Part(2, (4,), 0, prompt(7, seed=1)))
    engine = EngineConfig(slots=4, max_batch_tokens=64, dtype="bfloat16", threads=1)
    cpu = CpuBackend(checkpoint.config, checkpoint.tensors, engine, tokenizer_size=NUM_IDS, num_blocks=6)
    found, wanted = gpu_backend(checkpoint, num_blocks=6).logits(rows), cpu.logits(rows)
    assert found.shape == wanted.shape == (2, 320)
    assert np.sqrt(np.mean((found - wanted) ** 2)) < 0.03 * wanted.std()


# ---------------------------------------------------------------- steps in flight


def test_more_steps_than_may_be_in_flight_are_refused_and_change_nothing(checkpoint: Checkpoint, cuda: Runtime):
    backend = gpu_backend(checkpoint, max_in_flight=2)
    backend.bind(0, prompt(5), GREEDY)
    first = backend.step(batch(Part(0, (1,), -1, [-1] * 5)))
    second = backend.step(batch(Part(0, (1,), -1, [-1])))
    with pytest.raises(ValueError, match="2 steps are in flight"):
        backend.step(batch(Part(0, (1,), -1, [-1])))
    assert second.result() is second.result()
    third = backend.step(batch(Part(0, (1,), -1, [-1])))
    tokens = [int(pending.result().token_ids[0, 0]) for pending in (first, second, third)]
    alone = Run(prompt(5))
    plain = gpu_backend(checkpoint)
    alone.prefill(plain)
    assert tokens == alone.decode(plain, 2)


def test_results_read_stay_as_they_are(checkpoint: Checkpoint, cuda: Runtime):
    backend = gpu_backend(checkpoint)
    run = Run(prompt(9))
    backend.bind(0, run.ids, GREEDY)
    first = backend.step(batch(Part(0, (1,), 0, run.ids)))
    kept = first.result().token_ids.copy()
    run.out = kept[0].tolist()
    assert len(set(run.decode(backend, 8))) > 1
    assert np.array_equal(first.result().token_ids, kept)
    backend.close()
    assert np.array_equal(first.result().token_ids, kept)


def test_a_malformed_batch_between_good_ones_changes_nothing(checkpoint: Checkpoint, cuda: Runtime):
    backend, plain, ids = gpu_backend(checkpoint), gpu_backend(checkpoint), prompt(20)
    run, alone = Run(ids), Run(ids)
    for each, device in ((run, backend), (alone, plain)):
        each.prefill(device)
    for _ in range(5):
        with pytest.raises(ValueError, match="malformed batch"):
            backend.step(replace(batch(run.part()), token_ids=i32([320])))
    assert run.decode(backend, 4) == alone.decode(plain, 4)


def test_nothing_is_allocated_in_a_run(checkpoint: Checkpoint, cuda: Runtime):
    backend = gpu_backend(checkpoint)
    held = dict(cuda.held)
    run = Run(prompt(40))
    run.prefill(backend, chunk=13)
    run.decode(backend, 5)
    backend.copy_blocks([(1, 5), (2, 5)])
    backend.logits(batch(Part(1, (9,), 0, prompt(3))))
    assert cuda.held.keys() == held.keys()


# ---------------------------------------------------------------- slots


def test_bind_takes_prompts_of_any_length_as_often_as_it_likes(checkpoint: Checkpoint, cuda: Runtime):
    """More than the pinned memory holds, all before one step: each row of the table gets its own tokens."""
    backend = gpu_backend(checkpoint, slots=64, num_blocks=41)
    length = backend.limits.max_seq_len
    rows = [prompt(length - slot, seed=slot) for slot in range(64)]
    for slot, ids in enumerate(rows):
        backend.bind(slot, ids, GREEDY)
    for _ in range(40):  # the first to come are not overwritten by the later ones
        for slot in range(32, 64):
            backend.bind(slot, rows[slot], GREEDY)
    cuda.deviceSynchronize()
    table = np.asarray(backend._slots.token_table)
    assert [table[slot, : len(ids)].tolist() for slot, ids in enumerate(rows)] == rows


@pytest.mark.parametrize(
    ("slot", "ids"), [(-1, [5]), (4, [5]), (0, [5] * 641), (0, [320]), (0, [-1])], ids=lambda value: str(value)[:12]
)
def test_what_does_not_fit_a_slot_is_refused(slot: int, ids: list[int], checkpoint: Checkpoint, cuda: Runtime):
    backend = gpu_backend(checkpoint, num_blocks=41)
    with pytest.raises(ValueError, match=f"slot {slot}"):
        backend.bind(slot, ids, GREEDY)


@pytest.mark.parametrize("pair", [(0, 40), (-1, 3), (40, 2)])
def test_a_block_that_is_not_there_is_not_copied(pair: tuple[int, int], checkpoint: Checkpoint, cuda: Runtime):
    with pytest.raises(ValueError, match="wanted 0 to 39"):
        gpu_backend(checkpoint).copy_blocks([(1, 2), pair])


# ---------------------------------------------------------------- faults and the end


def test_a_fault_is_named_once_and_ends_every_later_call(checkpoint: Checkpoint, cuda: Runtime):
    backend = gpu_backend(checkpoint, max_in_flight=2)
    part = Part(0, (1,), 0, prompt(5))
    read, unread = backend.step(batch(part)), backend.step(batch(part))
    token = read.result().token_ids
    cuda.broken = ILLEGAL_ADDRESS
    calls: list[Callable[[], Any]] = [
        unread.result,
        lambda: backend.step(batch(part)),
        lambda: backend.logits(batch(part)),
        lambda: backend.bind(0, [5], GREEDY),
        lambda: backend.copy_blocks([(1, 2)]),
        unread.result,
    ]
    for call in calls:
        with pytest.raises(DeviceError, match=r"^Emulated failed: cudaErrorIllegalAddress: an illegal memory access"):
            call()
        cuda.broken = 0  # whatever the card says now
    assert read.result().token_ids is token
    cuda.broken = ILLEGAL_ADDRESS
    backend.close()
    backend.close()


def test_close_gives_everything_back_and_further_calls_are_errors(checkpoint: Checkpoint, cuda: Runtime):
    backend = gpu_backend(checkpoint)
    unread = backend.step(batch(Part(0, (1,), 0, prompt(5))))
    backend.close()
    backend.close()
    assert not cuda.held and cuda.device_bytes == 0
    for call in (
        unread.result,
        lambda: step(backend, Part(0, (1,), 0, prompt(4))),
        lambda: backend.bind(0, [], GREEDY),
    ):
        with pytest.raises(RuntimeError, match="closed"):
            call()


@pytest.mark.parametrize(
    "error", [ModelError("a damaged file"), KeyboardInterrupt("by the user"), CUDARuntimeError(ILLEGAL_ADDRESS)]
)
def test_what_goes_wrong_while_loading_gives_everything_back(
    error: BaseException, checkpoint: Checkpoint, cuda: Runtime
):
    class Broken:
        def __getattr__(self, name: str) -> Any:
            return getattr(checkpoint.tensors, name)

        def read(self, name: str) -> np.ndarray:
            if "layers.1.mlp.up" in name:
                raise error
            return checkpoint.tensors.read(name)

    fault = isinstance(error, CUDARuntimeError)
    wanted = (DeviceError, f"Emulated failed: {error}") if fault else (type(error), str(error))
    with pytest.raises(wanted[0], match=wanted[1]):
        gpu_backend(replace(checkpoint, tensors=Broken()), slots=2)
    assert not cuda.held


# ---------------------------------------------------------------- what it takes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 40}, "head_dim is 40"),
        ({"head_dim": 272}, "head_dim is 272"),
        ({"hidden_size": 68}, "hidden_size is 68"),
        ({"num_heads": 34}, "heads for each key-value head is 17"),
    ],
)
def test_a_shape_that_the_kernels_do_not_take_is_named(change: dict, message: str, checkpoint: Checkpoint):
    with pytest.raises(ModelError, match=f"{message}, .*--backend cpu"):
        check_model(replace(checkpoint.config, **change))


def test_facts_say_what_it_runs_on(checkpoint: Checkpoint, cuda: Runtime):
    facts = gpu_backend(checkpoint).facts
    assert (facts.name, facts.device, facts.dtype) == ("gpu", "Emulated", "bfloat16")
    assert facts.details["driver"] == "13.0" and facts.details["total_bytes"] == cuda.device_bytes
