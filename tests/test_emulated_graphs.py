"""Captured decode steps: the same bits as kernel by kernel, whatever the shape, and they are really replayed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import emulated_gpu
import numpy as np
import pytest
from emulated_cuda import OUT_OF_MEMORY, CUDARuntimeError, Runtime
from gpu_subject import TINY, gpu_backend, to_host
from seam import GREEDY, Part, Run, batch, i32, prompt, step
from tiny import make_tiny_model

from tinyvllm_cli.backends.gpu import graphs
from tinyvllm_cli.backends.gpu.backend import GpuBackend
from tinyvllm_cli.errors import DeviceError
from tinyvllm_cli.model.checkpoint import Checkpoint, open_checkpoint
from tinyvllm_cli.types import Batch, SlotOptions

pytestmark = [pytest.mark.emulated, pytest.mark.usefixtures("cuda")]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(make_tiny_model(tmp_path_factory.mktemp("tiny"), **TINY))


@pytest.fixture
def backend(checkpoint: Checkpoint) -> Iterator[GpuBackend]:
    made = gpu_backend(checkpoint, num_blocks=60, slots=8)
    yield made
    made.close()


def runs(count: int) -> list[Run]:
    """Sequences whose lengths cross the border of a block while they decode."""
    options = [GREEDY, SlotOptions(temperature=1.3, seed=5), SlotOptions(temperature=0.8, top_k=9, seed=6)]
    return [
        Run(prompt(12 + slot, seed=slot), slot, range(1 + 3 * slot, 4 + 3 * slot), options[slot % 3])
        for slot in range(count)
    ]


def decode(backend: GpuBackend, sequences: list[Run], count: int) -> list[list[int]]:
    for run in sequences:
        run.prefill(backend)
    for _ in range(count):
        tokens = step(backend, *(run.part() for run in sequences))
        for run, token in zip(sequences, tokens, strict=True):
            run.out.append(token)
    return [run.out for run in sequences]


@pytest.mark.parametrize("count", [1, 3, 8])
def test_a_replayed_step_draws_what_an_enqueued_one_draws(
    count: int, checkpoint: Checkpoint, backend: GpuBackend, monkeypatch: pytest.MonkeyPatch
):
    found = decode(backend, runs(count), 12)
    assert backend._graphs._graphs
    monkeypatch.setattr(graphs, "MAX_GRAPHS", 0)
    plain = gpu_backend(checkpoint, num_blocks=60, slots=8)
    assert decode(plain, runs(count), 12) == found
    assert not plain._graphs._graphs
    plain.close()


def test_launches_in_graphs_are_counted_as_those_outside(
    checkpoint: Checkpoint, backend: GpuBackend, monkeypatch: pytest.MonkeyPatch
):
    def counted(backend: GpuBackend) -> Counter[str]:
        before = Counter(backend.counts())
        decode(backend, runs(3), 12)
        return Counter(backend.counts()) - before

    found = counted(backend)
    assert found.pop("graphs") > 6
    monkeypatch.setattr(graphs, "MAX_GRAPHS", 0)
    plain = gpu_backend(checkpoint, num_blocks=60, slots=8)
    assert counted(plain) == found
    plain.close()


def test_shapes_are_few(backend: GpuBackend):
    """Sequences that grow and end share shapes, whatever their options are; a prompt among them is enqueued kernel by
    kernel, and of a biased one the draws."""
    sequences = runs(8)
    decode(backend, sequences, 12)
    while sequences:
        decode_once = [run.part() for run in sequences]
        for run, token in zip(sequences, step(backend, *decode_once), strict=True):
            run.out.append(token)
        sequences.pop()
    before = set(backend._graphs._seen)
    assert {rows for rows, *_ in before} == {1, 2, 4, 8}
    assert {rows for rows, *_ in backend._graphs._graphs} >= {4, 8}
    backend.bind(0, prompt(5), SlotOptions(logit_bias=((9, 3.0),)))
    step(backend, Part(0, (1,), 0, prompt(5)), Part(1, (2,), 0, prompt(3)))
    assert backend._graphs._seen == before
    for position in range(5, 8):
        step(backend, Part(0, (1,), position, [9]))
    assert {shape for shape in backend._graphs._seen - before if len(shape) == 4} == set()
    assert len(backend._graphs._seen - before) == 1


def test_whatever_rows_ask_for_launches_the_same(backend: GpuBackend):
    """Penalties, logprobs, likeliest ids, targets: one graph a step, the one that steps without them have."""
    sequences = runs(3)
    decode(backend, sequences, 3)
    seen, plain = set(backend._graphs._seen), launches_of(backend, batch(*(run.part() for run in sequences)))
    assert plain["graphs"] == 1
    penalties = {"presence_penalty": 1.0, "frequency_penalty": 0.1, "repetition_penalty": 1.3}
    for run in sequences:
        backend.bind(run.slot, [*run.ids, *run.out], SlotOptions(temperature=1.0, logprobs=True, **penalties))
    for asked in ({}, {"top_logprobs": 20}, {"targets": i32([3, -1, 5])}):
        assert launches_of(backend, replace(batch(*(run.part() for run in sequences)), **asked)) == plain
    assert backend._graphs._seen == seen


@pytest.mark.parametrize("asked", ["mask", "bias"])
def test_draws_that_come_later_leave_the_forward_captured(asked: str, checkpoint: Checkpoint, backend: GpuBackend):
    """And it is a step's own forward: the tokens are those of a backend that draws within its graph."""
    wanted = decode(backend, runs(3), 8)
    other, sequences = gpu_backend(checkpoint, num_blocks=60, slots=8), runs(3)
    for run in sequences:
        nothing = replace(run.options, logit_bias=((9, 0.0),))
        run.options = nothing if asked == "bias" else run.options
        run.prefill(other)
    counts = []
    for _ in range(8):
        rows = batch(*(run.part() for run in sequences))
        everything = np.full((1, 10), 2**32 - 1, np.uint32)
        before = Counter(other.counts())
        pending = other.step(replace(rows, mask_rows=i32([0, -1, 0])) if asked == "mask" else rows)
        if asked == "mask":
            pending.mask(everything)
        for run, token in zip(sequences, pending.result().token_ids[0].tolist(), strict=True):
            run.out.append(token)
        counts.append(Counter(other.counts()) - before)
    assert [run.out for run in sequences] == wanted
    assert [count["graphs"] for count in counts].count(1) >= 6
    assert all(count["sample_rows"] == 1 for count in counts)
    other.close()


