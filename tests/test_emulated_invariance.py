"""Row invariance without a card: the laws of bit_laws.py over the emulated kernels, a few cases of each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import bit_laws
import pytest
from bit_laws import OTHERS, assert_none
from emulated_gpu import emulated_gpu
from gpu_bits import NAN, SHUFFLED, Model
from tiny import make_tiny_model

from tinyvllm_cli.model.checkpoint import open_checkpoint

pytestmark = pytest.mark.emulated

LENGTH = 548  # past a border of attention's partials
CROWD = range(9, 23)  # one of them with a past of NaN


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    folder: Path = tmp_path_factory.mktemp("model")
    one = {"num_hidden_layers": 1, "num_key_value_heads": 1, "head_dim": 64}
    checkpoint = open_checkpoint(make_tiny_model(folder, dtype="bfloat16", **one))
    with emulated_gpu() as cuda:
        model = Model(checkpoint, length=LENGTH, crowd=CROWD)
        yield model
        model.backend.close()
        assert not cuda.held


@pytest.fixture
def model(shared: Model) -> Model:
    assert shared.alone and shared.crowd
    shared.fill(NAN)
    return shared


@pytest.mark.parametrize(("length", "chunk"), [(40, 1), (100, 7), (LENGTH, 129)])
def test_chunks_have_the_bits_of_the_whole(model: Model, length: int, chunk: int):
    assert_none(bit_laws.chunks(model, length, chunk))


@pytest.mark.parametrize("length", [1, 16, 17, 64, 65, 512, 513])
def test_a_decoded_row_has_the_bits_of_a_prefilled_one(model: Model, length: int):
    assert_none(bit_laws.decoded(model, length))


@pytest.mark.parametrize("start", [13, 510])
def test_drafts_have_the_bits_of_decoded_rows(model: Model, start: int):
    assert_none(bit_laws.drafts(model, start, (2, 4, 5)))


@pytest.mark.parametrize("num_rows", [1, 2, 5, 14])
def test_a_row_among_others_has_the_bits_it_has_alone(model: Model, num_rows: int):
    assert_none(bit_laws.among_others(model, num_rows, (0, 9)))


@pytest.mark.parametrize(("start", "end"), [(520, 521), (510, 514)], ids=["decode", "draft"])
def test_neighbours_of_every_kind_change_nothing(model: Model, start: int, end: int):
    others = [*model.crowd[:4], *OTHERS[1:], *model.crowd[4:6]]
    assert_none(bit_laws.neighbours(model, start, end, others, (0, 5)))


def test_slots_and_order_of_blocks_change_nothing(model: Model):
    assert_none(bit_laws.other_blocks(model, SHUFFLED, (15, 511)))


def test_a_preempted_sequence_has_its_bits_again(model: Model):
    assert_none(bit_laws.preempted(model, decoded=3))


@pytest.mark.parametrize("byte", [0x00, 0x7F], ids=hex)
def test_what_the_pool_held_changes_nothing(model: Model, byte: int):
    assert_none(bit_laws.pool_of(model, byte, decoded=3))
