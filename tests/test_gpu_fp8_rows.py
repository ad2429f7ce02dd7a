"""Weights in FP8 on a card: the kernels, the products beside float64, and the bits of rows in any company."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import bit_laws
import fp8_row_laws
import ml_dtypes
import numpy as np
import pytest
from bit_laws import assert_none
from gpu_bits import LENGTH, NAN, SHUFFLED, Model
from gpu_subject import TINY, gpu_backend
from gpu_tools import DTYPES, assert_close, assert_same_bits, open_device, read, to_gpu
from test_gpu_invariance import MODELS
from tiny import make_tiny_model

from tinyvllm_cli.backends.gpu import ops
from tinyvllm_cli.backends.gpu.cublas import padded_rows
from tinyvllm_cli.backends.gpu.parity import compare_prompts
from tinyvllm_cli.backends.gpu.tolerance import CERTAIN, accumulated
from tinyvllm_cli.config import DtypeName
from tinyvllm_cli.model.checkpoint import open_checkpoint

pytestmark = pytest.mark.gpu

NUM_ROWS = (1, 2, 16, 17, 64, 129, 256, 300, 8192)
DIFFERENT = 64  # rows, which come again and again where there are more
SHAPES = ((3072, 2048), (2048, 8192), (6144, 4096), (4096, 14336), (960, 576), (576, 1536))  # (N, K)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [8, 576, 4104, 14336, 28672])
def test_rows_have_the_bits_of_numpy(columns: int, dtype: DtypeName):
    device = open_device(dtype)
    fp8_row_laws.quantized(device, 301, columns)
    fp8_row_laws.in_turns(device, 30, 8, columns)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_and_silu_become_codes(dtype: DtypeName):
    device = open_device(dtype)
    for num_rows, columns in ((5, 64), (33, 576), (301, 4096), (9, 28672)):
        fp8_row_laws.norm_codes(device, num_rows, columns)
        fp8_row_laws.silu_codes(device, num_rows, columns, bias=columns < 4096)


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("add", [False, True])
def test_a_product_is_that_of_its_values_and_a_row_the_same_among_any(n: int, k: int, add: bool):
    blas, rng = open_device("bfloat16").blas, np.random.default_rng([n, k])
    codes = [
        (rng.standard_normal((rows, k), np.float32) * 100).clip(-448, 448).astype(ml_dtypes.float8_e4m3fn)
        for rows in (DIFFERENT, n)
    ]
    scales = [rng.uniform(1e-3, 1e-2, rows).astype(np.float32) for rows in (DIFFERENT, n)]
    before = rng.standard_normal((DIFFERENT, n), np.float32).astype(np.float32 if add else ml_dtypes.bfloat16)
    weight, of_weight = to_gpu(codes[1].view(np.uint8)), to_gpu(scales[1])
    wanted = None
    for num_rows in NUM_ROWS:
        capacity = padded_rows(num_rows, add=add, codes=True) + DIFFERENT
        given = [
            np.resize(array, (capacity, *array.shape[1:])) for array in (before, codes[0].view(np.uint8), scales[0])
        ]
        out, rows, of_rows = map(to_gpu, given)
        found_algorithms = blas.num_algorithms(out, rows, weight, num_rows, add=add)
        for index in range(found_algorithms if num_rows <= DIFFERENT else 1):
            out = to_gpu(given[0])
            blas.choose(index, out, rows, weight, num_rows, add=add)
            blas.product(out, rows, weight, num_rows, add=add, scales=(of_rows, of_weight))
            found = read(out[: min(num_rows, DIFFERENT)])
            if wanted is None:
                wanted = found
            assert_same_bits(f"{num_rows} rows, algorithm {index}", found[: len(wanted)], wanted[: len(found)])
            wanted = found if len(found) > len(wanted) else wanted
            assert_same_bits("rows past", read(out[-DIFFERENT:]), given[0][-DIFFERENT:].astype(np.float32))
    values = [code.astype(np.float64) * scale[:, None] for code, scale in zip(codes, scales, strict=True)]
    spread = np.sqrt((values[0] ** 2) @ (values[1] ** 2).T)
    sums = values[0] @ values[1].T
    name: DtypeName = "float32" if add else "bfloat16"
    slack, exact = CERTAIN * accumulated(sums, spread, k), sums + (before if add else 0)
    assert_close("product of codes", wanted, exact, dtype=name, terms=k, scale=spread, slack=slack)


def test_every_op_is_within_its_tolerance(tmp_path_factory: pytest.TempPathFactory):
    checkpoint = open_checkpoint(make_tiny_model(tmp_path_factory.mktemp("tiny"), **TINY | {"mlp_bias": True}))
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 60, length).tolist() for length in (21, 150)]
    with closing(gpu_backend(checkpoint, dtype="fp8", max_batch_tokens=640)) as backend:
        for comparison in compare_prompts(backend, prompts, 3, ops):
            assert comparison.ok, f"{comparison.op}: {comparison}"


# ---------------------------------------------------------------- bits of rows


@pytest.fixture(scope="module", params=[name for name in MODELS if "fp16" not in name])
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    checkpoint = open_checkpoint(make_tiny_model(tmp_path_factory.mktemp("model"), **MODELS[request.param]))
    model = Model(checkpoint, held="fp8")
    yield model
    model.backend.close()
    checkpoint.tensors.close()


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


@pytest.mark.parametrize("num_rows", [1, 2, 17, 65, 256])
def test_a_row_among_others_has_the_bits_it_has_alone(model: Model, num_rows: int):
    assert_none(bit_laws.among_others(model, num_rows, (0, 233)))


def test_drafts_blocks_and_preemption_change_nothing(model: Model):
    assert_none(bit_laws.drafts(model, 510, (2, 5, 9)))
    assert_none(bit_laws.other_blocks(model, SHUFFLED, (15, 511)) + bit_laws.preempted(model, decoded=3))
