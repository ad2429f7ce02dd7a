"""The FP8 cache on a card: what is written into it, the seam's contract, and the bits of rows that read it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import bit_laws
import fp8_laws
import pytest
from bit_laws import assert_none
from gpu_bits import LENGTH, NAN, SHUFFLED, Model
from gpu_subject import TINY, load_kernels_once, subject_over
from gpu_tools import DTYPES, open_device
from seam import Subject
from seam_contract import LAWS
from test_gpu_invariance import MODELS
from tiny import make_tiny_model

from tinyvllm_cli.backends.gpu.backend import GpuBackend
from tinyvllm_cli.config import DtypeName
from tinyvllm_cli.model.checkpoint import Checkpoint, open_checkpoint

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "kv_heads"), [(16, 1), (64, 3), (80, 2), (128, 8), (256, 1)])
def test_codes_and_scales(head_dim: int, kv_heads: int, dtype: DtypeName):
    device = open_device(dtype, head_dim, "fp8")
    fp8_laws.codes_and_scales(device, 301, kv_heads)
    fp8_laws.written(device, 143, 4, kv_heads)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(make_tiny_model(tmp_path_factory.mktemp("tiny"), **TINY))


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> Iterator[None]:
    with load_kernels_once():
        yield


@pytest.fixture
def subject(checkpoint: Checkpoint) -> Iterator[Subject]:
    made: list[GpuBackend] = []
    yield subject_over(checkpoint, made, kv_dtype="fp8")
    for backend in made:
        backend.close()


@pytest.fixture(scope="module", params=MODELS)
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    checkpoint = open_checkpoint(make_tiny_model(tmp_path_factory.mktemp("model"), **MODELS[request.param]))
    model = Model(checkpoint, kv_dtype="fp8")
    yield model
    model.backend.close()
    checkpoint.tensors.close()


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_contract(law: Callable[[Subject], None], subject: Subject):
    law(subject)


@pytest.fixture
def model(shared: Model) -> Model:
    assert shared.alone and shared.crowd
    shared.fill(NAN)
    return shared


@pytest.mark.parametrize("chunk", [1, 33, LENGTH])
def test_chunks_have_the_bits_of_the_whole(model: Model, chunk: int):
    assert_none(bit_laws.chunks(model, LENGTH, chunk))


@pytest.mark.parametrize("length", [1, 16, 65, 256, 513, 1024])
def test_a_decoded_row_has_the_bits_of_a_prefilled_one(model: Model, length: int):
    assert_none(bit_laws.decoded(model, length))


def test_drafts_and_neighbours_change_nothing(model: Model):
    assert_none(bit_laws.drafts(model, 510, (2, 5, 9)))
    assert_none(bit_laws.among_others(model, 64, (0, 233)))
    assert_none(bit_laws.neighbours(model, 500, 533, [*model.crowd[:20], *bit_laws.OTHERS], (0, 20)))


def test_other_blocks_and_what_they_held_change_nothing(model: Model):
    assert_none(bit_laws.other_blocks(model, SHUFFLED, (15, 511)) + bit_laws.preempted(model, decoded=3))
    assert_none(bit_laws.pool_of(model, 0x7F, decoded=3))
