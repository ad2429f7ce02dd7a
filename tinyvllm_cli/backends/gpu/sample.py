"""The `sample` op on the GPU: how each row is drawn, laid out for the kernel of cuda/sample.cu.

An edit adds a number to one logit of a row: a bias, or -inf to mask an id. Penalties, masks, targets and how many of
the likeliest ids are wanted are data of a row: a step with them launches what others launch.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tinyvllm_cli.backends.cpu.filters import FLOAT32_MAX
from tinyvllm_cli.backends.cpu.penalties import repetition_factor
from tinyvllm_cli.model.parameters import Array
from tinyvllm_cli.types import GREEDY_BELOW, I32, SlotOptions

if TYPE_CHECKING:
    from tinyvllm_cli.backends.gpu.device import Device
    from tinyvllm_cli.backends.gpu.rows import Rows, Upload
    from tinyvllm_cli.backends.gpu.slots import Slots

THREADS = 1024  # of a block: what the kernels are written for
# Blocks that take a first look at a row, where it is long and there are few of them: one block would be long about it.
SCAN_PARTS = 32
SCAN_ROWS, SCAN_VOCAB = 8, 1 << 14  # at most, and at least
SCAN_BYTES = 16  # the struct Scan in cuda/sample.cu
MAX_VOCAB = 1 << 21  # ids that fit into a rank: ID_BITS of cuda/select.cuh
ALWAYS = 2**31 - 1  # before every position
UPLOAD_EDITS = 1 << 14  # that travel with a step's other arrays; where there are more, each launch copies its own
OPTIONS = np.dtype(  # the struct Options in cuda/sample.cu
    [
        ("top_p", np.float64),
        ("seed", np.uint64),
        ("temperature", np.float32),
        ("top_k", np.int32),
        ("min_p", np.float32),
        ("padding", np.int32),
        ("repetition_penalty", np.float32),
        ("presence_penalty", np.float32),
        ("frequency_penalty", np.float32),
        ("output_start", np.int32),
        ("first_edit", np.int32),
        ("num_edits", np.int32),
        ("mask_row", np.int32),
        ("target", np.int32),
        ("logprobs", np.int32),
        ("num_top", np.int32),
    ]
)
OPTION_WORDS = OPTIONS.itemsize // 4
EDIT = np.dtype([("id", np.int32), ("value", np.float32)])  # the struct Edit


@dataclass(frozen=True, slots=True)
class Asked:
    """What a step asks of its R sampled rows, beside what their slots say; as in Batch."""

    targets: I32 | None = None  # [R]
    mask_rows: I32 | None = None  # [R]
    top_logprobs: int = 0

    def padded(self, rows: int) -> Asked:
        """With rows that ask for nothing, up to so many."""
        if self.targets is None and self.mask_rows is None:
            return self
        return Asked(_filled_up(self.targets, rows), _filled_up(self.mask_rows, rows), self.top_logprobs)


@dataclass(frozen=True, slots=True)
class Draws:
    """Rows that one launch draws, and their edits i32[., 2], each an EDIT; None: no row has one."""

    rows: slice
    edits: Any  # on the device where they fitted into the upload, else still on the host


@dataclass(frozen=True, slots=True)
class DrawPlan:
    options: Array  # device i32[R, OPTION_WORDS], each an OPTIONS; its first_edit counts from the first of its launch
    launches: tuple[Draws, ...]  # cover the R rows
    uploaded: bool  # whether the edits are on the device; there are at most UPLOAD_EDITS then, and one launch
    num_edits: int
    masks: I32 | None  # rows of the step's mask, in the order in which options count them; None: it gets no mask

    @property
    def follows_shape(self) -> bool:
        """Whether its launches, and when they come, depend on the shape of the step alone."""
        return self.masks is None and not self.num_edits


def edits_room(vocab_size: int) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and dtype of the buffer for edits that do not fit into an upload."""
    return (_edits_of_a_launch(vocab_size), 2), np.dtype(np.int32)


