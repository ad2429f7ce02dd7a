"""What laws over the seam are written with: a backend to look into, steps, and sequences as an engine drives them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tinyvllm_cli.backends.base import Backend
from tinyvllm_cli.types import Batch, SlotOptions

BLOCK = 16
NUM_IDS = 264  # of the tokenizer; the vocabulary is padded beyond
GREEDY = SlotOptions()


@dataclass(frozen=True)
class Subject:
    """How to make a backend over a tiny model, and how to look inside."""

    make: Callable[..., Backend]  # make(slots=, num_blocks=, max_batch_tokens=, max_in_flight=)
    fill: Callable[[Backend, float, int | None], None]  # the KV of one block, or of the whole pool
    kv: Callable[[Backend, int], npt.NDArray[np.float32]]  # (backend, block) -> [layer, k|v, kv_head, BLOCK, head_dim]
    tokens: Callable[[Backend, int], npt.NDArray[np.int32]]  # (backend, slot) -> the row of the token table
    exact: bool = False  # whether a row has the same bits in any batch, and not only the same tokens
    kv_rtol: float = 1e-7  # by how much K and V may differ where they are not exact: a share of the number

    def fresh(self, **limits: int) -> Backend:
        backend = self.make(**({"slots": 8, "num_blocks": 40, "max_batch_tokens": 64, "max_in_flight": 1} | limits))
        self.fill(backend, np.nan, None)
        return backend


def i32(values: Any) -> npt.NDArray[np.int32]:
    return np.array(values, dtype=np.int32)


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(8, NUM_IDS, length).tolist()


@dataclass
class Part:
    """One sequence of a step: its new tokens from `computed` on, and how many times its last row is sampled."""

    slot: int
    blocks: Sequence[int]
    computed: int
    tokens: Sequence[int]
    samples: Sequence[int] | None = None  # slots that sample its last row; None: its own

    def sampled(self) -> Sequence[int]:
        return [self.slot] if self.samples is None else self.samples


def batch(*parts: Part) -> Batch:
    ends = np.cumsum([len(part.tokens) for part in parts])
    width = max(len(part.blocks) for part in parts)
    return Batch(
        query_start_loc=i32([0, *ends]),
        slots=i32([part.slot for part in parts]),
        block_tables=i32([[*part.blocks, *[0] * (width - len(part.blocks))] for part in parts]),
        num_computed=i32([part.computed for part in parts]),
        token_ids=i32([token for part in parts for token in part.tokens]),
        logits_indices=i32([end - 1 for part, end in zip(parts, ends, strict=True) for _ in part.sampled()]),
        sample_slots=i32([slot for part in parts for slot in part.sampled()]),
    )


def step(backend: Backend, *parts: Part) -> list[int]:
    return backend.step(batch(*parts)).result().token_ids[0].tolist()


@dataclass
class Run:
    """One sequence as an engine drives it."""

    ids: list[int]
    slot: int = 0
    blocks: Sequence[int] = (1, 2, 3, 4)
    options: SlotOptions = GREEDY
    out: list[int] = field(default_factory=list)

    def prefill(self, backend: Backend, chunk: int = 64) -> None:
        """The prompt in chunks; only the last of them samples."""
        backend.bind(self.slot, self.ids, self.options)
        for start in range(0, len(self.ids), chunk):
            tokens = self.ids[start : start + chunk]
            last = start + chunk >= len(self.ids)
            self.out += step(backend, Part(self.slot, self.blocks, start, tokens, None if last else ()))

    def part(self) -> Part:
        return Part(self.slot, self.blocks, len(self.ids) + len(self.out) - 1, self.out[-1:])

    def decode(self, backend: Backend, count: int) -> list[int]:
        for _ in range(count):
            self.out += step(backend, self.part())
        return self.out


def alone(subject: Subject, ids: list[int], count: int = 6, options: SlotOptions = GREEDY) -> list[int]:
    """What a sequence answers in a backend of its own."""
    run, backend = Run(ids, options=options), subject.fresh()
    run.prefill(backend)
    return run.decode(backend, count)


def positions_of_kv(subject: Subject, backend: Backend, blocks: Sequence[int]) -> npt.NDArray[np.float32]:
    """[layer, k|v, kv_head, position, head_dim]"""
    return np.concatenate([subject.kv(backend, block) for block in blocks], axis=3)
