"""Captured decode steps: the same bits as kernel by kernel, whatever the shape, and they are really replayed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from gpu_subject import TINY, gpu_backend
from seam import GREEDY, Part, Run, batch, prompt, step
from tiny import make_tiny_model

from tinyvllm_cli.backends.gpu import graphs
from tinyvllm_cli.backends.gpu.backend import GpuBackend
from tinyvllm_cli.model.checkpoint import Checkpoint, open_checkpoint
from tinyvllm_cli.types import SlotOptions

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
    captured = [graph for graph in backend._graphs._graphs.values() if graph is not None]
    assert captured
    monkeypatch.setattr(graphs, "MAX_GRAPHS", 0)
    plain = gpu_backend(checkpoint, num_blocks=60, slots=8)
    assert decode(plain, runs(count), 12) == found
    assert not plain._graphs._graphs
    plain.close()


def test_shapes_are_few(backend: GpuBackend):
    """Sequences that grow and end share shapes; a prompt among them, or a biased one, is enqueued kernel by kernel."""
    sequences = runs(8)
    decode(backend, sequences, 12)
    while sequences:
        decode_once = [run.part() for run in sequences]
        for run, token in zip(sequences, step(backend, *decode_once), strict=True):
            run.out.append(token)
        sequences.pop()
    assert {rows for rows, *_ in backend._graphs._graphs} == {1, 2, 4, 8}
    before = dict(backend._graphs._graphs)
    backend.bind(0, prompt(5), SlotOptions(logit_bias=((9, 3.0),)))
    step(backend, Part(0, (1,), 0, prompt(5)), Part(1, (2,), 0, prompt(3)))
    step(backend, Part(0, (1,), 5, [9]))
    assert backend._graphs._graphs == before


def test_rows_that_only_pad_leave_nothing_behind(backend: GpuBackend):
    """Three rows run as four: the table has the three tokens, and one more slot is as it was."""
    backend.bind(7, prompt(20, seed=9), GREEDY)
    decode(backend, runs(3), 4)
    backend._device.stream.synchronize()
    table = backend._slots.token_table
    assert table[7, :20].tolist() == prompt(20, seed=9)
    assert (table[7, 20:].tolist(), table[5].tolist()) == ([-1] * (640 - 20), [-1] * 640)


def test_only_rows_in_their_own_order_are_a_decode_step(backend: GpuBackend):
    """One row sampled for another slot, or twice, is no plain decode step, and right all the same."""
    sequences = runs(2)
    decode(backend, sequences, 1)
    backend._graphs.close()
    parts = [sequences[0].part(), sequences[1].part()]
    parts[0].samples, parts[1].samples = (1,), (0,)
    backend.step(batch(*parts)).result()
    assert not backend._graphs._graphs
