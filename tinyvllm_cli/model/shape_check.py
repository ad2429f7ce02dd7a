"""The checks that a model's numbers must pass, whatever file they come from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from tinyvllm_cli.config import ModelConfig, RopeConfig
from tinyvllm_cli.errors import ModelError
from tinyvllm_cli.model.weights.layout import INTERLEAVE

MAX_LAYERS = 1000
MAX_SIZE = 2**31 - 1  # positions and ids cross the seam as i32


def checked(config: ModelConfig, path: Path, keys: Mapping[str, str]) -> ModelConfig:
    """The config itself; ModelError that starts with the file's name where a number makes no model. keys: what the file
    calls the fields of a config and of its RoPE, where it does not call them the same.
    """
    key = _Keys(keys)
    sizes = ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size", "max_position")
    for name, most in {**dict.fromkeys(sizes, MAX_SIZE), "num_layers": MAX_LAYERS}.items():
        value = getattr(config, name)
        if not 1 <= value <= most:
            raise ModelError(f"{path}: {key[name]} is {value}, wanted 1 to {most}")
    if config.num_heads % config.num_kv_heads:
        raise ModelError(
            f"{path}: {key['num_heads']} is {config.num_heads}, wanted a multiple of {key['num_kv_heads']}, "
            f"which is {config.num_kv_heads}"
        )
    if config.head_dim % 2:
        raise ModelError(f"{path}: {key['head_dim']} is {config.head_dim}, wanted an even number (RoPE turns pairs)")
    if config.intermediate_size % INTERLEAVE:
        raise ModelError(
            f"{path}: {key['intermediate_size']} is {config.intermediate_size}, wanted a multiple of {INTERLEAVE}"
        )
    if not (config.rms_norm_eps >= 0 and math.isfinite(config.rms_norm_eps)):
        raise ModelError(f"{path}: {key['rms_norm_eps']} is {config.rms_norm_eps}, wanted a small positive number")
    _check_rope(config.rope, config.head_dim, path, key)
    return config


class _Keys(dict[str, str]):
    """What a file calls a field: the same, where it is not said."""

    def __missing__(self, field: str) -> str:
        return field


def _check_rope(rope: RopeConfig, head_dim: int, path: Path, key: _Keys) -> None:
    original = rope.original_max_position
    if not 1 <= original <= MAX_SIZE:
        raise ModelError(f"{path}: {key['original_max_position']} is {original}, wanted 1 to {MAX_SIZE}")
    for name in ("theta", "factor", "low_freq_factor", "high_freq_factor"):
        value = getattr(rope, name)
        if not (value > 0 and math.isfinite(value)):
            raise ModelError(f"{path}: {key[name]} is {value}, wanted a positive number")
    if rope.high_freq_factor <= rope.low_freq_factor:
        raise ModelError(
            f"{path}: RoPE high_freq_factor {rope.high_freq_factor} is not above low_freq_factor {rope.low_freq_factor}"
        )
    factors = rope.freq_factors
    if factors is None:
        return
    if len(factors) != head_dim // 2:
        raise ModelError(f"{path}: {len(factors)} RoPE frequency factors, wanted {head_dim // 2}")
    if not all(factor > 0 and math.isfinite(factor) for factor in factors):
        raise ModelError(f"{path}: RoPE frequency factors hold {min(factors)}, wanted positive numbers")
