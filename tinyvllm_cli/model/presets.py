"""The shapes of published models by name, as their config.json has them: what random weights are made for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

HFConfig = Mapping[str, Any]  # the keys of a config.json

_LLAMA: HFConfig = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "hidden_act": "silu",
    "mlp_bias": False,
    "model_type": "llama",
    "rms_norm_eps": 1e-05,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}


def _llama_3(
    *, layers: int, hidden: int, inner: int, heads: int, head_dim: int, rope_factor: float, tied: bool
) -> HFConfig:
    """A Llama of 3.1 or later (config.json of meta-llama/Llama-3.1-8B, Llama-3.2-1B and Llama-3.2-3B)."""
    rope = {
        "factor": rope_factor,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    }
    return {
        **_LLAMA,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
        "head_dim": head_dim,
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": inner,
        "max_position_embeddings": 131072,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": 8,
        "rope_scaling": rope,
        "rope_theta": 500000.0,
        "tie_word_embeddings": tied,
        "vocab_size": 128256,
    }


PRESETS: Mapping[str, HFConfig] = {
    "llama-3.2-1b": _llama_3(layers=16, hidden=2048, inner=8192, heads=32, head_dim=64, rope_factor=32.0, tied=True),
    "llama-3.2-3b": _llama_3(layers=28, hidden=3072, inner=8192, heads=24, head_dim=128, rope_factor=32.0, tied=True),
    "llama-3.1-8b": _llama_3(layers=32, hidden=4096, inner=14336, heads=32, head_dim=128, rope_factor=8.0, tied=False),
    "smollm2-135m": {  # HuggingFaceTB/SmolLM2-135M
        **_LLAMA,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "hidden_size": 576,
        "initializer_range": 0.041666666666666664,
        "intermediate_size": 1536,
        "max_position_embeddings": 8192,
        "num_attention_heads": 9,
        "num_hidden_layers": 30,
        "num_key_value_heads": 3,
        "rope_scaling": None,
        "rope_theta": 100000,
        "tie_word_embeddings": True,
        "vocab_size": 49152,
    },
}
