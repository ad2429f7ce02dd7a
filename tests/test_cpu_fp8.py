"""The CPU's KV cache in FP8: K and V as the format's definition rounds them, each head by itself, and nothing else."""

from typing import Any

import fp8_reference
import numpy as np
import pytest
from seam import NUM_IDS, Part, batch, prompt
from tiny import make_tiny_model

from tinyvllm_cli.backends.choose import engine_config
from tinyvllm_cli.backends.cpu.backend import CpuBackend
from tinyvllm_cli.backends.cpu.kv import KVCache
from tinyvllm_cli.config import EngineOptions, KVDtypeName
from tinyvllm_cli.model.checkpoint import Checkpoint, open_checkpoint

LAYERS, KV_HEADS, HEAD_DIM, POOL = 2, 2, 16, 6


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(make_tiny_model(tmp_path_factory.mktemp("tiny"), max_position_embeddings=64))


def backend(checkpoint: Checkpoint, kv_dtype: KVDtypeName) -> CpuBackend:
    engine = engine_config("cpu", EngineOptions(slots=2, max_batch_tokens=64, kv_dtype=kv_dtype), checkpoint)
    return CpuBackend(checkpoint.config, checkpoint.tensors, engine, tokenizer_size=NUM_IDS, num_blocks=POOL)


def heads_of_any_size(rows: int) -> np.ndarray:
    """[rows, KV_HEADS, HEAD_DIM], a different size each; one of them broken."""
    rng = np.random.default_rng(5)
    heads = rng.standard_normal((rows, KV_HEADS, HEAD_DIM)) * 2.0 ** rng.integers(-24, 14, (rows, KV_HEADS, 1))
    heads[3, 1, 7] = np.inf
    return heads.astype(np.float32)


def written(config: Any, kv_dtype: KVDtypeName, rows: np.ndarray, heads: np.ndarray) -> np.ndarray:
    """K and V [2, KV_HEADS, position, HEAD_DIM] of a layer of a pool of zeros in which K and then -V were put there."""
    cache = KVCache(config, POOL, kv_dtype)
    cache.write(1, 0, rows, heads)
    cache.write(1, 1, rows, -heads)
    assert not cache.tokens[0].any()
    return cache.tokens[1]


def test_heads_are_held_as_the_definition_rounds_them(checkpoint: Checkpoint):
    rows, heads = np.random.default_rng(0).permutation(16 * POOL)[:20].astype(np.int32), heads_of_any_size(20)
    wanted = np.zeros((2, KV_HEADS, 16 * POOL, HEAD_DIM), np.float32)
    for plane, values in enumerate((heads, -heads)):
        wanted[plane][:, rows] = fp8_reference.rounded(values).transpose(1, 0, 2)
    found = written(checkpoint.config, "fp8", rows, heads)
    assert np.array_equal(found, wanted, equal_nan=True)
    assert np.isnan(found).sum() == 2 * HEAD_DIM, "one head of K and of V"


def test_a_row_has_the_bits_that_it_has_alone(checkpoint: Checkpoint):
    rows, heads = np.arange(20, 40, dtype=np.int32), heads_of_any_size(20)
    together = written(checkpoint.config, "fp8", rows, heads)
    for i in range(20):
        alone = written(checkpoint.config, "fp8", rows[i : i + 1], heads[i : i + 1])
        assert np.array_equal(alone[:, :, rows[i]].view(np.uint32), together[:, :, rows[i]].view(np.uint32)), i


def test_without_fp8_heads_are_held_as_they_are(checkpoint: Checkpoint):
    rows, heads = np.arange(20, 40, dtype=np.int32), heads_of_any_size(20)
    found = written(checkpoint.config, "auto", rows, heads)[:, :, rows]
    assert np.array_equal(found, np.stack([heads, -heads]).transpose(0, 2, 1, 3))


def test_logits_are_those_of_k_and_v_that_the_definition_rounds(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
):
    """Of a prompt in two chunks, the second of which reads what the first one left, beside a neighbour."""
    ids = prompt(30)
    steps = [
        batch(Part(0, (3, 1), 0, ids[:18])),
        batch(Part(0, (3, 1), 18, ids[18:]), Part(1, (5,), 0, prompt(9, seed=1))),
    ]

    def logits(kv_dtype: KVDtypeName) -> list[np.ndarray]:
        runner = backend(checkpoint, kv_dtype)
        return [runner.logits(step) for step in steps]

    plain, found = logits("auto"), logits("fp8")
    write = KVCache.write

    matrix, n = fp8_reference.hadamard(HEAD_DIM)

    def rounding(self: KVCache, layer: int, which: int, kv_rows: np.ndarray, heads: np.ndarray) -> None:
        if which == 0:  # mixed, rounded, and mixed back, for q stays as it is
            heads = fp8_reference.rounded((heads @ matrix).astype(np.float32)) @ matrix.T / n
        else:
            heads = fp8_reference.rounded(heads)
        write(self, layer, which, kv_rows, heads.astype(np.float32))

    monkeypatch.setattr(KVCache, "write", rounding)
    for fp8, reference, exact in zip(found, logits("auto"), plain, strict=True):
        np.testing.assert_allclose(fp8, reference, rtol=1e-4, atol=1e-4)
        assert np.abs(fp8 - exact).max() > 1e-2


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
def test_a_token_takes_four_bytes_a_number_either_way(checkpoint: Checkpoint, kv_dtype: KVDtypeName):
    assert backend(checkpoint, kv_dtype).facts.kv_bytes_per_token == 4 * LAYERS * 2 * KV_HEADS * HEAD_DIM
