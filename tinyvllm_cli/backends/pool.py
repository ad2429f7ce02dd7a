"""How many KV blocks a pool has, and how long a sequence may become: the same arithmetic for every backend."""

from __future__ import annotations

from tinyvllm_cli.config import BLOCK_SIZE, EngineConfig, ModelConfig
from tinyvllm_cli.errors import ModelError, UsageError

MAX_BLOCKS = 2**31 // BLOCK_SIZE  # rows of the pool are counted in i32


def wanted_length(config: ModelConfig, engine: EngineConfig) -> int:
    """Tokens of the longest sequence that is asked for. UsageError where it is more than the model's context."""
    wanted = engine.max_model_len or config.max_position
    if wanted > config.max_position:
        raise UsageError(f"--max-model-len {wanted} is more than the model's context, at most {config.max_position}")
    return wanted


def pool_size(wanted: int, engine: EngineConfig, *, block_bytes: int, available: int, holder: str) -> int:
    """Blocks that all slots can use at a length of `wanted`, or as many as fit into `available` bytes.

    block_bytes: of a block with its share of what grows with the positions. Block 0 is the null block, nobody's.
    ModelError, which names the bytes of `holder` ("half of the free memory"), where max_model_len, or any sequence,
    does not fit.
    """
    blocks_each = -(-wanted // BLOCK_SIZE)
    num_blocks = min(1 + engine.slots * blocks_each, max(0, available) // block_bytes, MAX_BLOCKS)
    needed = 1 + (blocks_each if engine.max_model_len else 1)
    if num_blocks < needed:
        raise ModelError(
            f"the KV cache of one sequence needs {needed * block_bytes >> 20} MiB, {holder} is "
            f"{num_blocks * block_bytes >> 20} MiB: free some, or give a smaller --max-model-len or model"
        )
    return num_blocks


def longest_sequence(wanted: int, num_blocks: int) -> int:
    """Tokens of the longest sequence that a pool holds."""
    return min(wanted, (num_blocks - 1) * BLOCK_SIZE)
