"""A backend on the GPU, looked at bit by bit: what the laws of bit_laws.py compare.

Their reference is one prompt, IDS, that ran in one step, alone. Before each step all activations, padding
rows included, are filled with NaN, and so is the pool before each test.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from fp8_tools import codes_of, scales_of
from seam import BLOCK, NUM_IDS, Part, batch, i32, prompt

from tinyvllm_cli.config import EngineConfig, HeldDtype, KVDtypeName
from tinyvllm_cli.model.checkpoint import Checkpoint
from tinyvllm_cli.model.storage import cache_dir
from tinyvllm_cli.types import Batch, SlotOptions

if TYPE_CHECKING:
    from tinyvllm_cli.backends.gpu.backend import GpuBackend

Bits = npt.NDArray[np.unsignedinteger[Any]]

LENGTH = 1100  # tokens of IDS: past four borders of attention's partials, which hold 256 keys each
IDS = prompt(LENGTH)
BORDERS = (0, 1, 15, 16, 17, 63, 64, 65, 255, 256, 257, 511, 512, 513, 1023, 1024, 1025)
# Positions whose logits are compared: around every border, and where steps of several rows stand.
WATCHED = sorted({p for b in BORDERS for p in range(b - 2, b + 11) if p >= 0} | set(range(480, 560)) | {699, 1099})

SLOTS, MAX_ROWS = 304, 2048
CROWD = range(1, 301)  # slots of neighbours
CROWD_BLOCKS, NUM_BLOCKS = 320, 2000  # their blocks start here; those of IDS stand below
FULL = -(-LENGTH // BLOCK)
ASCENDING = tuple(range(1, 1 + FULL))
SHUFFLED = tuple(np.random.default_rng(3).permutation(np.arange(100, CROWD_BLOCKS))[:FULL].tolist())

ACTIVATIONS = (
    "x",
    "normed",
    "qkv",
    "q",
    "attended",
    "gate_up",
    "activated",
    "picked",
    "logits",
    "partials",
    "attended_codes",
    "row_scales",
)
NAN = 0xFF  # of every byte: NaN in bf16, fp16 and float32


def bits(array: npt.NDArray[Any]) -> Bits:
    return np.ascontiguousarray(array).view(f"u{array.itemsize}")


def broken(slot: int) -> bool:
    """Whether the past of this neighbour was never written, so that all it gives is NaN."""
    return slot % 17 == 3


@dataclass(frozen=True)
class Outcome:
    """What steps of IDS gave: logits u32[V] by position; K and V as Model.kv has them, from position `start` on."""

    start: int
    logits: dict[int, Bits]
    kv: Bits


@dataclass(frozen=True)
class Row:
    """What one row of a neighbour gives."""

    logits: Bits  # u32[V]
    kv: Bits  # of one position, as Model.kv has it
    draw: tuple[int, int]  # the token, the bits of its logprob


def open_gpu(checkpoint: Checkpoint, engine: EngineConfig, num_blocks: int) -> GpuBackend:
    """Its kernels are kept in the cache of the user, so that a run of the tests compiles each once."""
    from tinyvllm_cli.backends.gpu.backend import GpuBackend
    from tinyvllm_cli.backends.gpu.loading import load_weights

    config = checkpoint.config
    fill = partial(load_weights, config=config, tensors=checkpoint.tensors)
    return GpuBackend(config, fill, engine, tokenizer_size=NUM_IDS, num_blocks=num_blocks, cache=cache_dir())


class Model:
    """A backend over a small random model."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        length: int = LENGTH,
        crowd: range = CROWD,
        kv_dtype: KVDtypeName = "auto",
        held: HeldDtype | None = None,
    ) -> None:
        """length: tokens of IDS that are ever used. crowd: slots of neighbours. held: how weights are; None: as in the
        checkpoint."""
        from tinyvllm_cli.backends.gpu.device import elem_dtype

        self.checkpoint = checkpoint
        self.length = length
        self._crowd_slots = crowd
        dtype = checkpoint.config.dtype
        engine = EngineConfig(
            slots=SLOTS, max_batch_tokens=MAX_ROWS, max_model_len=1200, dtype=held or dtype, kv_dtype=kv_dtype
        )
        self._kv_dtype = kv_dtype
        self.backend = open_gpu(checkpoint, engine, NUM_BLOCKS)
        self.elem = elem_dtype(dtype)
        self.fill(NAN)

    # ---------------------------------------------------------------- steps

    @property
    def pool(self) -> Any:
        """[block, layer, k|v, head, ...] on the device."""
        return self.backend._cache.blocks

    def fill(self, byte: int, low: int = 0, high: int = CROWD_BLOCKS) -> None:
        """Blocks low .. high - 1, by default those where IDS stands."""
        self._memset(self.pool[low:high], byte)

    def _memset(self, array: Any, byte: int) -> None:
        stream = self.backend._device.stream.ptr
        self.backend._card.cuda.memsetAsync(array.data.ptr, byte, array.nbytes, stream)

    def _poisoned(self) -> Any:
        """The backend, nothing but NaN in its activations."""
        for name in ACTIVATIONS:
            buffer = getattr(self.backend._device.buffers, name)
            if buffer is not None:
                self._memset(buffer, NAN)
        return self.backend

    def logits(self, parts: Sequence[Part], watched: Sequence[int] | None = None) -> Bits:
        """u32[R, V] of the watched rows of a step; None: of the last row of each sequence."""
        rows: Batch = batch(*parts)
        if watched is not None:
            sequence = np.searchsorted(rows.query_start_loc, watched, side="right") - 1
            rows = replace(rows, logits_indices=i32(watched), sample_slots=rows.slots[sequence])
        return bits(self._poisoned().logits(rows))

    def draw(self, parts: Sequence[Part]) -> list[tuple[int, int]]:
        """Drawn token, and the bits of its logprob, of the last row of each sequence."""
        output = self._poisoned().step(batch(*parts)).result()
        return list(zip(output.token_ids[0].tolist(), bits(output.logprobs[0]).tolist(), strict=True))

    def kv(self, blocks: Sequence[int], start: int, end: int) -> Bits:
        """[position, layer, k|v, head, ...] of positions start .. end - 1: u16[head_dim], in FP8 the codes and then the
        scale u8[head_dim + 2].
        """
        first = start // BLOCK
        planes = [self.pool[block].view(np.uint8).get() for block in blocks[first : -(-end // BLOCK)]]
        if self._kv_dtype == "fp8":
            held = np.concatenate(codes_of(np.stack(planes)), axis=-1)
        else:
            held = np.stack(planes).view(np.uint16)
        positions = held.transpose(0, 4, 1, 2, 3, 5).reshape(-1, *held.shape[1:4], held.shape[-1])
        return positions[start - first * BLOCK : end - first * BLOCK]

    def run(
        self,
        cuts: Iterable[int],
        *,
        slot: int = 0,
        blocks: Sequence[int] = ASCENDING,
        before: Sequence[Part] = (),
        after: Sequence[Part] = (),
    ) -> Outcome:
        """IDS from the first cut to the last, in steps that end at the cuts, with neighbours before and after it."""
        cuts = list(cuts)
        found: dict[int, Bits] = {}
        for start, end in pairwise(cuts):
            watched = [position for position in WATCHED if start <= position < end]
            offset = sum(len(part.tokens) for part in before) - start
            part = Part(slot, blocks[: -(-end // BLOCK)], start, IDS[start:end])
            rows = self.logits([*before, part, *after], [offset + position for position in watched])
            found |= dict(zip(watched, rows, strict=True))
        return Outcome(cuts[0], found, self.kv(blocks, cuts[0], cuts[-1]))

    # ---------------------------------------------------------------- references

    @cached_property
    def alone(self) -> Outcome:
        """IDS whole in one step, alone."""
        outcome = self.run([0, self.length])
        assert np.isfinite(np.stack([row.view(np.float32) for row in outcome.logits.values()])).all()
        fp8 = self._kv_dtype == "fp8"
        numbers = scales_of(outcome.kv[..., -2:]) if fp8 else outcome.kv.view(self.elem).astype(np.float32)
        assert np.isfinite(numbers).all()
        return outcome

    @cached_property
    def crowd(self) -> list[Part]:
        """Neighbours as they decode: short, long, broken. Drawn with options of every kind."""
        parts, block = [], CROWD_BLOCKS
        for slot in self._crowd_slots:
            length = 700 if slot % 60 == 7 else slot * 37 % 90 + 1
            ids = prompt(length + 1, seed=slot)
            blocks = range(block, block + length // BLOCK + 1)
            block = blocks.stop
            parts.append(Part(slot, blocks, length, ids[-1:]))
            self.backend.bind(slot, ids, SlotOptions(temperature=0.9, top_k=slot % 50, seed=slot, logprobs=True))
        self.fill(NAN, CROWD_BLOCKS, NUM_BLOCKS)
        written = [p for p in parts if not broken(p.slot)]
        for low in range(0, len(written), 20):
            group = written[low : low + 20]
            self.logits([Part(p.slot, p.blocks, 0, prompt(p.computed + 1, seed=p.slot)[:-1], ()) for p in group])
        return parts

    @cached_property
    def crowd_alone(self) -> list[Row]:
        """Every neighbour in a step of its own."""
        return [Row(self.logits([part])[0], self.written(part), self.draw([part])[0]) for part in self.crowd]

    def written(self, part: Part) -> Bits:
        """K and V of a row that decoded."""
        return self.kv(part.blocks, part.computed, part.computed + 1)

    # ---------------------------------------------------------------- comparisons

    def against_alone(self, case: str, found: Outcome) -> list[str]:
        """A line for K and V and for each row of logits of which a bit differs."""
        wanted = self.alone.kv[found.start : found.start + len(found.kv)]
        what = f"{case}: K and V from position {found.start}"
        lines = self.differences(what, "[position, layer, k|v, head, dim]", found.kv, wanted)
        for position, row in sorted(found.logits.items()):
            lines += self.differences(
                f"{case}: logits of position {position}", "[id]", row, self.alone.logits[position]
            )
        return lines

    def between(self, case: str, found: Row, wanted: Row) -> list[str]:
        """Lines for what differs of a neighbour's row."""
        lines = self.differences(f"{case}: logits", "[id]", found.logits, wanted.logits)
        lines += self.differences(f"{case}: K and V", "[0, layer, k|v, head, dim]", found.kv, wanted.kv)
        if found.draw != wanted.draw:
            lines.append(f"{case}: drew (id, bits of its logprob) {found.draw}, wanted {wanted.draw}")
        return lines

    def differences(self, case: str, axes: str, found: Bits, wanted: Bits) -> list[str]:
        """Nothing, or a line: the first place that differs, both values, how many differ."""
        assert found.shape == wanted.shape, f"{case}: found {found.shape}, wanted {wanted.shape}"
        different = np.argwhere(found != wanted)
        if not len(different):
            return []
        first = tuple(different[0].tolist())
        values = f"{self.shown(found[first])}, wanted {self.shown(wanted[first])}"
        return [f"{case}: {axes} {list(first)} is {values}; {len(different)} of {found.size} differ"]

    def shown(self, value: np.unsignedinteger[Any]) -> str:
        kinds: dict[int, Any] = {4: np.float32, 2: self.elem, 1: np.uint8}
        return f"{value:#x} ({value.view(kinds[value.itemsize])})"
