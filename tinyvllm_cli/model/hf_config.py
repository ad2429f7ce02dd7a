"""The shape of a model from the config.json of a folder in Hugging Face layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import msgspec

from tinyvllm_cli.config import ModelConfig, RopeConfig
from tinyvllm_cli.errors import ModelError
from tinyvllm_cli.model.json_file import read_json
from tinyvllm_cli.model.shape_check import checked

LLAMA, MISTRAL, QWEN2, QWEN3 = "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"
ARCHITECTURES = (LLAMA, MISTRAL, QWEN2, QWEN3)
MISTRAL_WINDOW = 4096  # what MistralConfig of transformers takes where the file has no sliding_window

# What config.json calls fields of ModelConfig and of RopeConfig.
KEYS = {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "max_position": "max_position_embeddings",
    "theta": "rope_theta",
    "factor": "RoPE factor",
    "low_freq_factor": "RoPE low_freq_factor",
    "high_freq_factor": "RoPE high_freq_factor",
    "original_max_position": "original_max_position_embeddings",
}

T = TypeVar("T")


class Rope(msgspec.Struct):
    """rope_parameters of transformers 5, or rope_scaling of older folders."""

    rope_type: str | None = None
    type: str | None = None  # the oldest name of rope_type
    rope_theta: float | None = None
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None
    partial_rotary_factor: float = 1.0


class HFConfig(msgspec.Struct):
    """The keys of config.json that say what is computed; all others are left alone."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    architectures: list[str] | str | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    rope_theta: float = 10_000.0
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    original_max_position_embeddings: int | None = None
    partial_rotary_factor: float = 1.0
    sliding_window: int | msgspec.UnsetType | None = msgspec.UNSET
    use_sliding_window: bool = False
    layer_types: list[str] | None = None
    quantization_config: dict[str, object] | None = None
    eos_token_id: Any = None


class Identity(msgspec.Struct):
    """The one key of config.json that every architecture has."""

    architectures: list[str] | str | None = None


def read_config(path: Path) -> HFConfig:
    """A config.json. ModelError where it is of an architecture that is not supported or lacks a key of one that is."""
    _architecture(read_json(path, Identity).architectures, path)
    return read_json(path, HFConfig)


