"""Store the inverse frequencies and the cos and sin that transformers' rotary module gives: tests/data/rope.npz.

Run with the project's `reference` extra installed: python tests/reference/make_rope.py
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

TESTS = Path(__file__).parent.parent
sys.path.insert(0, str(TESTS))

from rope_cases import POSITIONS, ROPES  # noqa: E402

from tinyvllm_cli.config import RopeConfig  # noqa: E402


def parameters(rope: RopeConfig) -> dict[str, Any]:
    """The rope_parameters of config.json."""
    known: dict[str, Any] = {"rope_type": rope.type, "rope_theta": rope.theta}
    if rope.type != "default":
        known["factor"] = rope.factor
    if rope.type == "llama3":
        known["low_freq_factor"], known["high_freq_factor"] = rope.low_freq_factor, rope.high_freq_factor
        known["original_max_position_embeddings"] = rope.original_max_position
    return known


def main() -> None:
    stored = {"versions": np.array([f"torch {torch.__version__}", f"transformers {transformers.__version__}"])}
    for name, (rope, head_dim) in ROPES.items():
        config = transformers.LlamaConfig(
            head_dim=head_dim, max_position_embeddings=131_072, rope_parameters=parameters(rope)
        )
        module = LlamaRotaryEmbedding(config)
        cos, sin = module(torch.zeros(1, dtype=torch.float32), torch.tensor([POSITIONS]))
        stored[f"{name}.inv_freq"] = module.inv_freq.numpy()
        stored[f"{name}.cos"] = cos[0, :, : head_dim // 2].numpy()
        stored[f"{name}.sin"] = sin[0, :, : head_dim // 2].numpy()
    np.savez_compressed(TESTS / "data" / "rope.npz", **stored)


if __name__ == "__main__":
    main()
