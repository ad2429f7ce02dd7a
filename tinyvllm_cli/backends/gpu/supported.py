"""Which models the kernels of cuda/ take."""

from __future__ import annotations

from tinyvllm_cli.backends.gpu.attention import MMA_ROWS, supports_head_dim
from tinyvllm_cli.backends.gpu.sample import MAX_VOCAB
from tinyvllm_cli.config import ModelConfig
from tinyvllm_cli.errors import ModelError


def check_model(config: ModelConfig) -> None:
    """ModelError for a shape that the kernels do not take; it names the number, and the backend that takes all."""
    head_dim, hidden, inner, vocab = config.head_dim, config.hidden_size, config.intermediate_size, config.vocab_size
    group = config.num_heads // config.num_kv_heads
    rules = (
        ("head_dim", head_dim, supports_head_dim(head_dim), "a multiple of 16 to 128, of 32 to 256"),
        ("hidden_size", hidden, hidden % 8 == 0, "a multiple of 8"),
        ("intermediate_size", inner, inner % 8 == 0, "a multiple of 8"),
        ("the number of attention heads for each key-value head", group, group <= MMA_ROWS, f"at most {MMA_ROWS}"),
        ("vocab_size", vocab, vocab <= MAX_VOCAB, f"at most {MAX_VOCAB}"),
    )
    for name, value, holds, wanted in rules:
        if not holds:
            raise ModelError(f"{name} is {value}, a GPU needs {wanted}: give --backend cpu")