def scans_room() -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and dtype of the buffer for what is found at a first look."""
    return (SCAN_ROWS, SCAN_PARTS, SCAN_BYTES), np.dtype(np.uint8)


def upload_limit(max_slots: int) -> int:
    """Bytes that plan_draw puts into an upload at most."""
    return OPTIONS.itemsize * max_slots + EDIT.itemsize * UPLOAD_EDITS


class DrawOptions:
    """How each slot draws, packed when it is bound, so that a step only gathers."""

    def __init__(self, max_slots: int) -> None:
        self.nobody = max_slots  # stands for rows that only pad: greedy, which costs least
        self.records = np.array([_record(SlotOptions())] * (max_slots + 1), OPTIONS)
        self._options = [SlotOptions()] * (max_slots + 1)
        self._edited_before = np.zeros(max_slots + 1, np.int32)  # positions from here on have no edits

    def bind(self, slot: int, options: SlotOptions) -> None:
        self.records[slot] = _record(options)
        self._options[slot] = options
        masked_before = options.min_position if options.stop_ids else 0
        self._edited_before[slot] = ALWAYS if options.logit_bias else masked_before

    def edits(self, slots: I32, positions: I32, num_ids: int) -> dict[int, dict[int, float]]:
        """By row, of the rows that may have some, for the token that each draws for its position."""
        rows = np.flatnonzero(positions < self._edited_before[slots]).tolist()
        return {row: _edits(self._options[slots[row]], int(positions[row]), num_ids) for row in rows}


def plan_draw(kept: DrawOptions, slots: I32, positions: I32, asked: Asked, num_ids: int, upload: Upload) -> DrawPlan:
    """How to draw tokens for positions i32[R] as slots i32[R] do; ids from num_ids up are no tokens."""
    words = _as_words(kept.records).take(slots, axis=0)
    table = words.view(OPTIONS)[:, 0]
    masks = _ask(table, asked)
    of_rows = kept.edits(slots, positions, num_ids)
    if not of_rows:
        launches, uploaded, num_edits = [Draws(slice(0, len(slots)), None)] if len(slots) else [], True, 0
    else:
        launches, uploaded, num_edits = _plan_edits(table, of_rows, num_ids, upload)
    return DrawPlan(upload.put(words), tuple(launches), uploaded, num_edits, masks)


def _ask(table: npt.NDArray[Any], asked: Asked) -> I32 | None:
    """Write into the options of the rows what their step asks; DrawPlan.masks."""
    if asked.top_logprobs:
        table["num_top"] = asked.top_logprobs
    if asked.targets is not None:
        table["target"] = asked.targets
    if asked.mask_rows is None:
        return None
    masked = np.flatnonzero(asked.mask_rows >= 0)
    table["mask_row"][masked] = np.arange(len(masked))
    return asked.mask_rows[masked]


def _plan_edits(
    table: npt.NDArray[Any], of_rows: dict[int, dict[int, float]], num_ids: int, upload: Upload
) -> tuple[list[Draws], bool, int]:
    """Write into the options of the rows which edits they have: launches, uploaded and num_edits of a DrawPlan."""
    for row, row_edits in of_rows.items():
        table["num_edits"][row] = len(row_edits)
    ends = np.cumsum(table["num_edits"])
    edits = _words(of_rows.values())
    starts = ends - table["num_edits"]
    uploaded = len(edits) <= UPLOAD_EDITS
    launches = []
    for rows in _launches(ends, _edits_of_a_launch(num_ids)):
        start, stop = int(starts[rows.start]), int(ends[rows.stop - 1])
        table["first_edit"][rows] = starts[rows] - start
        launches.append(Draws(rows, upload.put(edits[start:stop]) if uploaded else edits[start:stop]))
    return launches, uploaded, len(edits)


def sample(device: Device, logits: Array, rows: Rows, slots: Slots, *, num_ids: int) -> tuple[Array, Array]:
    """One token for each sampled row of logits f32[R, V], i32[R], and its logprob f32[R], NaN where not asked for.

    Each token also goes into its slot's token table, where its position fits. The likeliest ids are left in the buffers
    top_ids and top_logprobs; masks are read from the buffer of that name. A row of logits starts at a multiple of 16
    bytes.
    """
    buffers, draw, stride = device.buffers, rows.draw, logits.strides[0] // logits.itemsize
    out = (buffers.token_ids, buffers.logprobs, buffers.top_ids, buffers.top_logprobs)
    kept = (slots.token_table, buffers.draw_ticket, logits)
    few_and_long = rows.num_sampled <= SCAN_ROWS and logits.shape[1] >= SCAN_VOCAB
    scans = _scan(device, logits, rows, stride, num_ids) if few_and_long else None
    scratch, places = (buffers.masks, buffers.raw_logits), (rows.sample_slots, rows.sample_positions)
    sizes = (rows.num_sampled, logits.shape[1], stride, num_ids, slots.token_table.shape[1])
    for draws in draw.launches:
        edits = draws.edits if draw.uploaded else _copy_edits(device, draws.edits)
        args = (*out, *kept, scans, draw.options, edits, *scratch, *places, draws.rows.start, *sizes)
        device.launch("sample_rows", (draws.rows.stop - draws.rows.start,), THREADS, args)
    return buffers.token_ids[: rows.num_sampled], buffers.logprobs[: rows.num_sampled]


def _scan(device: Device, logits: Array, rows: Rows, stride: int, num_ids: int) -> Array:
    buffers = device.buffers
    args = (buffers.scans, logits, rows.draw.options, buffers.masks, logits.shape[1], stride, num_ids)
    device.launch("scan_rows", (SCAN_PARTS, rows.num_sampled), THREADS, args)
    return buffers.scans


def _record(slot: SlotOptions) -> tuple[float | int, ...]:
    """An OPTIONS of a row that asks for nothing, its edits left out. The limit keeps -inf / T at -inf."""
    temperature = 0.0 if slot.temperature < GREEDY_BELOW else min(slot.temperature, FLOAT32_MAX)
    filters = (slot.top_p, slot.seed, temperature, slot.top_k, slot.min_p, 0)
    factor = float(repetition_factor(slot))
    penalties = (factor, slot.presence_penalty, slot.frequency_penalty, slot.output_start)
    return *filters, *penalties, 0, 0, -1, -1, slot.logprobs, 0


def _filled_up(values: I32 | None, rows: int) -> I32 | None:
    if values is None:
        return None
    filled: I32 = np.full(rows, -1, np.int32)
    filled[: len(values)] = values
    return filled


def _as_words(records: npt.NDArray[Any]) -> I32:
    """i32[., OPTION_WORDS], the same memory."""
    return records.view(np.int32).reshape(-1, OPTION_WORDS)


def _edits(slot: SlotOptions, position: int, num_ids: int) -> dict[int, float]:
    """What is added to the logits of a row whose token gets this position, each id once."""
    masked = slot.stop_ids if position < slot.min_position else ()
    if not slot.logit_bias and not masked:
        return {}
    edits = dict.fromkeys(masked, -math.inf)
    for token_id, bias in slot.logit_bias:
        edits[token_id] = edits.get(token_id, 0.0) + bias
    return {token_id: value for token_id, value in edits.items() if 0 <= token_id < num_ids}


def _words(of_rows: Collection[Mapping[int, float]]) -> I32:
    """The edits of all rows, one after another, i32[., 2]."""
    edits = np.empty(sum(map(len, of_rows)), EDIT)
    edits["id"] = list(chain.from_iterable(of_rows))
    edits["value"] = list(chain.from_iterable(row.values() for row in of_rows))
    return edits.view(np.int32).reshape(-1, 2)


def _edits_of_a_launch(num_ids: int) -> int:
    """The edits of a single row always fit: an id has one at most."""
    return max(num_ids, UPLOAD_EDITS)


def _launches(ends: Any, limit: int) -> Iterator[slice]:
    """Rows whose edits, up to ends[r] with those of the rows before, are together within the limit."""
    start = done = 0
    while start < len(ends):
        stop = int(np.searchsorted(ends, done + limit, side="right"))
        yield slice(start, stop)
        start, done = stop, int(ends[stop - 1])


def _copy_edits(device: Device, edits: I32) -> Array:
    """In pageable memory, from which CUDA copies before the call returns, and on the stream, after the launch before
    has read its own."""
    target = device.buffers.edits[: len(edits)]
    target.set(edits, stream=device.stream)
    return target
