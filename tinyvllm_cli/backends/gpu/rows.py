"""A step as the kernels see it: everything that the host knows about its rows, sent to the GPU in one copy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tinyvllm_cli.backends.gpu import attention, sample
from tinyvllm_cli.backends.gpu.cublas import padded_rows
from tinyvllm_cli.backends.gpu.graphs import Shape
from tinyvllm_cli.backends.row_layout import row_layout
from tinyvllm_cli.config import BLOCK_SIZE, EngineConfig
from tinyvllm_cli.model.parameters import Array
from tinyvllm_cli.types import I32, Batch, Limits

if TYPE_CHECKING:
    from tinyvllm_cli.backends.gpu.memory import View
    from tinyvllm_cli.backends.gpu.pinned import PinnedRing
    from tinyvllm_cli.backends.gpu.slots import Slots

NOWHERE = 2**31 - 1  # a position past every context
UPLOAD_ALIGNMENT = 16  # bytes: kernels may read an array in such words
NUM_ARRAYS = 32  # of a step beside those of attention, which has up to two for each sequence


class Upload:
    """The host arrays of one step: gathered in pinned memory, sent together, read on the GPU where put() says."""

    def __init__(self, cuda: Any, ring: PinnedRing, view: View, nbytes: int) -> None:
        """view: arrays over a region of nbytes on the GPU. One is enough, as copies and kernels run in order."""
        self._cuda = cuda
        self._ring = ring
        self._view = view
        self._target: int = view(0, (nbytes,), np.uint8).data.ptr
        self._used = 0

    def begin(self) -> None:
        """Start over with another step's arrays."""
        self._memory, self._used = self._ring.next(), 0

    def put(self, array: npt.NDArray[Any]) -> Array:
        """Where the array will lie on the GPU; it may be changed again at once."""
        start, self._used = self._used, _aligned(self._used + array.nbytes)
        assert self._used <= len(self._memory.bytes), f"an upload of {self._used} bytes, more than planned"
        np.ndarray(array.shape, array.dtype, self._memory.bytes, start)[...] = array
        return self._view(start, array.shape, array.dtype)

    def send(self, stream: int) -> None:
        """Enqueue the copy of all that was put since begin()."""
        kind = self._cuda.memcpyHostToDevice
        self._cuda.memcpyAsync(self._target, self._memory.address, self._used, kind, stream)
        self._memory.record(stream)


