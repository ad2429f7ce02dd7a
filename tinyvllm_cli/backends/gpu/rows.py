"""A step as the kernels see it: everything that the host knows about its rows, sent to the GPU in one copy."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tinyvllm_cli.backends.gpu import attention_work, sample
from tinyvllm_cli.backends.gpu.attention import partial_places
from tinyvllm_cli.backends.gpu.cublas import padded_rows
from tinyvllm_cli.backends.gpu.graphs import Shape
from tinyvllm_cli.backends.row_layout import RowLayout, row_layout, same
from tinyvllm_cli.config import BLOCK_SIZE, EngineConfig
from tinyvllm_cli.model.parameters import Array
from tinyvllm_cli.types import I32, Batch, Limits

if TYPE_CHECKING:
    from tinyvllm_cli.backends.gpu.memory import View
    from tinyvllm_cli.backends.gpu.pinned import PinnedRing
    from tinyvllm_cli.backends.gpu.slots import Slots

UPLOAD_ALIGNMENT = 16  # bytes: kernels may read an array in such words
VIEWS = 1024  # arrays on the GPU that are kept for steps of the same shape: to make one takes longer than to fill it
NUM_ARRAYS = 32  # of a step beside those of attention, which has up to four for each sequence


class Upload:
    """The host arrays of one step: gathered in pinned memory, sent together, read on the GPU where put() says."""

    def __init__(self, cuda: Any, ring: PinnedRing, view: View, nbytes: int) -> None:
        """view: arrays over a region of nbytes on the GPU. One is enough, as copies and kernels run in order."""
        self._cuda = cuda
        self._ring = ring
        self._view = lru_cache(VIEWS)(view)
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
    own = 4 * (3 * T + (S + 1) + S + 3 * S) + 8 * S * widest_table(max_seq_len)
    gaps = UPLOAD_ALIGNMENT * (NUM_ARRAYS + 4 * S)
    return own + gaps + attention_work.upload_limit(T, S, max_seq_len) + sample.upload_limit(S)


def widest_table(max_seq_len: int) -> int:
    """Blocks of the longest sequence."""
    return -(-max_seq_len // BLOCK_SIZE)


@dataclass(frozen=True, slots=True)
class Rows:
    """What ops know of a step: T rows of S sequences, R rows sampled. Arrays: device i32."""

    num_rows: int  # T
    num_sampled: int  # R
    token_ids: Array  # [T]; -1 = as the token table has it
    positions: Array  # [T]
    slots: Array  # [T] of each row
    query_start_loc: Array  # [S + 1]
    lengths: Array  # [S] tokens once the step has run
    logits_indices: Array  # [R] rows of T
    sample_slots: Array  # [R]
    sample_positions: Array  # [R] of the token to draw
    token_table: Array  # [max_slots + 1, max_seq_len], the slots' own
    block_tables: Array  # [max_slots + 1, width], the same
    changes: Array | None  # [., 2] to be placed in the block tables before the step (cuda/block_tables.cu)
    attention: attention_work.AttentionWork
    draw: sample.DrawPlan
    padded: bool

    @property
    def width(self) -> int:
        """Blocks of a row of block_tables."""
        return int(self.block_tables.shape[1])

    @property
    def shape(self) -> Shape | None:
        """Of a padded step: others of the same shape launch the same kernels on the same addresses, but for draws that
        are no part of the shape. None: of a step that is not padded, or whose launches depend on more."""
        of_attention = self.attention.shape if self.padded else None
        return None if of_attention is None else (self.num_rows, *of_attention)


@dataclass(frozen=True, slots=True)
class _HostRows:
    """The arrays of Rows that a batch brings or implies, on the host."""

    token_ids: I32
    positions: I32
    slots: I32
    query_start_loc: I32
    lengths: I32
    of_sequences: I32  # [S] their slots
    logits_indices: I32
    sample_slots: I32
    sample_positions: I32
    asked: sample.Asked


def resolve_rows(
    batch: Batch,
    limits: Limits,
    kept: Slots,
    upload: Upload,
    *,
    group: int,
    head_dim: int,
    fp8: bool,
    num_ids: int,
    pads_decoding: bool = False,
) -> Rows:
    """Check a batch, count its tokens as computed, and put all that its kernels read into the upload.

    group: query heads of a KV head; fp8: how K and V are held; num_ids: ids of the tokenizer. pads_decoding: a step
    that only decodes gets rows and work more, so that it has the shape of others. A malformed batch is a bug of the
    caller: ValueError, before anything is changed.
    """
    layout = row_layout(batch, limits, kept.counted)
    changes = kept.tables.update(batch, layout.num_blocks, limits)
    kept.count(batch.slots, layout)
    host = _host_rows(batch, layout)
    padded = pads_decoding and _only_decodes(batch)
    if padded:
        host = _padded(host, kept.nobody)
    upload.begin()
    put = upload.put
    return Rows(
        num_rows=len(host.positions),
        num_sampled=len(host.sample_slots),
        token_ids=put(host.token_ids),
        positions=put(host.positions),
        slots=put(host.slots),
        query_start_loc=put(host.query_start_loc),
        lengths=put(host.lengths),
        logits_indices=put(host.logits_indices),
        sample_slots=put(host.sample_slots),
        sample_positions=put(host.sample_positions),
        token_table=kept.token_table,
        block_tables=kept.tables.device,
        attention=attention_work.plan_attention(
            host.query_start_loc,
            host.lengths,
            host.of_sequences,
            kept.tables,
            sizes=attention_work.Sizes(
                group, head_dim, partial_places(limits.max_slots, limits.max_seq_len), padded, fp8
            ),
            upload=upload,
        ),
        draw=sample.plan_draw(kept.options, host.sample_slots, host.sample_positions, host.asked, num_ids, upload),
        padded=padded,
        # Last: where the others lie must depend on the shape of the step alone.
        changes=None if changes is None else put(changes),
    )


def _host_rows(batch: Batch, layout: RowLayout) -> _HostRows:
    return _HostRows(
        token_ids=batch.token_ids,
        positions=layout.positions,
        slots=batch.slots[layout.sequence],
        query_start_loc=batch.query_start_loc,
        lengths=layout.lengths,
        of_sequences=batch.slots,
        logits_indices=batch.logits_indices,
        sample_slots=batch.sample_slots,
        sample_positions=layout.positions[batch.logits_indices] + np.int32(1),
        asked=sample.Asked(batch.targets, batch.mask_rows, batch.top_logprobs),
    )


def _only_decodes(batch: Batch) -> bool:
    """Whether every sequence has one row, and draws from it."""
    count = len(batch.slots)
    every = np.arange(count + 1, dtype=np.int32)
    return (
        len(batch.token_ids) == count
        and same(batch.logits_indices, every[:-1])
        and same(batch.query_start_loc, every)
        and same(batch.sample_slots, batch.slots)
    )


def _padded(host: _HostRows, nobody: int) -> _HostRows:
    """Padding rows are at position 0 of nobody's slot, which has the null block and tokens that nobody reads but they:
    whatever bits they have, no K, V or token of a sequence depends on it.
    """
    count = len(host.slots)
    rows = padded_rows(count)
    if rows == count:
        return host
    every = np.arange(rows + 1, dtype=np.int32)
    filled = np.empty((4, rows), np.int32)
    filled[:, :count] = host.token_ids, host.positions, host.lengths, host.slots
    filled[:, count:] = [[-1], [0], [1], [nobody]]
    token_ids, positions, lengths, slots = filled
    asked = host.asked.padded(rows)
    return _HostRows(token_ids, positions, slots, every, lengths, slots, every[:-1], slots, lengths, asked)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // UPLOAD_ALIGNMENT) * UPLOAD_ALIGNMENT
