"""What the package shows to Python, and the example that uses it."""

import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

import tinyvllm_cli
from tinyvllm_cli import types
from tinyvllm_cli.config import EngineOptions
from tinyvllm_cli.errors import UsageError

EXAMPLE = Path(__file__).parent.parent / "examples" / "engine_loop.py"


def test_public_names_are_those_of_the_types():
    assert all(
        getattr(tinyvllm_cli, name) is getattr(types, name) for name in set(tinyvllm_cli.__all__) - {"__version__"}
    )
    with pytest.raises(AttributeError, match="no attribute 'LLM2'"):
        _ = tinyvllm_cli.LLM2


@pytest.mark.parametrize("name", ["slots", "max_model_len", "max_batch_tokens", "threads"])
def test_an_engine_of_nothing_is_refused(name: str):
    with pytest.raises(UsageError, match=f"{name} is 0, wanted at least 1"):
        EngineOptions(**{name: 0})


@pytest.mark.parametrize(("memory", "sound"), [(0.9, 1), (1.0, 1), (1, 1), (9, 1), (0.0, 0), (1.1, 0), (0, 0), (-1, 0)])
def test_the_memory_of_a_gpu_is_a_share_or_bytes(memory: float | int, sound: bool):
    with nullcontext() if sound else pytest.raises(UsageError, match=f"gpu_memory is {memory}, wanted a share"):
        EngineOptions(gpu_memory=memory)


@pytest.mark.model
def test_the_example_runs():
    run = subprocess.run([sys.executable, EXAMPLE], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "The capital of France is Paris."
