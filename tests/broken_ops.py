"""The ops of the GPU with one of them broken, to see who notices."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

OPS = [  # in the order in which they run
    "embed",
    "qkv_rope_write",
    "attention",
    "out_proj_add",
    "gate_up_silu",
    "down_proj_add",
    "norm_lm_head",
    "sample",
]


def broken(name: str, spoil: Callable[..., Any], ops: Any) -> SimpleNamespace:
    """The ops with one of them replaced: spoil(op, *its arguments)."""
    functions = dict(vars(ops))
    whole = functions[name]
    functions[name] = lambda *args, **kwargs: spoil(whole, *args, **kwargs)
    return SimpleNamespace(**functions)
