"""On the card: each op of each architecture beside NumPy's on the same inputs, and a broken op named."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from architectures import ARCHITECTURES
from broken_ops import OPS, broken
from tiny import TOKENIZER_SIZE, make_tiny_model

from tinyvllm_cli.backends.gpu.parity import Comparison, compare_prompts, worst_by_op
from tinyvllm_cli.config import DtypeName, EngineConfig
from tinyvllm_cli.model.checkpoint import open_checkpoint
from tinyvllm_cli.model.storage import known_cache_dir

pytestmark = pytest.mark.gpu

# Within a block of KV, within a tile of keys, past the part of a sequence that attention takes at once.
LENGTHS = (9, 60, 530)
NUM_DECODES = 3


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(8, TOKENIZER_SIZE, length).tolist() for length in LENGTHS]


def open_tiny(folder: Path, dtype: DtypeName, **model: Any) -> Any:
    from tinyvllm_cli.backends.gpu.backend import open_gpu_backend

    checkpoint = open_checkpoint(make_tiny_model(folder, **model))
    engine = EngineConfig(slots=len(LENGTHS), max_model_len=544, max_batch_tokens=640, dtype=dtype)
    return open_gpu_backend(
        checkpoint.config, checkpoint.tensors, engine, tokenizer_size=TOKENIZER_SIZE, cache=known_cache_dir()
    )


def table(worst: dict[str, Comparison]) -> str:
    return "\n".join(f"{'ok' if found.ok else 'NO'} {op}: {found}" for op, found in worst.items())


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_op_is_within_its_tolerance(name, dtype, tmp_path):
    from tinyvllm_cli.backends.gpu import ops

    with closing(open_tiny(tmp_path, dtype, **ARCHITECTURES[name] | {"head_dim": 64})) as backend:
        comparisons = compare_prompts(backend, prompts(), NUM_DECODES, ops)
    worst = worst_by_op(comparisons)
    assert list(worst) == OPS
    first = next((f"{found.op}: {found}" for found in comparisons if not found.ok), None)
    assert first is None, f"first: {first}\nworst of each op:\n{table(worst)}"


@pytest.mark.parametrize("head_dim", [80, 96, 128, 256])
def test_every_op_is_within_its_tolerance_for_other_heads(head_dim, tmp_path):
    from tinyvllm_cli.backends.gpu import ops

    with closing(open_tiny(tmp_path, "bfloat16", head_dim=head_dim)) as backend:
        worst = worst_by_op(compare_prompts(backend, prompts(), NUM_DECODES, ops))
    assert all(found.ok for found in worst.values()), table(worst)


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with closing(open_tiny(tmp_path_factory.mktemp("model"), "bfloat16", head_dim=64)) as backend:
        yield backend


def one_element_changed(op: Any, *args: Any, **kwargs: Any) -> Any:
    """The last element of what the op gives, or of the x that it adds to, is another."""
    result = op(*args, **kwargs)
    array = args[1] if result is None else result[0] if isinstance(result, tuple) else result
    if len(array):  # a step may sample no row
        stream, row = args[0].stream, array[-1:]
        host = row.get(stream=stream)
        host.reshape(-1)[-1] += 1
        row.set(host, stream=stream)
        stream.synchronize()
    return result


@pytest.mark.parametrize("op", OPS)
def test_a_broken_op_is_named_and_no_other(op, backend):
    from tinyvllm_cli.backends.gpu import ops

    comparisons = compare_prompts(backend, prompts(), NUM_DECODES, broken(op, one_element_changed, ops))
    assert {found.op for found in comparisons if not found.ok} == {op}, table(worst_by_op(comparisons))
