"""Every type that crosses a module border, in the field's own words. All are frozen except Sequence and Delta."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from tinyvllm_cli.config import HeldDtype
from tinyvllm_cli.errors import FailureType, RequestError

I32: TypeAlias = npt.NDArray[np.int32]
F32: TypeAlias = npt.NDArray[np.float32]
U8: TypeAlias = npt.NDArray[np.uint8]
U32: TypeAlias = npt.NDArray[np.uint32]

DEFAULT_MAX_TOKENS = 512
MAX_SAMPLES = 1024  # of one request
MAX_TOP_LOGPROBS = 20
GREEDY_BELOW = 1e-5  # a temperature under this is greedy

Api: TypeAlias = Literal["chat", "completions"]  # of OpenAI: /v1/chat/completions and /v1/completions


# ---------------------------------------------------------------- requests and answers


ConstraintKind: TypeAlias = Literal["json_schema", "regex", "grammar", "choice"]


@dataclass(frozen=True, slots=True)
class Constraint:
    """The form of an answer. Whether it can be had is not known before it is compiled (text/grammars.py).

    source: a JSON schema or a list of choices as JSON text (keys in their own order, which is that of the answer), a
    regular expression or a Lark grammar as it is. field: what a line calls it, for messages; no part of the value.
    """

    kind: ConstraintKind
    source: str
    field: str = field(compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The answer fields of a request, checked where they enter; ranges and defaults are those of docs/lines.md."""

    max_tokens: int = DEFAULT_MAX_TOKENS
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    n: int = 1  # answers to the one prompt, 1..MAX_SAMPLES
    seed: int | None = None  # None: derived from the run's seed and the request (engine/sampling.py)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    min_tokens: int = 0
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    constraint: Constraint | None = None
    logprobs: int | None = None  # of every token, and of so many of the likeliest in its place; None: of none


