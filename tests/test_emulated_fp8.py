"""The FP8 cache without a card: what is written into it, the seam's contract, and the bits of rows that read it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import bit_laws
import fp8_laws
import numpy as np
import pytest
from bit_laws import assert_none
from cuda_emulator import EmulatedKernels
from emulated_cuda import Runtime
from emulated_gpu import emulated_gpu
from gpu_bits import NAN, SHUFFLED, Model
from gpu_subject import TINY, subject_over
from gpu_tools import DTYPES, OpDevice
from seam import Subject
from seam_contract import LAWS
from tiny import make_tiny_model

from tinyvllm_cli.backends.gpu.backend import GpuBackend
from tinyvllm_cli.config import DtypeName
from tinyvllm_cli.model.checkpoint import Checkpoint, open_checkpoint

pytestmark = pytest.mark.emulated

LENGTH = 548  # past a border of attention's partials


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "kv_heads"), [(16, 1), (64, 3), (80, 2), (128, 2), (256, 1)])
def test_codes_and_scales(head_dim: int, kv_heads: int, dtype: DtypeName):
    kernels = EmulatedKernels(dtype, head_dim, "fp8")
    device = OpDevice(dtype, head_dim, kernels, None, stream=None, place=np.array)
    fp8_laws.codes_and_scales(device, 261, kv_heads)
    fp8_laws.written(device, 43, 4, kv_heads)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(make_tiny_model(tmp_path_factory.mktemp("tiny"), **TINY))


@pytest.fixture
def subject(checkpoint: Checkpoint, cuda: Runtime) -> Iterator[Subject]:
    made: list[GpuBackend] = []
    yield subject_over(checkpoint, made, kv_dtype="fp8")
    for backend in made:
        backend.close()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    one = {"num_hidden_layers": 1, "num_key_value_heads": 1, "head_dim": 64}
    checkpoint = open_checkpoint(make_tiny_model(tmp_path_factory.mktemp("model"), dtype="bfloat16", **one))
    with emulated_gpu() as cuda:
        model = Model(checkpoint, length=LENGTH, crowd=range(9, 23), kv_dtype="fp8")
        yield model
        model.backend.close()
        assert not cuda.held


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_contract(law: Callable[[Subject], None], subject: Subject):
    law(subject)


@pytest.fixture
def model(shared: Model) -> Model:
    assert shared.alone and shared.crowd
    shared.fill(NAN)
    return shared


def test_rows_have_the_same_bits_in_any_step(model: Model):
    assert_none(bit_laws.chunks(model, 100, 7) + bit_laws.decoded(model, 513) + bit_laws.among_others(model, 5, (0, 9)))


def test_other_blocks_and_what_they_held_change_nothing(model: Model):
    assert_none(bit_laws.other_blocks(model, SHUFFLED, (15, 511)) + bit_laws.preempted(model, decoded=3))
    assert_none(bit_laws.pool_of(model, 0x7F, decoded=3))
