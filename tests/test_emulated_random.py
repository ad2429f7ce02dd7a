"""Random weights made by the kernel, on the processor (cuda_emulator.py, emulated_gpu.py)."""

from __future__ import annotations

from pathlib import Path

import pytest
import random_laws
from emulated_cuda import Runtime
from gpu_tools import DTYPES
from test_emulated_ops import open_device

from tinyvllm_cli.config import DtypeName

pytestmark = pytest.mark.emulated


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("matrix", random_laws.MATRICES, ids=str)
def test_a_matrix_is_that_of_numpy(matrix: tuple[int, int, int, int, int], dtype: DtypeName):
    random_laws.matrix(open_device(dtype), *matrix)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", random_laws.MODELS)
def test_a_model_is_that_of_numpy(name: str, dtype: DtypeName, cuda: Runtime):
    random_laws.model(random_laws.MODELS[name], dtype)


def test_a_folder_has_the_same_bytes_from_the_card(cuda: Runtime, tmp_path: Path):
    random_laws.folder(random_laws.MODELS["tied"], tmp_path)