def model_config(config: HFConfig, path: Path) -> ModelConfig:
    """The model that the config.json at `path` describes; its dtype is left to the weight files.

    ModelError for an architecture, activation, RoPE type, attention or quantization that is not supported and for
    numbers that make no model.
    """
    architecture = _architecture(config.architectures, path)
    _refuse_unsupported(config, path)
    _refuse_sliding_window(config, architecture, path)
    attention_bias = architecture in (LLAMA, QWEN3) and config.attention_bias
    model = ModelConfig(
        architecture=architecture,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=_or(config.num_key_value_heads, config.num_attention_heads),
        head_dim=_or(config.head_dim, config.hidden_size // max(config.num_attention_heads, 1)),
        vocab_size=config.vocab_size,
        max_position=config.max_position_embeddings,
        rms_norm_eps=config.rms_norm_eps,
        rope=_rope(config, path),
        tied_head=config.tie_word_embeddings,
        qkv_bias=architecture == QWEN2 or attention_bias,
        o_bias=attention_bias,
        mlp_bias=architecture == LLAMA and config.mlp_bias,
        qk_norm=architecture == QWEN3,
    )
    derived = {} if config.head_dim is not None else {"head_dim": "hidden_size // num_attention_heads"}
    return checked(model, path, KEYS | derived)


def _architecture(names: list[str] | str | None, path: Path) -> str:
    listed = [names] if isinstance(names, str) else names or []
    if len(listed) != 1 or listed[0] not in ARCHITECTURES:
        found = ", ".join(map(repr, listed)) or "not named"
        raise ModelError(f"{path}: architecture {found}, wanted {' or '.join(ARCHITECTURES)}")
    return listed[0]


def _refuse_unsupported(config: HFConfig, path: Path) -> None:
    if config.quantization_config is not None:
        method = config.quantization_config.get("quant_method", "of no name")
        raise ModelError(f"{path}: quantization_config {method!r}, wanted plain weights or a GGUF file")
    if config.hidden_act != "silu":
        raise ModelError(f"{path}: hidden_act is {config.hidden_act!r}, wanted 'silu'")


def _refuse_sliding_window(config: HFConfig, architecture: str, path: Path) -> None:
    """Only a window that the context never reaches is harmless."""
    if architecture == MISTRAL:
        window = config.sliding_window
        window = MISTRAL_WINDOW if isinstance(window, msgspec.UnsetType) else window
        if window is not None and window < config.max_position_embeddings:
            raise ModelError(f"{path}: sliding_window is {window}, wanted null: only full attention is supported")
    kinds = {kind for kind in config.layer_types or () if kind != "full_attention"}
    if config.use_sliding_window or kinds:
        found = f"layer type {min(kinds)!r}" if kinds else "use_sliding_window true"
        raise ModelError(f"{path}: {found}, wanted full attention in every layer")


def _rope(config: HFConfig, path: Path) -> RopeConfig:
    """From rope_parameters, or rope_scaling and rope_theta of older folders. transformers 5 takes rope_scaling where
    both are there, other tools do not: they have to agree.
    """
    given = [_present(values) for values in (config.rope_scaling, config.rope_parameters)]
    ropes = {_rope_of(values, config, path) for values in given if values} or {_rope_of({}, config, path)}
    if len(ropes) > 1:
        raise ModelError(f"{path}: rope_scaling and rope_parameters do not say the same: take one of them out")
    return ropes.pop()


def _present(values: dict[str, Any] | None) -> dict[str, Any]:
    return {key: value for key, value in (values or {}).items() if value is not None}


def _rope_of(values: dict[str, Any], config: HFConfig, path: Path) -> RopeConfig:
    """The RoPE of one of the two keys, with the top-level keys that belong to it."""
    for key, value in values.items():
        if isinstance(value, dict):
            raise ModelError(f"{path}: RoPE parameters of their own for {key!r}, wanted the same for every layer")
    try:
        rope = msgspec.convert(values, Rope)
    except msgspec.ValidationError as error:
        raise ModelError(f"{path}: RoPE parameters: {error}") from None
    partial = {config.partial_rotary_factor, rope.partial_rotary_factor} - {1.0}
    if partial:
        raise ModelError(f"{path}: partial_rotary_factor is {partial.pop()}, wanted 1")
    theta = _or(rope.rope_theta, config.rope_theta)
    type = _or(rope.rope_type, rope.type)
    unnamed = sorted(values.keys() - {"rope_theta", "partial_rotary_factor"}) if type is None else []
    match "default" if type is None and not unnamed else type:
        case "default":
            return RopeConfig(theta)
        case "linear":
            return RopeConfig(theta, "linear", _need(rope.factor, "factor", path))
        case "llama3":
            original = _or(rope.original_max_position_embeddings, config.max_position_embeddings)
            return RopeConfig(
                theta,
                "llama3",
                _need(rope.factor, "factor", path),
                _need(rope.low_freq_factor, "low_freq_factor", path),
                _need(rope.high_freq_factor, "high_freq_factor", path),
                _or(config.original_max_position_embeddings, original),  # as transformers: the top-level key wins
            )
    found = f"not named beside {unnamed[0]!r}" if unnamed else repr(type)
    raise ModelError(f"{path}: RoPE type {found}, wanted default, linear or llama3")


def _or(value: T | None, default: T) -> T:
    return default if value is None else value


def _need(value: T | None, name: str, path: Path) -> T:
    if value is None:
        raise ModelError(f"{path}: the RoPE scaling has no {name}")
    return value
