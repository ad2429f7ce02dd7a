"""What laws of the sample op are written with: many ways to draw, the op on a device, tokens as good as the CPU's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
from draws import Drawn
from gpu_tools import Array, OpDevice, assert_same_bits, read

from tinyvllm_cli.backends.cpu.filters import FLOAT32_MAX, filtered_ids
from tinyvllm_cli.backends.cpu.sample import gumbel, processed_logits, sample_row
from tinyvllm_cli.backends.gpu.sample import Asked, DrawOptions, edits_room, plan_draw, sample, scans_room, upload_limit
from tinyvllm_cli.types import F32, I32, MAX_TOP_LOGPROBS, U32, SlotOptions

LATE = 1_000_000  # a first position that no test reaches: until then stop_ids are masked
FILTERS: tuple[SlotOptions, ...] = (
    SlotOptions(),
    SlotOptions(temperature=9e-6, top_k=3),  # still greedy
    SlotOptions(temperature=1e-5),
    SlotOptions(temperature=1.0),
    SlotOptions(temperature=0.3),
    SlotOptions(temperature=1e30),
    SlotOptions(temperature=1e300, top_p=0.5),
    SlotOptions(temperature=1.0, top_k=1),
    SlotOptions(temperature=1.0, top_k=5),
    SlotOptions(temperature=5.0, top_k=50),
    SlotOptions(temperature=1.0, top_k=10**9),
    SlotOptions(temperature=1.0, top_p=1e-30),
    SlotOptions(temperature=1.0, top_p=0.1),
    SlotOptions(temperature=0.7, top_p=0.5),
    SlotOptions(temperature=2.0, top_p=0.9),
    SlotOptions(temperature=1.0, top_p=0.999999),
    SlotOptions(temperature=1.0, min_p=1.0),
    SlotOptions(temperature=1.5, min_p=0.01),
    SlotOptions(temperature=1.0, min_p=1e-30),
    SlotOptions(temperature=2.0, top_k=40, top_p=0.9),
    SlotOptions(temperature=3.0, top_k=400, top_p=0.8, min_p=0.1),
)


def draw(
    device: OpDevice,
    logits: F32,
    options: Sequence[SlotOptions],
    positions: Sequence[int] | I32,
    num_ids: int,
    *,
    max_seq_len: int = 64,
    slots: Sequence[int] | None = None,
    planned_ids: int | None = None,
    table: I32 | None = None,
    masks: U32 | None = None,
    mask_rows: I32 | None = None,
    targets: I32 | None = None,
    top_logprobs: int = 0,
) -> Drawn:
    """A Draw (draws.py), by the op on the device, over logits in memory with padding between the rows.

    max_seq_len: of the table, where none is given. slots: of the rows, where row r has not slot r. planned_ids: what
    plan_draw takes for num_ids. AssertionError where logits are not left as they were, or something outside of the
    outputs was written.
    """
    num_rows, vocab = len(options), logits.shape[1]
    padded = np.full((len(logits), -(-vocab // 4) * 4), np.nan, np.float32)
    padded[:, :vocab] = logits
    whole = device.upload(padded)
    rows = whole if len(logits) == num_rows else np.broadcast_to(whole, (num_rows, padded.shape[1]))
    token_ids, logprobs = device.poisoned((num_rows,), np.int32), device.poisoned((num_rows,), np.float32)
    max_seq_len = max_seq_len if table is None else table.shape[1]
    tokens = device.poisoned((num_rows, max_seq_len), np.int32, table)
    asked = Asked(targets, mask_rows, top_logprobs)
    upload = Upload(device)
    kept_options, order = DrawOptions(num_rows), np.arange(num_rows, dtype=np.int32)
    for row, option in enumerate(options):
        kept_options.bind(row, option)
    step = SimpleNamespace(
        num_sampled=num_rows,
        sample_slots=device.upload(np.array(range(num_rows) if slots is None else slots, np.int32)),
        sample_positions=device.upload(np.array(positions, np.int32)),
        draw=plan_draw(kept_options, order, np.array(positions, np.int32), asked, planned_ids or num_ids, upload),
    )
    assert upload.nbytes <= upload_limit(num_rows)
    tops = [device.poisoned((num_rows, MAX_TOP_LOGPROBS), dtype) for dtype in (np.int32, np.float32)]
    wanted = None if masks is None or step.draw.masks is None else masks[step.draw.masks]
    ticket = device.poisoned((1,), np.int32, np.zeros(1))
    ready = device.with_buffers(
        token_ids=token_ids,
        logprobs=logprobs,
        top_ids=tops[0],
        top_logprobs=tops[1],
        draw_ticket=ticket,
        edits=device.poisoned(*edits_room(vocab)),
        masks=device.poisoned((num_rows, -(-vocab // 32)), np.uint32, wanted),
        raw_logits=device.poisoned((num_rows, max_seq_len), np.float32),
        scans=device.poisoned(*scans_room()),
    )
    kept = SimpleNamespace(token_table=tokens.array)
    drawn = sample(ready, rows[:, :vocab], step, kept, num_ids=num_ids)
    assert [array.shape for array in drawn] == [(num_rows,)] * 2
    assert_same_bits("logits after sample", read(whole), padded)
    assert ticket.read() == 0
    top_ids, top_values = (top.read() for top in tops)
    assert (top_ids[:, top_logprobs:] == -1).all() and np.isnan(top_values[:, top_logprobs:]).all()
    found = (top_ids[:, :top_logprobs], top_values[:, :top_logprobs]) if top_logprobs else ()
    return Drawn(token_ids.read(), logprobs.read(), tokens.read(), *found)


class Upload:
    def __init__(self, device: OpDevice) -> None:
        self.nbytes = 0
        self._device = device

    def put(self, array: Array) -> Any:
        self.nbytes += array.nbytes
        return self._device.upload(array)


# ---------------------------------------------------------------- the tokens of the CPU


def assert_tokens(
    token_ids: I32, logits: F32, options: Sequence[SlotOptions], positions: Sequence[int] | I32, num_ids: int
) -> None:
    """Each is the CPU's, or as good: where two ids all but tie, the error of exp and log decides."""
    rows = np.broadcast_to(logits, (len(options), logits.shape[1]))
    wrong = []
    for r, (row, slot, position) in enumerate(zip(rows, options, positions, strict=True)):
        found, wanted = int(token_ids[r]), sample_row(row, slot, int(position), num_ids)
        if found != wanted and not (wanted >= 0 and as_good(row, slot, int(position), num_ids, found)):
            wrong.append(f"row {r}: token {found}, wanted {wanted}, of position {position} with {slot}")
    assert not wrong, f"V {logits.shape[1]}: {len(wrong)} of {len(options)} tokens: " + "; ".join(wrong[:5])


