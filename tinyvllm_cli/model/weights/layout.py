"""How a decoder's tensors are fused and ordered for the ops; which tensors it has, and of what shape."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from tinyvllm_cli.config import ModelConfig
from tinyvllm_cli.errors import ModelError
from tinyvllm_cli.model.weights.source import Array, TensorSource, read_ahead

INTERLEAVE = 8  # gate and up rows alternate in groups of so many

EMBED, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"

# Tensors that change nothing where they are not used: a head that is tied; RoPE frequencies, which follow from the
# configuration (those of a GGUF file are read with it).
HARMLESS = re.compile(r"lm_head\.weight|rope_freqs\.weight|model\.(.+\.)?rotary_emb\.inv_freq")


@dataclass(frozen=True, slots=True)
class WeightItem:
    kind: str
    layer: int | None  # None: embed, head and final_norm
    array: Array  # may be a read-only view of the mapped file


@dataclass(frozen=True, slots=True)
class Part:
    """One fused tensor of a layer: the tensors it is made of, by name within the layer and shape."""

    kind: str
    tensors: tuple[tuple[str, tuple[int, ...]], ...]


def iter_weights(config: ModelConfig, tensors: TensorSource) -> Iterator[WeightItem]:
    """All weights of the model, one fused tensor at a time, read ahead in threads.

    embed [V, H], then for each layer attn_norm [H], qkv [(Hq + 2 Hkv) hd, H] (rows of q, of k, of v), qkv_bias,
    q_norm [hd], k_norm [hd], o [H, Hq hd], o_bias, mlp_norm [H], gate_up [2 I, H] (8 gate rows, 8 up rows, and so
    on), gate_up_bias, down [H, I], down_bias; then final_norm [H] and, where it is not tied, head [V, H]. What the
    architecture lacks is not there. ModelError for a tensor that is missing or of another shape.
    """
    check_tensors(config, tensors)
    parts = layer_parts(config)
    jobs = [partial(_read, tensors, "embed", None, (EMBED,))]
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        jobs += [partial(_read, tensors, p.kind, layer, tuple(prefix + name for name, _ in p.tensors)) for p in parts]
    jobs.append(partial(_read, tensors, "final_norm", None, (NORM,)))
    if not config.tied_head:
        jobs.append(partial(_read, tensors, "head", None, (HEAD,)))
    return read_ahead(jobs)


def check_tensors(config: ModelConfig, tensors: TensorSource) -> None:
    """Every tensor that the model needs is there with its shape and a known type, and no others that could matter."""
    wanted = tensor_shapes(config)
    found = tensors.names()
    for name, shape in wanted.items():
        if name not in found:
            raise ModelError(f"tensor {name!r} is missing, wanted {list(shape)} for {config.architecture}")
        if tensors.shape(name) != shape:
            raise ModelError(
                f"tensor {name!r} is {list(tensors.shape(name))}, wanted {list(shape)} by the configuration"
            )
        tensors.dtype(name)
    # A tensor that is not used would make answers wrong in silence: a bias, a norm, an adapter, an expert.
    extra = sorted(name for name in found - wanted.keys() if not HARMLESS.fullmatch(name))
    if extra:
        raise ModelError(
            f"tensor {extra[0]!r} is not part of {config.architecture} with {config.num_layers} layers "
            f"({len(extra)} such tensors): the configuration and the weights do not belong together"
        )


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Hugging Face name and shape of every tensor that the model needs."""
    shapes: dict[str, tuple[int, ...]] = {EMBED: (config.vocab_size, config.hidden_size), NORM: (config.hidden_size,)}
    if not config.tied_head:
        shapes[HEAD] = (config.vocab_size, config.hidden_size)
    parts = layer_parts(config)
    for layer in range(config.num_layers):
        shapes |= {f"model.layers.{layer}.{name}": shape for part in parts for name, shape in part.tensors}
    return shapes


def layer_parts(config: ModelConfig) -> list[Part]:
    """The fused tensors of a layer in the order in which the ops need them."""
    H, hd, inner = config.hidden_size, config.head_dim, config.intermediate_size
    q, kv = config.num_heads * hd, config.num_kv_heads * hd
    qkv = tuple(zip(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), (q, kv, kv), strict=True))
    parts: list[Part | None] = [
        Part("attn_norm", (("input_layernorm.weight", (H,)),)),
        Part("qkv", tuple((f"{name}.weight", (rows, H)) for name, rows in qkv)),
        Part("qkv_bias", tuple((f"{name}.bias", (rows,)) for name, rows in qkv)) if config.qkv_bias else None,
        Part("q_norm", (("self_attn.q_norm.weight", (hd,)),)) if config.qk_norm else None,
        Part("k_norm", (("self_attn.k_norm.weight", (hd,)),)) if config.qk_norm else None,
        Part("o", (("self_attn.o_proj.weight", (H, q)),)),
        Part("o_bias", (("self_attn.o_proj.bias", (H,)),)) if config.o_bias else None,
        Part("mlp_norm", (("post_attention_layernorm.weight", (H,)),)),
        Part("gate_up", (("mlp.gate_proj.weight", (inner, H)), ("mlp.up_proj.weight", (inner, H)))),
        Part("gate_up_bias", (("mlp.gate_proj.bias", (inner,)), ("mlp.up_proj.bias", (inner,))))
        if config.mlp_bias
        else None,
        Part("down", (("mlp.down_proj.weight", (H, inner)),)),
        Part("down_bias", (("mlp.down_proj.bias", (H,)),)) if config.mlp_bias else None,
    ]
    return [part for part in parts if part is not None]


def _read(tensors: TensorSource, kind: str, layer: int | None, names: tuple[str, ...]) -> WeightItem:
    arrays = [tensors.read(name) for name in names]
    if len(arrays) == 1:
        return WeightItem(kind, layer, arrays[0])
    if len({array.dtype for array in arrays}) > 1:  # GGUF may quantize v and not k
        arrays = [array.astype(np.float32, copy=False) for array in arrays]
    fused = _interleave(*arrays) if kind.startswith("gate_up") else np.concatenate(arrays)
    return WeightItem(kind, layer, fused)


def _interleave(gate: Array, up: Array) -> Array:
    """[I, ...] twice -> [2 I, ...]: 8 rows of gate, 8 rows of up, and so on."""
    groups = (len(gate) // INTERLEAVE, INTERLEAVE, *gate.shape[1:])
    return np.stack((gate.reshape(groups), up.reshape(groups)), axis=1).reshape(-1, *gate.shape[1:])