def launches_of(backend: GpuBackend, rows: Batch) -> Counter[str]:
    before = Counter(backend.counts())
    backend.step(rows).result()
    return Counter(backend.counts()) - before


def test_a_card_without_room_for_a_graph_enqueues(
    backend: GpuBackend, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
):
    wanted = decode(backend, runs(3), 6)
    tried: list[int] = []

    def full(cuda: Runtime, graph: int) -> int:
        tried.append(graph)
        raise CUDARuntimeError(OUT_OF_MEMORY)

    monkeypatch.setattr(Runtime, "graphInstantiate", full)
    other = gpu_backend(checkpoint, num_blocks=60, slots=8)
    assert decode(other, runs(3), 6) == wanted
    assert len(tried) == 1 and not other._graphs._graphs
    other.close()


def test_graphs_are_closed_quietly_on_a_card_that_failed(backend: GpuBackend, cuda: Runtime):
    sequences = runs(2)
    decode(backend, sequences, 4)
    captured = [captured.graph for captured in backend._graphs._graphs.values()]
    cuda.breaks_at = cuda.work_done
    with pytest.raises(DeviceError):
        step(backend, *(run.part() for run in sequences))
    assert captured
    for graph in captured:
        graph.close()


def test_no_sequence_depends_on_the_bits_of_rows_that_only_pad(backend: GpuBackend, monkeypatch: pytest.MonkeyPatch):
    """Three rows run as four: where a library gives the fourth other bits, the three have the same tokens, K and V."""
    blocks = slice(1, None)  # all but the null block
    wanted = decode(backend, runs(3), 6)
    kept = to_host(backend, backend._cache.blocks)[blocks]
    exact = emulated_gpu.product

    def spoiled(out: Any, a: Any, weight: Any, rows: int, **options: Any) -> None:
        exact(out, a, weight, rows, **options)
        if rows == 4:
            out[3, : len(weight)] += 1

    monkeypatch.setattr(emulated_gpu, "product", spoiled)
    backend._graphs.close()
    assert decode(backend, runs(3), 6) == wanted
    np.testing.assert_array_equal(to_host(backend, backend._cache.blocks)[blocks], kept)


def test_rows_that_only_pad_leave_nothing_behind(backend: GpuBackend):
    """Three rows run as four: the table has the three tokens, and other slots are as they were."""
    backend.bind(7, prompt(20, seed=9), GREEDY)
    decode(backend, runs(3), 4)
    backend._device.stream.synchronize()
    table = backend._slots.token_table
    assert set(backend._slots.tables.device[8].tolist()) == {0}, "nobody's, the null block"
    assert table[7, :20].tolist() == prompt(20, seed=9)
    assert (table[7, 20:].tolist(), table[5].tolist()) == ([-1] * (640 - 20), [-1] * 640)


def test_only_rows_in_their_own_order_are_a_decode_step(backend: GpuBackend):
    """One row sampled for another slot, or twice, is no plain decode step, and right all the same."""
    sequences = runs(2)
    decode(backend, sequences, 1)
    seen = set(backend._graphs._seen)
    parts = [sequences[0].part(), sequences[1].part()]
    parts[0].samples, parts[1].samples = (1,), (0,)
    backend.step(batch(*parts)).result()
    assert backend._graphs._seen == seen
