"""tinyvllm: batch inference for Llama-family language models from the command line."""

TYPE_CHECKING = False  # that of typing, which takes a while to import: ^C would come before __main__ sees to it
if TYPE_CHECKING:
    from tinyvllm_cli.api import Request, SamplingParams
    from tinyvllm_cli.errors import DeviceError, ModelError, RequestError, TinyvllmError, UsageError
    from tinyvllm_cli.llm import LLM
    from tinyvllm_cli.types import Choice, Completion, Delta, Failure, Message, Score

__version__ = "0.1.0"

_PUBLIC = {
    "tinyvllm_cli.llm": ("LLM",),
    "tinyvllm_cli.api": ("Request", "SamplingParams"),
    "tinyvllm_cli.types": ("Choice", "Completion", "Delta", "Failure", "Message", "Score"),
    "tinyvllm_cli.errors": ("DeviceError", "ModelError", "RequestError", "TinyvllmError", "UsageError"),
}
__all__ = [
    "LLM",
    "Choice",
    "Completion",
    "Delta",
    "DeviceError",
    "Failure",
    "Message",
    "ModelError",
    "Request",
    "RequestError",
    "SamplingParams",
    "Score",
    "TinyvllmError",
    "UsageError",
    "__version__",
]


def __getattr__(name: str) -> object:
    """Public names are imported when they are used, so that `tinyvllm --help` waits for none of them."""
    from importlib import import_module

    for module, names in _PUBLIC.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
