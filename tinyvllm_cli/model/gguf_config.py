"""The shape of a model from the metadata of its GGUF file."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tinyvllm_cli.config import ModelConfig, RopeConfig
from tinyvllm_cli.errors import ModelError
from tinyvllm_cli.model.shape_check import checked
from tinyvllm_cli.model.weights.gguf import GGUFFile

ARCHITECTURES = ("llama", "qwen2", "qwen3")
ROPE_FACTORS = "rope_freqs.weight"  # Llama 3.1 and later keep their RoPE scaling in this tensor
PLAIN = ("F32", "F16", "BF16")

# Where the fields of ModelConfig and of RopeConfig come from.
KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_layers": "block_count",
    "num_heads": "attention.head_count",
    "num_kv_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "theta": "rope.freq_base",
    "factor": "rope.scaling.factor",
}

# Metadata of other architectures that changes every answer, with the values at which it does not.
NEUTRAL: dict[str, tuple[float, ...]] = {
    "logit_scale": (0, 1),
    "embedding_scale": (0, 1),
    "residual_scale": (0, 1),
    "rope.scaling.attn_factor": (0, 1),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "attention.causal": (True,),
    "use_parallel_residual": (False,),
}


def gguf_config(file: GGUFFile) -> ModelConfig:
    """ModelError for an architecture or RoPE scaling that is not supported and for metadata that makes no model."""
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        raise ModelError(f"{file.path}: architecture {architecture!r}, wanted one of {', '.join(ARCHITECTURES)}")
    meta = _Metadata(file, architecture)
    _refuse_unsupported(meta)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{file.path}: tensor token_embd.weight is missing: a file of a vocabulary, not of a model")
    hidden, heads = meta.integer(KEYS["hidden_size"]), meta.integer(KEYS["num_heads"])
    head_dim = meta.integer(KEYS["head_dim"], hidden // max(heads, 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        if meta.integer(key, head_dim) != head_dim:
            raise meta.error(key, meta.integer(key), f"the head size {head_dim}")
    _refuse_other_sums(meta, head_dim)
    config = ModelConfig(
        architecture=architecture,
        hidden_size=hidden,
        intermediate_size=meta.integer(KEYS["intermediate_size"]),
        num_layers=meta.integer(KEYS["num_layers"]),
        num_heads=heads,
        num_kv_heads=meta.integer(KEYS["num_kv_heads"], heads),
        head_dim=head_dim,
        vocab_size=embedding.shape[0],
        max_position=meta.integer(KEYS["max_position"]),
        rms_norm_eps=meta.number(KEYS["rms_norm_eps"]),
        rope=_rope(meta),
        tied_head="output.weight" not in file.tensors,
        qkv_bias=architecture == "qwen2" or "blk.0.attn_q.bias" in file.tensors,
        o_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        qk_norm=architecture == "qwen3",
    )
    return checked(config, file.path, meta.names())


def gguf_quantization(file: GGUFFile) -> str | None:
    """The quantized type that most bytes are of, None where no tensor is quantized."""
    nbytes: dict[str, int] = {}
    for tensor in file.tensors.values():
        nbytes[tensor.type] = nbytes.get(tensor.type, 0) + tensor.nbytes
    quantized = {type: n for type, n in nbytes.items() if type not in PLAIN}
    return max(quantized, key=lambda type: quantized[type]) if quantized else None


def _refuse_unsupported(meta: _Metadata) -> None:
    if meta.integer("expert_count", 0):
        raise ModelError(f"{meta.file.path}: a mixture of {meta.integer('expert_count')} experts, wanted a dense model")
    window, context = meta.integer("attention.sliding_window", 0), meta.integer(KEYS["max_position"])
    if 0 < window < context:
        raise ModelError(f"{meta.file.path}: sliding-window attention over {window} tokens is not supported")


def _refuse_other_sums(meta: _Metadata, head_dim: int) -> None:
    """Metadata that asks for another sum than the decoder's."""
    neutral = NEUTRAL | {"attention.scale": (0, 1 / math.sqrt(max(head_dim, 1)))}
    for key, values in neutral.items():
        found = meta.get(key, values[0])
        if not isinstance(found, int | float) or not any(math.isclose(found, v, rel_tol=1e-6) for v in values):
            raise meta.error(key, found, f"{values[-1]:g}")


def _rope(meta: _Metadata) -> RopeConfig:
    factor = meta.number(KEYS["factor"], meta.number("rope.scale_linear", 1.0))
    # Files from before rope.scaling.type have the factor of linear scaling alone.
    type = meta.get("rope.scaling.type", "none" if factor == 1.0 else "linear")
    if not isinstance(type, str) or type not in ("none", "linear"):
        raise ModelError(f"{meta.file.path}: RoPE scaling {type!r}, wanted none, linear or a tensor {ROPE_FACTORS}")
    theta, factors = meta.number(KEYS["theta"], 10_000.0), _freq_factors(meta.file)
    if type == "none":
        return RopeConfig(theta, freq_factors=factors)
    return RopeConfig(theta, "linear", factor, freq_factors=factors)


def _freq_factors(file: GGUFFile) -> tuple[float, ...] | None:
    tensor = file.tensors.get(ROPE_FACTORS)
    if tensor is None:
        return None
    if tensor.type != "F32":
        raise ModelError(f"{file.path}: tensor {ROPE_FACTORS} has type {tensor.type}, wanted F32")
    return tuple(file.data(ROPE_FACTORS).view("<f4").tolist())


class _Metadata:
    """The metadata of one architecture, with its types checked."""

    def __init__(self, file: GGUFFile, architecture: str) -> None:
        self.file, self.architecture = file, architecture

    def get(self, key: str, default: Any = None) -> Any:
        return self.file.metadata.get(f"{self.architecture}.{key}", default)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            value = value[0].item()  # one number a layer, all the same
        if type(value) is not int:
            raise self.error(key, value, "an integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if type(value) not in (int, float):
            raise self.error(key, value, "a number")
        return float(value)

    def names(self) -> dict[str, str]:
        """What the file calls fields of ModelConfig and of RopeConfig."""
        names = {field: self.name(key) for field, key in KEYS.items()}
        if self.get(KEYS["head_dim"]) is None:
            names["head_dim"] = f"{names['hidden_size']} // {names['num_heads']}"
        if self.get(KEYS["factor"]) is None:
            names["factor"] = self.name("rope.scale_linear")
        return names | {"vocab_size": "the number of rows of tensor token_embd.weight"}

    def name(self, key: str) -> str:
        return f"metadata {self.architecture}.{key}"

    def error(self, key: str, value: Any, wanted: str) -> ModelError:
        found = "is missing" if value is None else f"is {value!r}"[:80]
        return ModelError(f"{self.file.path}: {self.name(key)} {found}, wanted {wanted}")
