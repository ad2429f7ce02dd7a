"""A step as the kernels see it: everything that the host knows about its rows, sent to the GPU in one copy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tinyvllm_cli.backends.gpu import attention, sample
from tinyvllm_cli.backends.row_layout import row_layout
from tinyvllm_cli.config import BLOCK_SIZE, EngineConfig
from tinyvllm_cli.model.parameters import Array
from tinyvllm_cli.types import Batch, Limits

if TYPE_CHECKING:
    from tinyvllm_cli.backends.gpu.memory import View
    from tinyvllm_cli.backends.gpu.pinned import PinnedRing
    from tinyvllm_cli.backends.gpu.slots import Slots

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
    T, S = engine.max_batch_tokens, engine.slots  # no more rows are sampled than there are slots
    widest = -(-max_seq_len // BLOCK_SIZE)
    own = 4 * (3 * T + (S + 1) + 2 * S + S * widest + 3 * S)
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


def resolve_rows(
    batch: Batch, limits: Limits, kept: Slots, upload: Upload, *, group: int, head_dim: int, num_ids: int
) -> Rows:
    """Check a batch, count its tokens as computed, and put all that its kernels read into the upload.

    group: query heads of a KV head; num_ids: ids of the tokenizer. A malformed batch is a bug of the caller:
    ValueError, before anything is changed.
    """
    layout = row_layout(batch, limits, kept.counted)
    lengths, positions = layout.lengths.astype(np.int32, copy=False), layout.positions
    drawn = positions[batch.logits_indices] + np.int32(1)
    options = [kept.options[slot] for slot in batch.sample_slots.tolist()]
    width = int(positions.max()) // BLOCK_SIZE + 1  # a batch may bring wider tables than its positions need
    kept.count(batch, lengths)
    upload.begin()
    put = upload.put
    return Rows(
        num_rows=len(positions),
        width=width,
        num_sampled=len(drawn),
        token_ids=put(batch.token_ids),
        sequence=put(layout.sequence),
        positions=put(positions),
        query_start_loc=put(batch.query_start_loc),
        lengths=put(lengths),
        slots=put(batch.slots),
        block_tables=put(batch.block_tables[:, :width]),
        logits_indices=put(batch.logits_indices),
        sample_slots=put(batch.sample_slots),
        sample_positions=put(drawn),
        token_table=kept.token_table,
        attention=attention.plan_attention(
            batch.query_start_loc,
            lengths,
            group=group,
            head_dim=head_dim,
            places=attention.partial_places(limits.max_seq_len),
            upload=upload,
        ),
        draw=sample.plan_draw(options, drawn, num_ids, upload),
    )


def _aligned(nbytes: int) -> int:
    return -(-nbytes // UPLOAD_ALIGNMENT) * UPLOAD_ALIGNMENT
