"""What the package shows to Python."""

import ast
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path

import pytest

import tinyvllm_cli
from tinyvllm_cli.config import EngineOptions
from tinyvllm_cli.errors import UsageError


def test_public_names_are_there_and_as_types_are_told():
    """`from tinyvllm_cli import X` is the X that a type checker sees."""
    tree = ast.parse(Path(str(tinyvllm_cli.__file__)).read_text())
    [checked] = [node for node in tree.body if isinstance(node, ast.If)]
    shown = {alias.name: node.module for node in checked.body for alias in node.names}  # type: ignore[attr-defined]
    assert set(tinyvllm_cli.__all__) == {*shown, "__version__"}
    assert all(getattr(tinyvllm_cli, name) is getattr(import_module(module), name) for name, module in shown.items())
    with pytest.raises(AttributeError, match="no attribute 'LLM2'"):
        _ = tinyvllm_cli.LLM2


@pytest.mark.parametrize("name", ["slots", "max_model_len", "max_batch_tokens", "threads"])
def test_an_engine_of_nothing_is_refused(name: str):
    with pytest.raises(UsageError, match=f"{name} is 0, wanted an integer from 1 to"):
        EngineOptions(**{name: 0})


@pytest.mark.parametrize(("memory", "sound"), [(0.9, 1), (1.0, 1), (1, 1), (9, 1), (0.0, 0), (1.1, 0), (0, 0), (-1, 0)])
def test_the_memory_of_a_gpu_is_a_share_or_bytes(memory: float | int, sound: bool):
    with nullcontext() if sound else pytest.raises(UsageError, match=f"gpu_memory is {memory}, wanted a share"):
        EngineOptions(gpu_memory=memory)
