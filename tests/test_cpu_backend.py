"""The CPU backend: the seam's contract, then what is its own: memory, dtypes, broken weights, closing."""

import math
import re
import threading
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import ml_dtypes
import numpy as np
import pytest
from clock import units
from seam import GREEDY, NUM_IDS, Part, Run, Subject, batch, prompt, step
from seam_contract import LAWS
from threadpoolctl import threadpool_info
from tiny import make_tiny_model

from tinyvllm_cli.backends.choose import engine_config
from tinyvllm_cli.backends.cpu import backend as module
from tinyvllm_cli.backends.cpu.backend import CpuBackend
from tinyvllm_cli.config import EngineOptions, KVDtypeName
from tinyvllm_cli.errors import ModelError, UsageError
from tinyvllm_cli.model.checkpoint import Checkpoint, open_checkpoint


def backend_over(checkpoint: Checkpoint, *, num_blocks: int | None = 40, max_in_flight: int = 1, **engine: Any):
    return CpuBackend(
        checkpoint.config,
        checkpoint.tensors,
        engine_config("cpu", EngineOptions(**engine), checkpoint),
        tokenizer_size=NUM_IDS,
        num_blocks=num_blocks,
        max_in_flight=max_in_flight,
    )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(make_tiny_model(tmp_path_factory.mktemp("tiny"), max_position_embeddings=640))


@pytest.fixture(scope="module", params=get_args(KVDtypeName))
def subject(request: pytest.FixtureRequest, checkpoint: Checkpoint) -> Subject:
    def fill(backend: CpuBackend, value: float, block: int | None) -> None:
        backend._cache.blocks[:, :, :, slice(None) if block is None else block] = value

    return Subject(
        make=lambda **limits: backend_over(checkpoint, kv_dtype=request.param, **limits),
        fill=fill,
        kv=lambda backend, block: backend._cache.blocks[:, :, :, block],
        tokens=lambda backend, slot: backend._slots.token_table[slot],
        # Neighbours of e4m3 are at most an eighth apart: what differs in the last bits may round to either.
        kv_rtol=1 / 8 if request.param == "fp8" else 1e-7,
    )


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_contract(law: Callable[[Subject], None], subject: Subject):
    law(subject)


# ---------------------------------------------------------------- weights


def with_tensors(checkpoint: Checkpoint, change: Callable[[str, np.ndarray], np.ndarray]) -> Checkpoint:
    """The checkpoint with each tensor changed as it is read."""

    class Changed:
        def __getattr__(self, name: str) -> Any:
            return getattr(checkpoint.tensors, name)

        def read(self, name: str) -> np.ndarray:
            return change(name, checkpoint.tensors.read(name))

    return replace(checkpoint, tensors=Changed())


@pytest.mark.parametrize(("dtype", "kind"), [("bfloat16", ml_dtypes.bfloat16), ("float16", np.float16)])
def test_other_dtypes_round_the_weights_and_nothing_else(dtype: str, kind: Any, checkpoint: Checkpoint):
    step_of_a_prompt = batch(Part(0, (1, 2), 0, prompt(20)))
    rounded = with_tensors(checkpoint, lambda _, array: array.astype(kind).astype(np.float32))
    logits = backend_over(checkpoint, dtype=dtype).logits(step_of_a_prompt)
    assert logits.dtype == np.float32
    assert np.array_equal(logits, backend_over(rounded).logits(step_of_a_prompt))
    assert not np.array_equal(logits, backend_over(checkpoint).logits(step_of_a_prompt))


def test_float32_weights_stay_where_the_file_is_mapped(checkpoint: Checkpoint):
    layer = backend_over(checkpoint)._parameters.layers[0]
    assert not layer.o.data.flags.owndata
    assert not layer.down.data.flags.writeable


