"""The decoder forward of the Llama family, written once against a module of ops.

RMSNorm: Zhang & Sennrich 2019. RoPE: Su et al. 2021. Grouped-query attention: Ainslie et al. 2023.
SwiGLU: Shazeer 2020.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from tinyvllm_cli.model.parameters import Array, Parameters


def forward(
    ops: ModuleType,
    device: Any,
    parameters: Parameters,
    cache: Any,
    rows: Any,
    *,
    eps: float,
    rope: tuple[Array, Array],
) -> Array:
    """Logits f32[R, V] of the rows that are sampled; K and V of all T rows go into the cache.

    ops: backends/cpu/ops.py or its GPU twin. device, cache and rows are the backend's own and only handed through.
    eps: of every RMSNorm. rope: cos and sin tables f32[positions, head_dim / 2].
    """
    x = ops.embed(device, parameters.embed, rows)
    for index, layer in enumerate(parameters.layers):
        q = ops.qkv_rope_write(
            device,
            x,
            cache,
            rows,
            layer=index,
            norm=layer.attn_norm,
            eps=eps,
            qkv=layer.qkv,
            bias=layer.qkv_bias,
            q_norm=layer.q_norm,
            k_norm=layer.k_norm,
            rope=rope,
        )
        h = ops.attention(device, q, cache, rows, layer=index)
        ops.out_proj_add(device, x, h, weight=layer.o, bias=layer.o_bias)
        h = ops.gate_up_silu(device, x, norm=layer.mlp_norm, eps=eps, weight=layer.gate_up, bias=layer.gate_up_bias)
        ops.down_proj_add(device, x, h, weight=layer.down, bias=layer.down_bias)
    return ops.norm_lm_head(device, x, rows, norm=parameters.final_norm, eps=eps, head=parameters.head)
