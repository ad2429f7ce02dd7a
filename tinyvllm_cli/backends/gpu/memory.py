"""All the memory that a backend has on its GPU: planned to the byte, taken in one piece, handed out as arrays."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from tinyvllm_cli.backends.gpu import attention, sample
from tinyvllm_cli.backends.gpu.arrays import device_array
from tinyvllm_cli.backends.gpu.cublas import padded_rows
from tinyvllm_cli.backends.gpu.device import Card, elem_dtype
from tinyvllm_cli.backends.gpu.drawn import drawn_parts, drawn_words
from tinyvllm_cli.backends.gpu.kv import plane_room
from tinyvllm_cli.backends.gpu.rows import upload_limit, widest_table
from tinyvllm_cli.backends.pool import longest_sequence, pool_bounds, wanted_length
from tinyvllm_cli.config import EngineConfig, ModelConfig
from tinyvllm_cli.errors import ModelError
from tinyvllm_cli.model.parameters import Array
from tinyvllm_cli.model.weights.layout import layer_parts

Room: TypeAlias = tuple[tuple[int, ...], npt.DTypeLike]  # shape and dtype of an array that is to be
View: TypeAlias = Callable[[int, tuple[int, ...], npt.DTypeLike], Array]  # (offset in bytes, shape, dtype)

ALIGNMENT = 256  # bytes; cudaMalloc's own
WORKSPACE = 32 << 20  # bytes for cuBLAS: what NVIDIA recommends for its largest cards
# Bytes that stay free, whatever --gpu-memory says: kernels of cuBLAS come onto the card as they are first used.
RESERVE = 256 << 20
LOGITS_MULTIPLE = 64  # columns of a row of logits, so that each row starts at a multiple of 16 bytes
OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation
F32, I32, U8 = np.dtype(np.float32), np.dtype(np.int32), np.dtype(np.uint8)


# ---------------------------------------------------------------- one piece, in parts


class Arena:
    """One piece of memory from which arrays are taken in order, each at a multiple of ALIGNMENT bytes."""

    def __init__(self, nbytes: int, view: View) -> None:
        """view: an array over the bytes from an offset on; of open_arena, or of NumPy's memory where no GPU is."""
        self.nbytes = nbytes
        self.used = 0
        self._view = view

    def take(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """An array that nothing else has. Its memory holds anything."""
        start = self.used
        self.used += room_bytes((shape, dtype))
        assert self.used <= self.nbytes, f"{self.used} bytes of {self.nbytes} planned"
        return self._view(start, shape, dtype)

    def take_all(self, rooms: Mapping[str, Room]) -> dict[str, Array]:
        return {name: self.take(*room) for name, room in rooms.items()}


def open_arena(card: Card, plan: MemoryPlan) -> tuple[Arena, int]:
    """The planned memory and its address, to be freed by the caller. ModelError where the card has no such piece."""
    try:
        address: int = card.cuda.malloc(plan.total)
    except card.cuda.CUDARuntimeError as error:
        if error.status != OUT_OF_MEMORY:
            raise
        raise ModelError(
            f"{card.name} has no {in_units(plan.total)} in one piece, with {in_units(card.free_bytes())} free now: "
            "another process may have taken some since; start again, or give a smaller --gpu-memory"
        ) from None
    return Arena(plan.total, device_view(address)), address


def device_view(address: int) -> View:
    """Arrays over the device memory that begins at an address."""
    return lambda offset, shape, dtype: device_array(address + offset, shape, dtype)


def room_bytes(room: Room) -> int:
    """Bytes of an arena that an array takes."""
    shape, dtype = room
    return -(-math.prod(shape) * np.dtype(dtype).itemsize // ALIGNMENT) * ALIGNMENT


def total_bytes(rooms: Iterable[Room]) -> int:
    return sum(map(room_bytes, rooms))


# ---------------------------------------------------------------- what is in it


def weight_rooms(config: ModelConfig, engine: EngineConfig) -> list[tuple[str, int | None, tuple[Room, ...]]]:
    """(kind, layer, rooms) of every fused tensor of model/weights/layout.py: matrices elem, norms and biases float32.
    With dtype fp8 the matrices of layers are codes, with a scale for each row.
    """
    elem = elem_dtype(engine.elem)
    embed: Room = ((config.vocab_size, config.hidden_size), elem)
    rooms: list[tuple[str, int | None, tuple[Room, ...]]] = [("embed", None, (embed,))]
    for layer in range(config.num_layers):
        for part in layer_parts(config):
            shapes = [shape for _, shape in part.tensors]
            shape = (sum(rows for rows, *_ in shapes), *shapes[0][1:])
            if len(shape) == 1:
                rooms.append((part.kind, layer, ((shape, F32),)))
            elif engine.dtype == "fp8":
                rooms.append((part.kind, layer, ((shape, U8), (shape[:1], F32))))
            else:
                rooms.append((part.kind, layer, ((shape, elem),)))
    rooms.append(("final_norm", None, (((config.hidden_size,), F32),)))
    return rooms if config.tied_head else [*rooms, ("head", None, (embed,))]


def activation_rooms(config: ModelConfig, engine: EngineConfig, max_seq_len: int) -> dict[str, Room]:
    """Fields of Buffers, but for parts of others. Rows: as many as the products of the largest step run on."""
    elem, T, R = elem_dtype(engine.elem), padded_rows(engine.max_batch_tokens, add=True), padded_rows(engine.slots)
    H, D, inner = config.hidden_size, config.head_dim, config.intermediate_size
    q, kv, places = config.num_heads, config.num_kv_heads, attention.partial_places(engine.slots, max_seq_len)
    logits = -(-config.vocab_size // LOGITS_MULTIPLE) * LOGITS_MULTIPLE
    in_fp8 = engine.dtype == "fp8"
    of_products = U8 if in_fp8 else elem
    codes: dict[str, Room] = {"attended_codes": ((T, q * D), U8), "row_scales": ((T,), F32)}
    return {
        **(codes if in_fp8 else {}),
        "x": ((T, H), F32),
        "normed": ((T, H), of_products),
        "qkv": ((T, (q + 2 * kv) * D), elem),
        "q": ((T, q, D), elem),
        "attended": ((T, q * D), elem),
        "gate_up": ((T, 2 * inner), elem),
        "activated": ((T, inner), of_products),
        "picked": ((R, H), elem),
        "logits": ((R, logits), F32),
        "partials": ((places, kv, attention.MMA_ROWS, D + 2), F32),
        "tickets": ((places, kv), I32),
        "draw_ticket": ((1,), I32),
        "drawn": ((drawn_words(R),), I32),
        "edits": sample.edits_room(config.vocab_size),
        "masks": ((R, -(-config.vocab_size // 32)), np.dtype(np.uint32)),
        "raw_logits": ((R, max_seq_len), F32),
        "scans": sample.scans_room(),
    }


def table_rooms(config: ModelConfig, engine: EngineConfig, max_seq_len: int) -> dict[str, Room]:
    """What is kept for every position: RoPE's cos and sin; of each slot, and of nobody, the token and the block."""
    rope: Room = ((max_seq_len, config.head_dim // 2), F32)
    rows = engine.slots + 1
    tokens, blocks = ((rows, max_seq_len), I32), ((rows, widest_table(max_seq_len)), I32)
    return {"cos": rope, "sin": rope, "tokens": tokens, "blocks": blocks}


def pool_room(config: ModelConfig, engine: EngineConfig, num_blocks: int) -> Room:
    """KVCache.blocks."""
    plane, dtype = plane_room(config.head_dim, engine.elem, engine.kv_dtype)
    return (num_blocks, config.num_layers, 2, config.num_kv_heads, *plane), dtype


@dataclass(frozen=True, slots=True)
class Buffers:
    """What a step works in; the next one overwrites it. T rows, R sampled ones, both padded for the products.

    H hidden size, D head_dim, Hq query heads over Hkv KV heads, I intermediate size, V vocabulary in multiples of 64.
    """

    x: Array  # f32[T, H] the residual stream
    normed: Array  # elem[T, H]; where the weights of layers are in FP8 codes
    qkv: Array  # elem[T, (Hq + 2 Hkv) D]
    q: Array  # elem[T, Hq, D]
    attended: Array  # elem[T, Hq D]
    gate_up: Array  # elem[T, 2 I]
    activated: Array  # elem[T, I], or codes
    picked: Array  # elem[R, H]
    logits: Array  # f32[R, V]
    partials: Array  # f32[places, Hkv, 16, D + 2] of attention over split keys
    tickets: Array  # i32[places, Hkv] zeros whenever no kernel runs: who merges them
    draw_ticket: Array  # i32[1] zero whenever no kernel runs: which row is drawn last
    drawn: Array  # i32[.], read back in one copy: token_ids, logprobs; where asked for, top_ids and top_logprobs too
    token_ids: Array  # i32[R]
    logprobs: Array  # f32[R] of them
    top_ids: Array  # i32[R, MAX_TOP_LOGPROBS]
    top_logprobs: Array  # f32[R, MAX_TOP_LOGPROBS]
    edits: Array  # i32[., 2] of logits, where a step has more than its upload holds
    masks: Array  # u32[R, ceil(vocab_size / 32)]
    raw_logits: Array  # f32[R, positions], of what penalties have changed while a row is drawn
    scans: Array  # u8[., ., .], what is found at a first look at few rows
    attended_codes: Array | None = None  # codes[T, Hq D] of attended, where the weights are in FP8
    row_scales: Array | None = None  # f32[T] of the codes that were made last

    @classmethod
    def take(cls, arena: Arena, config: ModelConfig, engine: EngineConfig, max_seq_len: int) -> Buffers:
        arrays = arena.take_all(activation_rooms(config, engine, max_seq_len))
        return cls(**arrays, **drawn_parts(arrays["drawn"]))


# ---------------------------------------------------------------- how much of it


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes of each part of the arena, and what the KV pool then holds."""

    weights: int
    activations: int
    tables: int
    workspace: int
    uploads: int
    pool: int
    num_blocks: int  # of the pool; block 0 is the null block
    max_seq_len: int

    @property
    def total(self) -> int:
        return self.weights + self.activations + self.tables + self.workspace + self.uploads + self.pool

    @property
    def others(self) -> int:
        """What is neither weights nor pool."""
        return self.total - self.weights - self.pool


def plan_memory(config: ModelConfig, engine: EngineConfig, *, wanted: int, num_blocks: int) -> MemoryPlan:
    """A pool of num_blocks and all that goes with it; wanted: tokens of the longest sequence that is asked for."""
    max_seq_len = longest_sequence(wanted, num_blocks)
    return MemoryPlan(
        weights=total_bytes(room for _, _, rooms in weight_rooms(config, engine) for room in rooms),
        activations=total_bytes(activation_rooms(config, engine, max_seq_len).values()),
        tables=total_bytes(table_rooms(config, engine, max_seq_len).values()),
        workspace=WORKSPACE,
        uploads=room_bytes(((upload_limit(engine, max_seq_len),), np.uint8)),
        pool=room_bytes(pool_room(config, engine, num_blocks)),
        num_blocks=num_blocks,
        max_seq_len=max_seq_len,
    )


def fit_memory(config: ModelConfig, engine: EngineConfig, free: int, num_blocks: int | None = None) -> MemoryPlan:
    """The plan with the largest pool that all slots can use, of what --gpu-memory allows of `free` bytes.

    num_blocks: of the pool, where it is not to be found out. ModelError, with the figures, where max_model_len, or any
    sequence, does not fit.
    """
    wanted = wanted_length(config, engine)
    if num_blocks is not None:
        return plan_memory(config, engine, wanted=wanted, num_blocks=num_blocks)
    fewest, most = pool_bounds(wanted, engine)
    allowed = min(allowed_bytes(engine, free), free - RESERVE)
    plan = partial(plan_memory, config, engine, wanted=wanted)
    num_blocks = bisect_right(range(1, most + 1), allowed, key=lambda size: plan(num_blocks=size).total)
    if num_blocks < fewest:
        raise ModelError(_too_large(plan(num_blocks=fewest), engine, free, allowed))
    return plan(num_blocks=num_blocks)


def allowed_bytes(engine: EngineConfig, free: int) -> int:
    """What --gpu-memory allows: so many bytes, or a share of what is free."""
    share = engine.gpu_memory
    return share if isinstance(share, int) else int(share * free)


def _too_large(needed: MemoryPlan, engine: EngineConfig, free: int, allowed: int) -> str:
    parts = {
        "for weights": needed.weights,
        "for activations and tables": needed.others,
        f"for the KV cache of one sequence of {needed.max_seq_len} tokens": needed.pool,
    }
    return (
        f"the model needs {', '.join(f'{in_units(size)} {what}' for what, size in parts.items())}, together "
        f"{in_units(needed.total)}, and the GPU has {in_units(free)} free, of which {in_units(max(0, allowed))} may be "
        f"used: give a smaller {'--max-model-len, ' if engine.max_model_len else ''}--slots or model, a larger "
        "--gpu-memory, or --backend cpu"
    )


def in_units(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.2f} MiB"
