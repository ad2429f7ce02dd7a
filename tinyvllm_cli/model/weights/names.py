"""Tensor names: GGUF's, and those of Hugging Face that everything else uses."""

from __future__ import annotations

import re

TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GGUF_NAME = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")


def hf_name(gguf_name: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight; a name that is not known stays as it is."""
    match = _GGUF_NAME.fullmatch(gguf_name)
    if match is None:
        return gguf_name
    layer, part, end = match.groups()
    known = TOP.get(part) if layer is None else LAYER.get(part)
    if known is None:
        return gguf_name
    return f"{known}.{end}" if layer is None else f"model.layers.{layer}.{known}.{end}"
