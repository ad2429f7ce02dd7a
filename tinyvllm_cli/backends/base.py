"""THE SEAM: what the engine asks of a backend. Host NumPy arrays and ints cross it, nothing else.

A backend keeps a pool of KV blocks and, for every slot, a token table i32[max_slots, max_seq_len], written by position
exactly as K and V are: it is the feed-back, the history and the place the next token is read from.

The contract; each line is a test that every backend passes (tests/seam_contract.py):

1. After a step K and V of a row lie at its position in the sequence's blocks, and its token at its position in the
   table. Writing a position again replaces it. What is stored for a row depends on that row's values alone.
2. Row t attends to positions 0..p of its own sequence.
3. A sampled token is a function of (logits row, the slot's options, the tokens at positions 0..p, and the position
   p + 1 of the token drawn): see backends/cpu/sample.py. Ids past the tokenizer never come out. A row with a target
   draws nothing and writes nothing: its token is the greedy one, its logprob the target's.
4. bind, copy_blocks and step take effect in the order of the calls; up to limits.max_in_flight steps may be in flight,
   that is, enqueued and not yet read; arguments may be reused once a call returns; results stay readable until read,
   in any order.
5. No result depends on what block 0, padding rows, free blocks or positions past a sequence's end contain.
6. Row invariance: a row depends on its own sequence only, not on the number of rows, its place among them, chunking,
   block order or slots. On the CPU this holds for the tokens, on a GPU for every bit.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

from tinyvllm_cli.types import F32, I32, U32, BackendFacts, Batch, Limits, SlotOptions, StepOutput


class Pending(Protocol):
    """A step that was enqueued."""

    def mask(self, bits: U32) -> None:
        """Of a step with mask_rows: u32[M, ceil(V / 32)], bit id % 32 of word id / 32 set where the id is allowed. The
        step draws its tokens once this is here. ValueError for result(), and for bind() and step(), before."""
        ...

    def result(self) -> StepOutput:
        """Wait for the step and read its tokens."""
        ...


class Backend(Protocol):
    @property
    def limits(self) -> Limits: ...

    @property
    def facts(self) -> BackendFacts: ...

    def mask_memory(self) -> U32:
        """Memory u32[max_slots, ceil(V / 32)] from whose begin masks are on their way at once, in which they may be
        made: rows that a step got of it stay as they are until its tokens are read."""
        ...

    def bind(self, slot: int, token_ids: Seq[int] | I32, options: SlotOptions) -> None:
        """A sequence gets a slot: its known tokens go into the table, its options into the slot."""
        ...

    def step(self, batch: Batch) -> Pending:
        """Enqueue one step: write K, V and tokens of all T rows, sample R of them."""
        ...

    def copy_blocks(self, pairs: Seq[tuple[int, int]]) -> None:
        """Copy whole KV blocks, (source, target), in order."""
        ...

    def logits(self, batch: Batch) -> F32:
        """Raw logits f32[R, V] of a step, which also writes K, V and tokens. For parity tests."""
        ...

    def counts(self) -> dict[str, int]:
        """Kernels launched so far by name, each as often as it ran; "graphs": how many graphs. Empty where there are
        no kernels."""
        ...

    def close(self) -> None:
        """Give the memory back. Further calls are errors."""
        ...
