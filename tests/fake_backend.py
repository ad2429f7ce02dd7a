"""A backend without a model: scripted tokens, a virtual clock, and every use of the seam checked by its own books.

It keeps for each slot the token table, and for each (block, offset) of the pool what K and V depend on: the token, and
all tokens before it, as a hash. A row is drawn from what its block table leads to, and that must have been written by
an earlier step, of this or any other sequence, from the very tokens that the sequence has in its token table.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from fake_grammars import FakeGrammars

from tinyvllm_cli.errors import DeviceError, RequestError
from tinyvllm_cli.text.together import Asking, together
from tinyvllm_cli.types import Batch, Limits, Request, SamplingParams, SlotOptions, StepOutput

UNWRITTEN = -9  # in the token table
NextToken = Callable[[tuple[int, ...], SlotOptions], int]  # tokens at positions 0..p -> the token at p + 1


def limits(**changes: int) -> Limits:
    """Small limits with some changed; room for every slot's longest sequence where num_blocks is not given."""
    sizes = {"block_size": 4, "max_batch_tokens": 16, "max_slots": 4, "max_seq_len": 64}
    sizes |= {"vocab_size": 50, "max_in_flight": 1} | changes
    enough = 1 + sizes["max_slots"] * -(-sizes["max_seq_len"] // sizes["block_size"])
    return Limits(**{"num_blocks": enough} | sizes)


def refilling_limits(max_slots: int, refill_slots: int, **changes: int) -> Limits:
    """For draws that know nothing of each other: at most all slots are waited for."""
    return limits(max_slots=max_slots, refill_slots=min(refill_slots, max_slots), **changes)


def hashed(vocab_size: int = 50) -> NextToken:
    """A model whose next token depends on every token before it; stop ids are masked before min_position."""

    def next_token(history: tuple[int, ...], options: SlotOptions) -> int:
        token = zlib.crc32(np.array(history, np.int32).tobytes(), options.seed & 0xFFFF) % vocab_size
        if len(history) < options.min_position:
            allowed = [i for i in range(vocab_size) if i not in options.stop_ids]
            return allowed[token % len(allowed)] if allowed else -2
        return token

    return next_token


def scripted(prompt_len: int, *tokens: int) -> NextToken:
    """Answers these tokens to prompts of this length, over and over."""
    return lambda history, options: tokens[(len(history) - prompt_len) % len(tokens)]


@dataclass
class VirtualClock:
    """Seconds that pass only when somebody says so."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Step:
    """What one call of step() asked for, for tests of the schedule."""

    owners: list[int]  # per sequence the number of its bind
    chunks: list[int]  # per sequence its tokens
    begins: list[int]  # per sequence its num_computed
    sampled: list[int]  # per sampled row the number of its bind


@dataclass
class FakePending:
    backend: FakeBackend
    draw: Callable[[np.ndarray | None], StepOutput]
    masked: bool  # whether a mask comes, before which nothing is drawn
    ready_at: float
    output: StepOutput | None = None

    def mask(self, bits: np.ndarray) -> None:
        assert self.masked and self.output is None, "a mask comes once, to a step with mask_rows"
        assert bits.dtype == np.uint32 and bits.shape[1:] == (-(-self.backend.limits.vocab_size // 32),)
        self.output = self.draw(bits)

    def result(self) -> StepOutput:
        assert self.backend.in_flight[0] is self, "results are read in the order of the steps"
        assert self.output is not None, "mask() comes before result()"
        if len(self.backend.results) == self.backend.failing_result:
            raise DeviceError("device lost")
        self.backend.results.append(self.output.token_ids[0].tolist())
        self.backend.in_flight.pop(0)
        clock = self.backend.clock
        clock.now = max(clock.now, self.ready_at)
        return self.output


@dataclass
class FakeBackend:
    """`step_s` seconds a step and `row_s` a row pass on the device, which works through its steps one by one."""

    limits: Limits
    next_token: NextToken
    clock: VirtualClock = field(default_factory=VirtualClock)
    step_s: float = 1.0
    row_s: float = 0.0
    steps: list[Step] = field(default_factory=list)
    bound: list[tuple[int, ...]] = field(default_factory=list)  # the prompt of each bind
    copied: list[list[tuple[int, int]]] = field(default_factory=list)  # blocks, by call
    in_flight: list[FakePending] = field(default_factory=list)
    results: list[list[int]] = field(default_factory=list)  # that were read
    failing_step: int | None = None  # the number of the step at which the device breaks
    failing_result: int | None = None  # the same, noticed only when its tokens are read
    owners: Callable[[int], int] = lambda block: 1  # of a block: those that are written have one
    late_ends: bool = False  # a sequence may end, and lose its blocks, after a step with it was laid out

    def __post_init__(self) -> None:
        size = (self.limits.num_blocks, self.limits.block_size)
        self.kv_token = np.full(size, UNWRITTEN)
        self.kv_prefix = np.full(size, -1, np.int64)  # hash of the tokens up to this one
        self.table = np.full((self.limits.max_slots, self.limits.max_seq_len), UNWRITTEN)
        self.owner = [-1] * self.limits.max_slots
        self.options: list[SlotOptions | None] = [None] * self.limits.max_slots
        self.free_at = 0.0  # when the device has nothing more to do

    def bind(self, slot: int, token_ids: list[int], options: SlotOptions) -> None:
        self._check_drawn()
        assert 0 <= slot < self.limits.max_slots
        assert len(token_ids) < self.limits.max_seq_len
        self.owner[slot] = len(self.bound)
        self.bound.append(tuple(token_ids))
        self.options[slot] = options
        self.table[slot] = UNWRITTEN
        self.table[slot, : len(token_ids)] = token_ids

    def step(self, batch: Batch) -> FakePending:
        if len(self.steps) == self.failing_step:
            raise DeviceError("device lost")
        assert len(self.in_flight) < self.limits.max_in_flight
        self._check_drawn()
        self._check_shapes(batch)
        starts, computed = batch.query_start_loc.tolist(), batch.num_computed.tolist()
        for s, slot in enumerate(batch.slots.tolist()):
            self._check_read(slot, computed[s], batch.block_tables[s])
        for s, slot in enumerate(batch.slots.tolist()):
            # What is written now, those share from now on that draw from its last row.
            drawing = max(int(np.count_nonzero(batch.logits_indices == starts[s + 1] - 1)), 1)
            tokens = batch.token_ids[starts[s] : starts[s + 1]]
            self._write(slot, tokens, computed[s], batch.block_tables[s], drawing)
        self.steps.append(
            Step(
                owners=[self.owner[slot] for slot in batch.slots],
                chunks=np.diff(starts).tolist(),
                begins=computed,
                sampled=[self.owner[slot] for slot in batch.sample_slots],
            )
        )
        self.free_at = max(self.clock.now, self.free_at) + self.step_s + self.row_s * len(batch.token_ids)
        batch = deepcopy(batch)  # the caller may change his own before the mask is there
        pending = FakePending(self, partial(self._draw, batch), batch.mask_rows is not None, self.free_at)
        if not pending.masked:
            pending.output = pending.draw(None)
        self.in_flight.append(pending)
        return pending

    def mask_memory(self) -> np.ndarray:
        return np.full((self.limits.max_slots, -(-self.limits.vocab_size // 32)), 0xDEADBEEF, np.uint32)

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        self.copied.append(pairs)
        for source, target in pairs:
            assert source != target and self.owners(target) > 0 and source > 0 < target
            self.kv_token[target] = self.kv_token[source]
            self.kv_prefix[target] = self.kv_prefix[source]

    def _check_shapes(self, batch: Batch) -> None:
        arrays = {name: getattr(batch, name) for name in Batch.__dataclass_fields__ if name != "top_logprobs"}
        for name, array in arrays.items():
            assert (array is None and name in ("targets", "mask_rows")) or array.dtype == np.int32, name
        for rows in (batch.targets, batch.mask_rows):
            assert rows is None or rows.shape == batch.logits_indices.shape
        assert 0 <= batch.top_logprobs <= 20
        S, T = len(batch.slots), len(batch.token_ids)
        assert batch.query_start_loc.shape == (S + 1,) and batch.num_computed.shape == (S,)
        assert batch.block_tables.shape[0] == S
        assert 0 < T <= self.limits.max_batch_tokens, "the token budget"
        assert 0 < S <= self.limits.max_slots
        assert len(set(batch.slots.tolist())) == S
        assert batch.query_start_loc[0] == 0 and batch.query_start_loc[-1] == T
        assert (np.diff(batch.query_start_loc) > 0).all()
        assert (batch.block_tables >= 0).all() and (batch.block_tables < self.limits.num_blocks).all()

    def _check_read(self, slot: int, count: int, blocks: np.ndarray) -> None:
        """The first positions of a sequence are where the block table says, before the step."""
        assert self.owner[slot] >= 0, "a step for a slot that was never bound"
        tokens, prefixes = self._read(blocks, count)
        history = self.table[slot, :count].tolist()
        assert tokens == history, "KV of other tokens, or none"
        prefix = 0
        for token, found in zip(history, prefixes, strict=True):
            prefix = with_token(prefix, token)
            assert prefix == found, "KV of this token behind other tokens"

    def _write(self, slot: int, token_ids: np.ndarray, begin: int, blocks: np.ndarray, owners: int) -> None:
        end = begin + len(token_ids)
        assert begin >= 0 and end < self.limits.max_seq_len, "KV is never needed for the last position"
        size = self.limits.block_size
        written = blocks[begin // size : (end - 1) // size + 1].tolist()
        assert all(block > 0 for block in written), "the null block belongs to nobody"
        least = 0 if self.late_ends else 1
        assert all(least <= self.owners(block) <= owners for block in written), "others read this block"
        table = self.table[slot]
        new = np.where(token_ids == -1, table[begin:end], token_ids)
        assert (new != UNWRITTEN).all(), "fed back before it was drawn"
        assert ((table[begin:end] == new) | (table[begin:end] == UNWRITTEN)).all(), "not the token that was drawn"
        table[begin:end] = new
        prefix = self._read(blocks, begin)[1][-1] if begin else 0
        for position, token in enumerate(new.tolist(), begin):
            prefix = with_token(prefix, token)
            self.kv_token[blocks[position // size], position % size] = token
            self.kv_prefix[blocks[position // size], position % size] = prefix

    def _read(self, blocks: np.ndarray, count: int) -> tuple[list[int], list[int]]:
        """Token and hash of each of the first positions."""
        used = blocks[: -(-count // self.limits.block_size)]
        return self.kv_token[used].ravel()[:count].tolist(), self.kv_prefix[used].ravel()[:count].tolist()

    def _check_drawn(self) -> None:
        assert not self.in_flight or self.in_flight[-1].output, "a step waits for its mask: nothing comes before it"

    def _draw(self, batch: Batch, masks: np.ndarray | None) -> StepOutput:
        count, tops = len(batch.logits_indices), batch.top_logprobs
        tokens, logprobs = np.empty((1, count), np.int32), np.full((1, count), np.nan, np.float32)
        top_ids = np.empty((1, count, tops), np.int32)
        top_logprobs = np.empty(top_ids.shape, np.float32)
        for r, slot in enumerate(batch.sample_slots.tolist()):
            target = -1 if batch.targets is None else int(batch.targets[r])
            history = self._history(batch, int(batch.logits_indices[r]), slot, anywhere=target >= 0)
            token = tokens[0, r] = self._token(batch, r, history, target, masks)
            if target >= 0 or (self.options[slot].logprobs and token >= 0):
                logprobs[0, r] = fake_logprob(history, token if target < 0 else target)
            if target < 0:
                self.table[slot, len(history)] = token
            if tops:
                top_ids[0, r] = self._likeliest(history)[:tops]
                top_logprobs[0, r] = [fake_logprob(history, i) for i in top_ids[0, r].tolist()]
        return StepOutput(tokens, logprobs, *((top_ids, top_logprobs) if tops else ()))

    def _history(self, batch: Batch, row: int, slot: int, *, anywhere: bool) -> tuple[int, ...]:
        """The tokens at positions 0..p that a row is drawn from. anywhere: it need not be the last of its sequence."""
        s = int(np.searchsorted(batch.query_start_loc, row, side="right")) - 1
        assert self.owner[slot] >= 0 and (anywhere or row == batch.query_start_loc[s + 1] - 1)
        end = int(batch.num_computed[s] + row - batch.query_start_loc[s]) + 1
        history = self._read(batch.block_tables[s], end)[0]
        assert history == self.table[slot, :end].tolist(), "drawn from the row of another prompt"
        return tuple(history)

    def _token(self, batch: Batch, r: int, history: tuple[int, ...], target: int, masks: np.ndarray | None) -> int:
        """The scripted token; where a mask forbids it, one that is allowed. Beside a target, the likeliest."""
        if target >= 0:
            return self._likeliest(history)[0]
        token = self.next_token(history, self.options[int(batch.sample_slots[r])])
        place = -1 if batch.mask_rows is None else int(batch.mask_rows[r])
        if place < 0 or token < 0:
            return token
        assert masks is not None and place < len(masks)
        options = self.options[int(batch.sample_slots[r])]
        held_back = options.stop_ids if len(history) < options.min_position else ()
        ids = [i for i in range(self.limits.vocab_size) if i not in held_back]
        allowed = [i for i in ids if masks[place, i // 32] >> (i % 32) & 1]
        return token if token in allowed else allowed[token % len(allowed)] if allowed else -2

    def _likeliest(self, history: tuple[int, ...]) -> list[int]:
        return sorted(range(self.limits.vocab_size), key=lambda i: (-fake_logprob(history, i), i))


def fake_logprob(history: tuple[int, ...], token: int) -> float:
    """In (-10, 0], of a token behind these ones; many are equal."""
    return -(zlib.crc32(np.array([*history, token], np.int32).tobytes()) % 40) / 4


def with_token(prefix: int, token: int) -> int:
    """Hash of the tokens up to this one, from that of those before it."""
    return zlib.crc32(token.to_bytes(4, "little", signed=True), prefix)


# ---------------------------------------------------------------- the text side


@dataclass
class FakeAnswer:
    """Each token id is one word, and a dot is held back for the end; stop strings count at the end of the text."""

    codec: FakeCodec
    request: Request
    text: str = ""
    reasoning: str | None = None
    stopped_by: str | None = None

    def push(self, token_id: int) -> str:
        self.codec.clock.now += self.codec.push_s
        if token_id == self.codec.broken_token:
            raise LookupError("no such\npiece")
        self.text += f" {token_id}"
        self.stopped_by = next((stop for stop in self.request.params.stop if self.text.endswith(stop)), None)
        return f" {token_id}"

    def push_all(self, token_ids: list[int]) -> str:
        return "".join(map(self.push, token_ids))

    def finish(self) -> str:
        if self.stopped_by is not None:
            return ""
        self.text += "."
        if "." in self.request.params.stop:
            self.stopped_by = "."
        return "."


@dataclass
class FakeCodec:
    clock: VirtualClock = field(default_factory=VirtualClock)
    push_s: float = 0.0  # seconds of text work a token
    broken_token: int | None = None
    grammars: FakeGrammars | None = None

    def least_tokens(self, request: Request) -> int:
        return 0

    def together(self, askings: list[Asking[Any]]) -> list[Any]:
        return together(askings, None)  # none asks for anything

    def asking(self, request: Request) -> Asking[list[int]]:
        yield from ()
        if request.prompt is not None:
            raise RequestError("template_error", request.prompt, "prompt")
        if not request.prompt_token_ids:
            raise RequestError("empty_prompt", "no tokens", "prompt_token_ids")
        return list(request.prompt_token_ids)

    def token_bytes(self, token_id: int) -> bytes:
        return f" {token_id}".encode()

    def answer(self, request: Request, prompt_ids: list[int]) -> FakeAnswer:
        return FakeAnswer(self, request)


def request(i: int, prompt: tuple[int, ...] | list[int], **params: object) -> Request:
    return Request(request_id=i, custom_id=f"r{i}", prompt_token_ids=tuple(prompt), params=SamplingParams(**params))