def upload_limit(engine: EngineConfig, max_seq_len: int) -> int:
    """Bytes that the upload of a step may take."""
    S = padded_rows(engine.slots)  # no more rows are sampled than there are slots
    T = max(engine.max_batch_tokens, S)
    widest = -(-max_seq_len // BLOCK_SIZE)
    own = 4 * (3 * T + (S + 1) + 2 * S + 2 * S * widest + 3 * S)  # tables: padded to a power of two
    gaps = UPLOAD_ALIGNMENT * (NUM_ARRAYS + 2 * S)
    return own + gaps + attention.upload_limit(T, S, max_seq_len) + sample.upload_limit(S)


@dataclass(frozen=True, slots=True)
class Rows:
    """What ops know of a step: T rows of S sequences, B the widest block table, R rows sampled. Arrays: device i32."""

    num_rows: int  # T
    width: int  # B
    num_sampled: int  # R
    token_ids: Array  # [T]; -1 = as the token table has it
    sequence: Array  # [T] which of the S sequences a row belongs to
    positions: Array  # [T]
    query_start_loc: Array  # [S + 1]
    lengths: Array  # [S] tokens once the step has run
    slots: Array  # [S]
    block_tables: Array  # [S, B]
    logits_indices: Array  # [R] rows of T
    sample_slots: Array  # [R]
    sample_positions: Array  # [R] of the token to draw
    token_table: Array  # [max_slots, max_seq_len], the slots' own
    attention: attention.AttentionWork
    draw: sample.DrawPlan
    padded: bool

    @property
    def shape(self) -> Shape | None:
        """Of a padded step: others of the same shape launch the same kernels on the same addresses. None: of a step
        that is not padded, or whose launches depend on more than its shape."""
        decodes = self.attention.decodes
        if not self.padded or len(decodes) != 1 or self.draw.num_edits:
            return None
        merges = decodes[0].merges
        return self.num_rows, self.width, len(decodes[0].items), 0 if merges is None else len(merges)


@dataclass(frozen=True, slots=True)
class _HostRows:
    """The arrays of Rows that a batch brings or implies, on the host."""

    token_ids: I32
    sequence: I32
    positions: I32
    starts: I32
    lengths: I32
    slots: I32
    block_tables: I32
    logits_indices: I32
    sample_slots: I32
    sample_positions: I32


def resolve_rows(
    batch: Batch,
    limits: Limits,
    kept: Slots,
    upload: Upload,
    *,
    group: int,
    head_dim: int,
    num_ids: int,
    pads_decoding: bool = False,
) -> Rows:
    """Check a batch, count its tokens as computed, and put all that its kernels read into the upload.

    group: query heads of a KV head; num_ids: ids of the tokenizer. pads_decoding: a step that only decodes gets rows
    more, tables wider and work longer, so that it has the shape of others. A malformed batch is a bug of the caller:
    ValueError, before anything is changed.
    """
    host = _host_rows(batch, limits, kept.counted)
    kept.count(batch, host.lengths)
    padded = pads_decoding and _only_decodes(batch)
    if padded:
        host = _padded(host)
    draw_slots = np.full(len(host.sample_slots), kept.options.nobody, np.int32)
    draw_slots[: len(batch.sample_slots)] = batch.sample_slots
    upload.begin()
    put = upload.put
    return Rows(
        num_rows=len(host.positions),
        width=host.block_tables.shape[1],
        num_sampled=len(host.sample_slots),
        token_ids=put(host.token_ids),
        sequence=put(host.sequence),
        positions=put(host.positions),
        query_start_loc=put(host.starts),
        lengths=put(host.lengths),
        slots=put(host.slots),
        block_tables=put(host.block_tables),
        logits_indices=put(host.logits_indices),
        sample_slots=put(host.sample_slots),
        sample_positions=put(host.sample_positions),
        token_table=kept.token_table,
        attention=attention.plan_attention(
            host.starts,
            host.lengths,
            group=group,
            head_dim=head_dim,
            places=attention.partial_places(limits.max_slots, limits.max_seq_len),
            upload=upload,
            padded=padded,
        ),
        draw=sample.plan_draw(kept.options, draw_slots, host.sample_positions, num_ids, upload),
        padded=padded,
    )


def _host_rows(batch: Batch, limits: Limits, counted: I32) -> _HostRows:
    layout = row_layout(batch, limits, counted)
    positions = layout.positions
    width = int(positions.max()) // BLOCK_SIZE + 1  # a batch may bring wider tables than its positions need
    return _HostRows(
        token_ids=batch.token_ids,
        sequence=layout.sequence,
        positions=positions,
        starts=batch.query_start_loc,
        lengths=layout.lengths.astype(np.int32, copy=False),
        slots=batch.slots,
        block_tables=batch.block_tables[:, :width],
        logits_indices=batch.logits_indices,
        sample_slots=batch.sample_slots,
        sample_positions=positions[batch.logits_indices] + np.int32(1),
    )


def _only_decodes(batch: Batch) -> bool:
    """Whether every sequence has one row, and draws from it."""
    count = len(batch.slots)
    return (
        len(batch.token_ids) == count == len(batch.logits_indices)
        and np.array_equal(batch.logits_indices, np.arange(count))
        and np.array_equal(batch.query_start_loc, np.arange(count + 1))
        and np.array_equal(batch.sample_slots, batch.slots)
    )


def _padded(host: _HostRows) -> _HostRows:
    """Padding rows are at position 0 of the null block, which nobody reads but they: whatever bits they have, no K, V
    or token of a sequence depends on it. Their token is the first of the last row's slot, their own goes nowhere.
    """
    count, width = host.block_tables.shape
    rows = padded_rows(count)
    every = np.arange(rows + 1, dtype=np.int32)
    tables = np.zeros((rows, 1 << (width - 1).bit_length()), np.int32)
    tables[:count, :width] = host.block_tables

    def fill(values: I32, value: int) -> I32:
        return np.concatenate([values, np.full(rows - count, value, np.int32)])

    return _HostRows(
        token_ids=fill(host.token_ids, -1),
        sequence=every[:-1],
        positions=fill(host.positions, 0),
        starts=every,
        lengths=fill(host.lengths, 1),
        slots=fill(host.slots, host.slots[-1]),
        block_tables=tables,
        logits_indices=every[:-1],
        sample_slots=fill(host.sample_slots, host.slots[-1]),
        sample_positions=fill(host.sample_positions, NOWHERE),
    )


def _aligned(nbytes: int) -> int:
    return -(-nbytes // UPLOAD_ALIGNMENT) * UPLOAD_ALIGNMENT
