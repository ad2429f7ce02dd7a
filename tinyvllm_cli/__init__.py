"""tinyvllm: batch inference for Llama-family language models from the command line."""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_PUBLIC = dict.fromkeys(("Completion", "Request", "SamplingParams"), "tinyvllm_cli.types")
__all__ = [*_PUBLIC, "__version__"]  # noqa: PLE0604  (the names of a dict)


def __getattr__(name: str) -> Any:
    """Public names are imported when they are used, so that `tinyvllm --help` waits for none of them."""
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