@dataclass(frozen=True, slots=True)
class Message:
    """One chat turn. A content given as text parts is joined before it gets here."""

    role: Literal["system", "user", "assistant"]
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One line of the input: exactly one of prompt, messages and prompt_token_ids is not None."""

    request_id: int  # unique in an engine; in a run the index of the line, counted from 0
    custom_id: str | int
    line: int | None = None  # physical line in the input, from 1
    has_own_id: bool = True  # False: custom_id was made from the line's number, and seeds must not depend on it
    prompt: str | None = None
    messages: tuple[Message, ...] | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    raw: bool = False  # the prompt as it is, without chat template
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    continue_final_message: bool = False
    # To be scored behind the prompt, ids where it is ids; None: the prompt itself is, or is answered.
    continuations: tuple[str | tuple[int, ...], ...] | None = None
    params: SamplingParams = SamplingParams()
    truncate_left: bool = False  # cut a prompt given as it is, or as ids, that is too long for the context
    metadata_json: bytes | None = None  # the JSON text of the line's metadata, copied to the answer; None: it has none
    api: Api | None = None  # an OpenAI Batch line for this API, answered in its envelope; None: a line of our own
    fingerprint: str | None = None  # 16 hex digits of all that determines the answer (engine/fingerprint.py)

    @property
    def prompt_field(self) -> str:
        """Which of the three holds the prompt, for errors: as it is called where the request came from."""
        if self.prompt_token_ids is not None:
            return "prompt_token_ids" if self.api is None else "prompt"
        return "prompt" if self.messages is None else "messages"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and how likely it was in its place: log-softmax of the raw logits, over the whole vocabulary."""

    id: int
    token: bytes  # what it stands for alone, control words too; it may be a part of a character
    logprob: float  # of float32, finite
    top: tuple[TokenLogprob, ...] = ()  # the likeliest in its place, in this order; these have no `top`

    @property
    def text(self) -> str:
        return self.token.decode(errors="replace")


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer to a request."""

    index: int
    text: str
    token_ids: tuple[int, ...]  # every id made: EOS and stop text included
    finish_reason: Literal["stop", "length"]
    stop_reason: str | int | None = None
    reasoning: str | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None  # of each of token_ids; None: not asked for


@dataclass(frozen=True, slots=True)
class Score:
    """How likely a text is, or a continuation behind its context."""

    token_logprobs: tuple[float, ...]  # of each token that was scored, finite: log-softmax of the raw logits
    greedy: bool  # each of these tokens is the likeliest in its place
    of_text: bool = False  # a whole text, no continuation: it counts for the perplexity

    def __repr__(self) -> str:
        return f"Score(logprob={self.logprob:.6f}, tokens={len(self.token_logprobs)}, greedy={self.greedy})"

    @property
    def logprob(self) -> float:
        """Of all of them; 0 where there is none. The sum is exact before it is rounded, in whatever order."""
        return math.fsum(self.token_logprobs)


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Stats:
    """Seconds on a monotonic clock; arrival is when the request is handed to the engine."""

    queue_s: float  # arrival to the first slot
    ttft_s: float | None  # arrival to the first token; None where no token was made
    decode_s: float | None  # first token to last
    e2e_s: float  # arrival to the last token
    tokens_per_s: float  # completion tokens / (e2e_s - queue_s); 0 where no token was made
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request has no answer."""

    type: FailureType
    message: str
    field: str | None = None
    detail: str | None = None  # the traceback of an internal error: for the run record, never for the output line


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A finished request: either choices and usage, or a failure. Also what a reader yields for a line it refuses."""

    request_id: int
    custom_id: str | int
    line: int | None = None
    choices: tuple[Choice, ...] = ()
    scores: tuple[Score, ...] = ()  # where texts were to be scored
    usage: Usage | None = None
    stats: Stats | None = None
    error: Failure | None = None
    metadata_json: bytes | None = None
    truncated_tokens: int = 0  # cut from the start of the prompt
    api: Api | None = None  # as in Request
    fingerprint: str | None = None  # as in Request; None of Python's requests, and where the line could not be read

    def __repr__(self) -> str:
        """What people look for: none of what is empty, of the line, or a time."""
        names = ("request_id", "custom_id", "choices", "scores", "usage", "error")
        values = {name: value for name in names if (value := getattr(self, name)) not in ((), None)}
        return f"Completion({', '.join(f'{name}={value!r}' for name, value in values.items())})"

    @property
    def text(self) -> str:
        """Of the first answer. RequestError, with what the error says, where there is none."""
        if self.error is not None:
            raise RequestError(self.error.type, self.error.message, self.error.field)
        return self.choices[0].text if self.choices else ""


@dataclass(slots=True)
class Delta:
    """New tokens of an unfinished request, with the text that is certain to stay.

    Not frozen, which would take three times as long to make: a step makes one for each of its sequences.
    """

    request_id: int
    index: int  # of the choice
    token_ids: tuple[int, ...]
    text: str


Event: TypeAlias = Delta | Completion


# ---------------------------------------------------------------- the seam (backends/base.py says how these are used)


@dataclass(frozen=True, slots=True)
class Limits:
    """What a backend can hold. Block 0 is the null block: num_blocks counts it, nobody owns it."""

    num_blocks: int
    block_size: int
    max_batch_tokens: int
    max_slots: int
    max_seq_len: int
    vocab_size: int
    max_in_flight: int
    refill_slots: int = 1  # 1..max_slots: free slots that are worth a step with prompts (engine/batcher.py)
    admit_slots: int = 2**31 - 1  # at least 1: sequences that get a slot in one step (engine/batcher.py)
    chunk_cost: int = 0  # decode steps that a step takes longer in which some sequence computes several tokens


@dataclass(frozen=True, slots=True)
class BackendFacts:
    """What a backend is, for start lines and run records."""

    name: Literal["cpu", "gpu"]
    device: str  # as people call it: "CPU", "NVIDIA H200"
    dtype: HeldDtype  # of the weights as they are held
    kv_bytes_per_token: int  # of K and V of one token, over all layers, as they are held
    details: Mapping[str, str | int] = field(default_factory=dict)  # versions of driver and libraries, planned bytes


@dataclass(frozen=True, slots=True)
class SlotOptions:
    """How tokens are drawn for the sequence in a slot."""

    temperature: float = 0.0  # below GREEDY_BELOW: greedy
    top_k: int = 0  # i32; 0: no limit
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0  # 64 bits
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop_ids: tuple[int, ...] = ()  # EOS and stop ids: masked at positions before min_position
    min_position: int = 0  # i32; first position at which one of stop_ids may stand
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    output_start: int = 0  # i32; position of the first output token: those before it are the prompt
    logprobs: bool = False  # whether StepOutput.logprobs is wanted for its tokens


@dataclass(frozen=True, slots=True)
class Batch:
    """One step: S sequences, T new tokens, R rows to sample, B the widest block table. Host arrays only.

    The position of row t of sequence s is num_computed[s] + t - query_start_loc[s]; nothing else about positions
    crosses the seam, and there is no prefill flag: prefill, a chunk of it and decode differ in query_start_loc only.
    """

    query_start_loc: I32  # [S + 1]
    slots: I32  # [S]
    block_tables: I32  # [S, B]; 0 = null block
    num_computed: I32  # [S] tokens whose KV is in place before this step; -1 = as the device has counted
    token_ids: I32  # [T]; -1 = what the token table holds at (slot, position)
    logits_indices: I32  # [R] rows of T; may repeat; R may be 0
    sample_slots: I32  # [R] slot whose options apply and whose table gets the token at position + 1
    targets: I32 | None = None  # [R]; id whose logprob is wanted in the place of a drawn token's; -1: a draw as ever
    mask_rows: I32 | None = None  # [R]; row of the mask that Pending.mask() brings; -1: none
    top_logprobs: int = 0  # 0..20: columns of StepOutput.top_ids


@dataclass(frozen=True, slots=True)
class StepOutput:
    token_ids: I32  # [repeat, R], repeat = 1 until repeated steps land; -1 = NaN in the logits, -2 = nothing allowed
    logprobs: F32  # [repeat, R] log-softmax of the raw logits at the token; NaN where not asked for, or no token
    top_ids: I32 | None = None  # [repeat, R, top_logprobs], the likeliest first; None where none are asked for
    top_logprobs: F32 | None = None  # as top_ids


# ---------------------------------------------------------------- the batcher's own


@dataclass(slots=True, eq=False)
class Sequence:
    """An answer under way. Owned and changed by the batcher alone; compared by identity, never by slot."""

    request: Request
    token_ids: list[int]  # the prompt, then every token that was read back, which the engine appends
    prompt_len: int
    max_len: int  # prompt_len + the tokens it may make
    options: SlotOptions
    index: int = 0  # of the request's answers
    slot: int | None = None
    block_table: list[int] = field(default_factory=list)
    num_computed: int = 0  # tokens whose KV is in place once every enqueued step has run
    num_sampled: int = 0  # tokens drawn once every enqueued step has run; those not yet read back are in flight
    num_cached: int = 0  # prompt tokens whose KV was found instead of computed
    num_preempted: int = 0  # how often it gave its slot and blocks back, to be computed again
    matcher: Any = None  # where it stands in its constraint (Matcher of text/grammars.py); None: it draws from all ids
    admission: int = 0  # number of its last one, among all of them
    finished: bool = False
    prompt_ids: I32 | None = None  # of the prompt, as an array: to make it takes longer than all else at its start

    @property
    def known_ids(self) -> list[int] | I32:
        """token_ids, as an array where there is one."""
        return self.token_ids if self.prompt_ids is None or self.num_output else self.prompt_ids

    @property
    def num_known(self) -> int:
        """Tokens, prompt included, once every enqueued step has run."""
        return self.prompt_len + self.num_sampled

    @property
    def first_row(self) -> int:
        """The first position whose row is to be computed, whatever is cached: a token is drawn from the last one."""
        return self.num_known - 1

    @property
    def num_output(self) -> int:
        """Tokens made and read back."""
        return len(self.token_ids) - self.prompt_len