def as_good(logits: F32, options: SlotOptions, position: int, num_ids: int, token_id: int) -> bool:
    """Whether the token is the CPU's once borders of filters, and keys, may be off by some roundings of float32."""
    row = processed_logits(logits[:num_ids], options, position)
    for off in (1 - 2e-6, 1 + 2e-6):
        moved = replace(options, top_p=min(1.0, options.top_p * off), min_p=min(1.0, options.min_p * off))
        ids = filtered_ids(row, row.max(), moved)
        kept = np.arange(num_ids) if ids is None else ids
        with np.errstate(over="ignore"):
            scaled = row[kept] / np.float32(min(options.temperature, FLOAT32_MAX))
        keys = scaled + gumbel(options.seed, position, num_ids)[kept]
        error = 4 * np.spacing(np.abs(scaled[np.isfinite(scaled)]).max(initial=30))
        if token_id in kept and keys[kept == token_id] >= keys.max() - error:
            return True
    return False


def seeded(options: Sequence[SlotOptions], seed: int) -> list[SlotOptions]:
    words = np.random.default_rng(seed).integers(0, 2**64, len(options), np.uint64)
    return [replace(slot, seed=int(word)) for slot, word in zip(options, words, strict=True)]


def random_logits(num_rows: int, vocab: int, seed: int) -> F32:
    return np.random.default_rng(seed).normal(0, 2.5, (num_rows, vocab)).astype(np.float32)
