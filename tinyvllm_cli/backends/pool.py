"""How many KV blocks a pool has, and how long a sequence may become: the same arithmetic for every backend."""

from __future__ import annotations

from tinyvllm_cli.config import BLOCK_SIZE, EngineConfig, EngineOptions, ModelConfig
from tinyvllm_cli.errors import UsageError

MAX_BLOCKS = 2**31 // BLOCK_SIZE  # rows of the pool are counted in i32


def wanted_length(config: ModelConfig, engine: EngineOptions) -> int:
    """Tokens of the longest sequence that is asked for. UsageError where it is more than the model's context."""
    wanted = engine.max_model_len or config.max_position
    if wanted > config.max_position:
        raise UsageError(f"--max-model-len {wanted} is more than the model's context, at most {config.max_position}")
    return wanted


def pool_bounds(wanted: int, engine: EngineConfig) -> tuple[int, int]:
    """The fewest blocks a pool may have, and the most that are of use; both count block 0, the null block.

    Fewest: one sequence of max_model_len, or any sequence where that is not given. Most: each slot with a sequence of
    `wanted` tokens.
    """
    blocks_each = -(-wanted // BLOCK_SIZE)
    fewest = 1 + (blocks_each if engine.max_model_len else 1)
    return fewest, min(1 + engine.slots * blocks_each, MAX_BLOCKS)


def longest_sequence(wanted: int, num_blocks: int) -> int:
    """Tokens of the longest sequence that a pool holds."""
    return min(wanted, (num_blocks - 1) * BLOCK_SIZE)
