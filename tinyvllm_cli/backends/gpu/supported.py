"""Which models the kernels of cuda/ take, and which cards."""

from __future__ import annotations

from tinyvllm_cli.backends.gpu.attention import MMA_ROWS, supports_head_dim
from tinyvllm_cli.backends.gpu.cublas import NEEDED_BY_CODES
from tinyvllm_cli.backends.gpu.device import Card
from tinyvllm_cli.backends.gpu.quantize import MAX_COLUMNS
from tinyvllm_cli.backends.gpu.sample import MAX_VOCAB
from tinyvllm_cli.config import HeldDtype, ModelConfig
from tinyvllm_cli.errors import DeviceError, ModelError

CODES_FROM = (9, 0)  # compute capability below which cuBLAS never multiplies FP8 with a scale for each row


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


def check_held(dtype: HeldDtype, config: ModelConfig, card: Card) -> None:
    """What weights in FP8 need besides: DeviceError for a card, ModelError for a shape that does not have it."""
    if dtype != "fp8":
        return
    if card.compute_capability < CODES_FROM:
        major, minor = card.compute_capability
        raise DeviceError(f"{card.name} has compute capability {major}.{minor}: {NEEDED_BY_CODES}")
    lengths = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "the width of all heads": config.num_heads * config.head_dim,
    }
    for name, value in lengths.items():
        if value % 16 or value > MAX_COLUMNS:
            raise ModelError(
                f"{name} is {value}, --dtype fp8 needs a multiple of 16 to {MAX_COLUMNS}: give --dtype bfloat16"
            )
