"""The GGUF twin of a tiny model folder, written with the gguf package as llama.cpp's converter lays it out."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file
from tiny import BOS_ID, EOS_IDS, PLAIN_ADDED, SPECIAL_TOKENS, byte_alphabet

F32 = npt.NDArray[np.float32]

TENSOR_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
TOP_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write_gguf_twin(folder: Path, path: Path) -> Path:
    """Write the model of a folder made by make_tiny_model (one file, float32) as a GGUF file of F32 tensors."""
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, config["model_type"])
    _add_shape(writer, config)
    _add_tokenizer(writer, config)
    for name, tensor in load_file(folder / "model.safetensors").items():
        writer.add_tensor(gguf_name(name), _interleaved_heads(name, tensor, config))
    rope = config.get("rope_parameters", {})
    if rope.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(rope, config["head_dim"]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in TOP_NAMES:
        return f"{TOP_NAMES[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{TENSOR_NAMES[part]}.{kind}"


def _interleaved_heads(name: str, tensor: F32, config: dict[str, Any]) -> F32:
    """Architecture llama rotates neighbours (2i, 2i + 1), so the rows of q and k are stored in that order."""
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
    if config["model_type"] != "llama" or heads is None:
        return tensor
    halves = tensor.reshape(config[heads], 2, -1, *tensor.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(tensor.shape)


def llama3_factors(rope: dict[str, Any], head_dim: int) -> F32:
    """What each inverse frequency is divided by: the Llama 3.1 scaling, written into the file instead of named."""
    factors = []
    for i in range(0, head_dim, 2):
        turns = rope["original_max_position_embeddings"] / (2 * math.pi * rope["rope_theta"] ** (i / head_dim))
        smooth = (turns - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
        smooth = min(max(smooth, 0.0), 1.0)
        factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, dtype=np.float32)


def _add_shape(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])


def _add_tokenizer(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    tokens = [*SPECIAL_TOKENS, *byte_alphabet()]
    unused = [f"[PAD{i}]" for i in range(len(tokens), config["vocab_size"])]
    types = [gguf.TokenType.USER_DEFINED if t in PLAIN_ADDED else gguf.TokenType.CONTROL for t in SPECIAL_TOKENS]
    types += [gguf.TokenType.NORMAL] * 256 + [gguf.TokenType.UNUSED] * len(unused)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens + unused)
    writer.add_token_types(types)
    writer.add_bos_token_id(BOS_ID)
    writer.add_eos_token_id(EOS_IDS[0])
    writer.add_eot_token_id(EOS_IDS[1])
    writer.add_add_bos_token(True)