def test_a_tied_head_is_the_embedding(tmp_path: Path):
    tied = open_checkpoint(make_tiny_model(tmp_path / "tied", tie_word_embeddings=True))
    parameters = backend_over(tied)._parameters
    assert parameters.head is parameters.embed


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_broken_weights_give_no_token_and_spare_the_neighbours(value: float, checkpoint: Checkpoint):
    """A row of the embedding is broken: the sequence that reads it fails from there on, others answer as ever."""

    def change(name: str, array: np.ndarray) -> np.ndarray:
        if "embed" in name:
            array = array.copy()
            array[100] = value
        return array

    broken, healthy = [9, 100, 10], [9, 101, 10]
    backend = backend_over(with_tensors(checkpoint, change))
    backend._cache.blocks[:] = np.nan
    for slot, ids in enumerate((broken, healthy)):
        backend.bind(slot, ids, GREEDY)
    tokens = [step(backend, Part(0, (1,), -1, [-1] * 3), Part(1, (2,), -1, [-1] * 3))]
    tokens += [step(backend, Part(0, (1,), -1, [-1]), Part(1, (2,), -1, [-1])) for _ in range(2)]
    run = Run(healthy)
    plain = backend_over(checkpoint)
    run.prefill(plain)
    assert np.transpose(tokens).tolist() == [[-1] * 3, run.decode(plain, 2)]


def test_ids_outside_the_vocabulary_are_refused(checkpoint: Checkpoint):
    backend = backend_over(checkpoint)
    for ids in ([3, 320], [-1], list(range(641))):
        with pytest.raises(ValueError, match="slot 3"):
            backend.bind(3, ids, GREEDY)


# ---------------------------------------------------------------- memory and threads


KV_BYTES = 2 * 2 * 2 * 16 * 16 * 4  # layers, k and v, heads, positions, head_dim, float32
BLOCK_BYTES = KV_BYTES + 16 * (2 * 8 * 4 + 3 * 4)  # and for each position cos and sin, and a token of each of 3 slots


def sizes(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, free_blocks: int, **engine: Any) -> tuple[int, int]:
    monkeypatch.setattr(module, "available_memory", lambda: 2 * free_blocks * BLOCK_BYTES + 100)
    return module.pool_limits(checkpoint.config, engine_config("cpu", EngineOptions(**engine), checkpoint), None)


def test_the_pool_is_what_all_slots_can_use_or_half_of_the_free_memory(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
):
    assert sizes(checkpoint, monkeypatch, 10**6, slots=3) == (1 + 3 * 40, 640)
    assert sizes(checkpoint, monkeypatch, 10**6, slots=3, max_model_len=33) == (1 + 3 * 3, 33)
    assert sizes(checkpoint, monkeypatch, 100, slots=3) == (100, 640)
    assert sizes(checkpoint, monkeypatch, 20, slots=3) == (20, 19 * 16)
    assert sizes(checkpoint, monkeypatch, 2, slots=3) == (2, 16)
    endless = replace(checkpoint, config=replace(checkpoint.config, max_position=2**31 - 1))
    assert sizes(endless, monkeypatch, 100, slots=3) == (100, 99 * 16)
    assert sizes(endless, monkeypatch, 10**12, slots=3)[0] * 16 <= 2**31  # rows of the pool are i32


def test_what_does_not_fit_is_said_in_one_line(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ModelError, match="KV cache of one sequence"):
        sizes(checkpoint, monkeypatch, 1)
    with pytest.raises(ModelError, match="--max-model-len"):
        sizes(checkpoint, monkeypatch, 20, max_model_len=320)
    with pytest.raises(UsageError, match="641 is more than the model's context, at most 640"):
        sizes(checkpoint, monkeypatch, 100, max_model_len=641)


def test_a_context_costs_what_is_used_of_it(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "available_memory", lambda: 1 << 32)
    endless = replace(checkpoint, config=replace(checkpoint.config, max_position=2**31 - 1))

    def peak() -> int:
        """Bytes, but for the pool and the token table."""
        tracemalloc.start()
        backend = backend_over(endless, num_blocks=None, slots=3)
        Run(prompt(6)).prefill(backend)
        most = tracemalloc.get_traced_memory()[1] - backend._cache.blocks.nbytes - backend._slots.token_table.nbytes
        tracemalloc.stop()
        assert backend.limits.max_seq_len > 10**6
        return most

    peaks: list[int] = []
    assert units(lambda: peaks.append(peak()), rounds=1) < 100
    assert peaks[0] < 10_000_000


