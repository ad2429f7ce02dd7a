"""The logits of whole models on the GPU, teacher-forced: those of NumPy and of transformers, up to rounding."""

from __future__ import annotations

import math
import os
from contextlib import closing
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from architectures import ARCHITECTURES, prompts
from gpu_bits import open_gpu
from gpu_tools import UNIT
from steps import prompt_step
from tiny import TOKENIZER_SIZE, make_tiny_model

from tinyvllm_cli.backends.base import Backend
from tinyvllm_cli.backends.cpu.backend import CpuBackend
from tinyvllm_cli.config import DtypeName, EngineConfig, ModelConfig
from tinyvllm_cli.model.checkpoint import Checkpoint, open_checkpoint

pytestmark = pytest.mark.gpu

F32 = npt.NDArray[np.float32]

SCORES_DEVIATION = 4  # of q k / sqrt(D): weights of tests/tiny.py give q and k a deviation of 2
WORST_ROW = 4  # times the error of all rows: a row whose softmax hangs between two keys is off by more


def sized(arguments: dict[str, Any]) -> dict[str, Any]:
    """The model with heads of 128 where it has those, else of 64: two sizes for kernels to be compiled for."""
    if arguments.get("head_dim", 64) is None:  # hidden_size / heads
        return {**arguments, "hidden_size": 64 * arguments.get("num_attention_heads", 4)}
    return {**arguments, "head_dim": 128 if arguments.get("head_dim") == 128 else 64}


def engine(dtype: DtypeName) -> EngineConfig:
    return EngineConfig(slots=96, max_batch_tokens=128, max_model_len=128, dtype=dtype)


def teacher_forced(backend: Backend) -> F32:
    """f32[tokens, V]: logits of every position of every prompt."""
    rows = []
    for ids in prompts():
        step, every = prompt_step(ids), np.arange(len(ids), dtype=np.int32)
        rows.append(backend.logits(replace(step, logits_indices=every, sample_slots=np.zeros_like(every))))
    return np.concatenate(rows)


def gpu_logits(checkpoint: Checkpoint) -> F32:
    with closing(open_gpu(checkpoint, engine(checkpoint.config.dtype), num_blocks=16)) as backend:
        return teacher_forced(backend)


def error(found: F32, wanted: F32) -> float:
    """Root mean square of the difference, as a share of that of the logits."""
    return float(np.sqrt(np.square(found - wanted).mean() / np.square(wanted).mean()))


def tolerance(config: ModelConfig) -> float:
    """What the roundings of a model of tests/tiny.py add up to, as a share of its logits.

    u is the share a rounding is off by, with that of float32 sums as long as the model is wide. What a layer takes in
    is off by about u, q and k are off by that and by two roundings of their own, about u each; a score, their product
    at a deviation of 4, by 4 sqrt(2) u, its weight in the softmax by as great a share, and so is what attention gives.
    The five other roundings of a layer are of u / sqrt(3) each. Layers add up as independent errors do.
    """
    unit = UNIT[config.dtype] + math.sqrt(max(config.hidden_size, config.intermediate_size)) * UNIT["float32"]
    layer = math.sqrt(2 * SCORES_DEVIATION**2 + 5 / 3)
    return layer * math.sqrt(config.num_layers) * unit


def assert_near(found: F32, wanted: F32, allowed: float) -> None:
    """All rows together within the tolerance, each within WORST_ROW times as much."""
    assert found.shape == wanted.shape
    assert np.isfinite(found).all(), f"not finite at (row, id) {np.argwhere(~np.isfinite(found))[0].tolist()}"
    rows = np.sqrt(np.square(found - wanted).mean(axis=1) / np.square(wanted).mean())
    worst = int(rows.argmax())
    place = worst, int(np.abs(found - wanted)[worst].argmax())
    shown = (
        f"off by {error(found, wanted):.2e} of the logits where {allowed:.2e} is allowed; rows beyond it: "
        f"{np.flatnonzero(rows > WORST_ROW * allowed).tolist()[:20]}; the worst, row {worst}, by {rows[worst]:.2e}: "
        f"id {place[1]} has {found[place]:.5f}, wanted {wanted[place]:.5f}"
    )
    assert error(found, wanted) <= allowed and rows[worst] <= WORST_ROW * allowed, shown


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_are_those_of_numpy(name: str, dtype: DtypeName, tmp_path: Path):
    """The files hold weights of that dtype, so both sides have the same ones."""
    checkpoint = open_checkpoint(make_tiny_model(tmp_path, **sized(ARCHITECTURES[name]), dtype=dtype))
    with closing(
        CpuBackend(checkpoint.config, checkpoint.tensors, engine("float32"), tokenizer_size=TOKENIZER_SIZE)
    ) as numpy_backend:
        wanted = teacher_forced(numpy_backend)
    assert_near(gpu_logits(checkpoint), wanted, tolerance(checkpoint.config))


@pytest.mark.parametrize("name", ["llama", "llama_llama3_rope", "qwen2", "qwen3"])
def test_logits_are_nearer_to_float32_than_those_of_transformers(name: str, tmp_path: Path):
    """transformers rounds the residual stream, the norms and the logits too; both are held against its float32."""
    transformers_logits = load_reference()
    checkpoint = open_checkpoint(make_tiny_model(tmp_path, **sized(ARCHITECTURES[name]), dtype="bfloat16"))
    found = gpu_logits(checkpoint)
    wanted, rounded = (np.concatenate(transformers_logits(tmp_path, prompts(), t)) for t in ("float32", "bfloat16"))
    assert_near(found, wanted, tolerance(checkpoint.config))
    ours, theirs = error(found, wanted), error(rounded, wanted)
    assert ours <= theirs, f"off by {ours:.2e} of the logits, transformers in bfloat16 by {theirs:.2e}"


def load_reference() -> Any:
    """The function of tests/reference/gpu_logits.py. Where torch is missing the test is skipped, or fails if it must
    not be."""
    missing = [package for package in ("torch", "transformers") if find_spec(package) is None]
    if missing:
        problem = f"{' and '.join(missing)} not installed: pip install -e '.[reference]'"
        if os.environ.get("TINYVLLM_REQUIRE_GPU") == "1":
            pytest.fail(problem, pytrace=False)
        pytest.skip(problem)
    from reference.gpu_logits import logits

    return logits
