"""What a decoder is made of: its weights, as a backend holds them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy.typing as npt

Array = Any  # of the backend: NumPy's or CuPy's


@dataclass(frozen=True, slots=True)
class Weight:
    """A matrix [out_features, in_features] in the form a backend stores it. Only ops look inside."""

    data: Array
    scale: Array | None = None  # of formats that need one
    format: str = "float32"


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer: H hidden size, D head_dim, I intermediate size. None: the architecture has no such part."""

    attn_norm: Array  # [H]
    qkv: Weight  # [(Hq + 2 Hkv) * D, H]: q rows, k rows, v rows
    o: Weight  # [H, Hq * D]
    mlp_norm: Array  # [H]
    gate_up: Weight  # [2 I, H]: 8 gate rows, 8 up rows, 8 gate rows, ...
    down: Weight  # [H, I]
    qkv_bias: Array | None = None
    q_norm: Array | None = None  # [D]
    k_norm: Array | None = None  # [D]
    o_bias: Array | None = None
    gate_up_bias: Array | None = None  # interleaved as gate_up
    down_bias: Array | None = None


@dataclass(frozen=True, slots=True)
class Parameters:
    embed: Weight  # [V, H]
    layers: tuple[LayerWeights, ...]
    final_norm: Array  # [H]
    head: Weight  # [V, H]; the same object as embed where the model ties them


class Item(Protocol):
    """One tensor of a checkpoint; its kind is a field name of LayerWeights or Parameters."""

    @property
    def kind(self) -> str: ...
    @property
    def layer(self) -> int | None: ...
    @property
    def array(self) -> npt.NDArray[Any]: ...


def collect_parameters(items: Iterable[Item], place: Callable[[Item], Weight | Array]) -> Parameters:
    """Take tensors one at a time, each placed (copied, rounded, uploaded) before the next is asked for.

    place makes a matrix a Weight and leaves a vector (norm, bias) an array, both as the backend holds them.
    A missing or unknown kind is a TypeError of the dataclasses above: layout.py has checked the checkpoint by then.
    """
    outer: dict[str, Any] = {}
    layers: dict[int, dict[str, Any]] = {}
    for item in items:
        fields = outer if item.layer is None else layers.setdefault(item.layer, {})
        fields[item.kind] = place(item)
    outer.setdefault("head", outer["embed"])
    return Parameters(layers=tuple(LayerWeights(**layers[index]) for index in sorted(layers)), **outer)