def test_rope_tables_that_grow_change_no_logits(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch):
    ids = prompt(40)
    whole = backend_over(checkpoint).logits(batch(Part(0, (1, 2, 3), 0, ids)))
    monkeypatch.setattr(module, "FIRST_POSITIONS", 3)
    backend = backend_over(checkpoint)
    lengths = []
    for start in range(0, 40, 4):
        logits = backend.logits(batch(Part(0, (1, 2, 3), start, ids[start : start + 4])))
        lengths.append(len(backend._rope[0]))
    assert lengths == [6, 12, 12, 24, 24, 24, 48, 48, 48, 48]
    np.testing.assert_allclose(logits, whole, atol=1e-5)


def test_a_pool_that_the_system_refuses_is_one_line(checkpoint: Checkpoint):
    with pytest.raises(ModelError, match=r"refuses 9007199\.3 GB for the KV cache"):
        backend_over(checkpoint, num_blocks=1 << 40)


def test_limits_say_what_holds(checkpoint: Checkpoint):
    limits = backend_over(checkpoint, num_blocks=5, slots=3, max_batch_tokens=48, max_in_flight=2).limits
    assert (limits.num_blocks, limits.block_size, limits.max_seq_len) == (5, 16, 64)
    assert (limits.max_slots, limits.max_batch_tokens, limits.max_in_flight, limits.vocab_size) == (3, 48, 2, 320)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_number_of_threads_does_not_matter(threads: int, checkpoint: Checkpoint):
    ids = prompt(40)
    run, backend = Run(ids), backend_over(checkpoint, threads=threads)
    run.prefill(backend)
    reference, plain = Run(ids), backend_over(checkpoint, threads=3)
    reference.prefill(plain)
    assert run.decode(backend, 8) == reference.decode(plain, 8)


def test_steps_leave_the_threads_of_blas_as_they_were(checkpoint: Checkpoint):
    before = threadpool_info()
    run, backend = Run(prompt(20)), backend_over(checkpoint, threads=1)
    run.prefill(backend)
    run.decode(backend, 2)
    assert threadpool_info() == before


def test_steps_leave_nothing_behind(checkpoint: Checkpoint):
    run, backend = Run(prompt(20), blocks=range(1, 20)), backend_over(checkpoint)
    run.prefill(backend)
    run.decode(backend, 20)
    tracemalloc.start()
    run.decode(backend, 1)
    before = tracemalloc.get_traced_memory()[0]
    run.decode(backend, 100)
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < 100 * 200  # bytes; the list of tokens itself grows


def test_close_ends_the_threads_and_further_calls_are_errors(checkpoint: Checkpoint):
    def workers() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name.startswith("tinyvllm-cpu")}

    others = workers()
    backend = backend_over(checkpoint, threads=3)
    backend._device.run(lambda _: None, range(3))
    backend.close()
    backend.close()
    assert workers() <= others
    with pytest.raises(RuntimeError, match="closed"):
        backend.step(batch(Part(0, (1,), 0, prompt(4))))


def test_weights_that_do_not_fit_are_refused_before_they_are_read(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
):
    """With figures that are none too coarse for a tiny model, and with what it is that leaves no more."""
    monkeypatch.setattr(module, "available_memory", lambda: 1234)
    monkeypatch.setattr(module, "memory_bound", lambda: "somebody allows no more")
    with pytest.raises(ModelError) as error:
        backend_over(checkpoint, slots=1)
    found = re.search(
        r"need ([\d.]+) kB in float32 and 1\.2 kB are free .*\(somebody allows no more\)", str(error.value)
    )
    tensors = checkpoint.tensors
    assert found and 0 < 1000 * float(found[1]) <= sum(4 * math.prod(tensors.shape(name)) for name in tensors.names())
