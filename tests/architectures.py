"""One tiny model per architecture, as arguments of make_tiny_model, and the prompts their logits are compared on."""

from __future__ import annotations

from typing import Any

import numpy as np
from tiny import BOS_ID, TOKENIZER_SIZE

# Every band of llama3 scaling (kept, blended, divided) holds frequencies that turn within the longest prompt.
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama_tied": {"tie_word_embeddings": True},
    "llama_biases": {"attention_bias": True, "mlp_bias": True},
    "llama_linear_rope": {"rope_theta": 5000.0, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama_llama3_rope": {"head_dim": 128, "rope_parameters": LLAMA3_ROPE},
    "llama_9_heads_over_3": {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8},
    "llama_one_kv_head": {"num_key_value_heads": 1},
    "llama_kv_head_each": {"num_key_value_heads": 4, "head_dim": None},
    "llama_wide_heads": {"head_dim": 32, "rms_norm_eps": 1e-6},
    "mistral": {"architecture": "MistralForCausalLM", "rope_theta": 1e6},
    "qwen2": {"architecture": "Qwen2ForCausalLM", "head_dim": None, "tie_word_embeddings": True},
    "qwen3": {"architecture": "Qwen3ForCausalLM", "head_dim": 32, "rms_norm_eps": 1e-6},
}


def prompts() -> list[list[int]]:
    """Ids of prompts that end within the first block of KV, on its border, and several blocks later."""
    ids = np.random.default_rng(11).integers(0, TOKENIZER_SIZE, 100).tolist()
    return [[BOS_ID, *ids[: length - 1]] for length in (1, 7, 16, 33, 90)]
