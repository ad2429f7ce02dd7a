"""From requests to what an engine queues: the ids of a prompt, with room for an answer, and the answers to be made."""

from __future__ import annotations

from collections import abc
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tinyvllm_cli.engine.kv_memory import ceil_div
from tinyvllm_cli.engine.live import Live
from tinyvllm_cli.engine.logprobs import Logprobs
from tinyvllm_cli.engine.sampling import sample_options, slot_options
from tinyvllm_cli.engine.stats import Timeline
from tinyvllm_cli.errors import RequestError
from tinyvllm_cli.types import I32, Limits, Request, Sequence

if TYPE_CHECKING:
    from tinyvllm_cli.text.codec import TextCodec
    from tinyvllm_cli.text.together import Asking


class Prompt(NamedTuple):
    ids: I32
    truncated: int  # tokens that were cut


class Intake:
    """Makes of requests what is queued, or finds out why one cannot be answered."""

    def __init__(
        self,
        codec: TextCodec,
        limits: Limits,
        *,
        eos_token_ids: tuple[int, ...],
        run_seed: int,
        clock: abc.Callable[[], float],
    ) -> None:
        """As of Engine."""
        self._codec = codec
        self._limits = limits
        self._eos_token_ids = eos_token_ids
        self._run_seed = run_seed
        self._clock = clock

    def accept(self, requests: abc.Sequence[Request], *, deltas: bool) -> list[Live | Exception]:
        """Each with its sequences, to be queued now, or what stands against it. deltas: as of Engine."""
        prompts = take_prompts(self._codec, requests, self._limits.max_seq_len)
        return [self._live(request, prompt, deltas) for request, prompt in zip(requests, prompts, strict=True)]

    def _live(self, request: Request, prompt: Prompt | Exception, deltas: bool) -> Live | Exception:
        try:
            return prompt if isinstance(prompt, Exception) else self._accepted(request, prompt, deltas)
        except Exception as error:
            return error

    def _accepted(self, request: Request, prompt: Prompt, deltas: bool) -> Live:
        """Room and text of a request, which arrives now. RequestError where it cannot be answered."""
        params, constraint, codec = request.params, request.params.constraint, self._codec
        prompt_ids, prompt_len = prompt.ids, len(prompt.ids)
        max_len = min(prompt_len + params.max_tokens, self._limits.max_seq_len)
        self._require_blocks(request.prompt_field, prompt_len, max_len)
        first = slot_options(request, prompt_len, run_seed=self._run_seed, eos_token_ids=self._eos_token_ids)
        sequences = [
            Sequence(
                request,
                _listed(request, prompt),
                prompt_len,
                max_len,
                sample_options(first, index),
                index,
                matcher=None if constraint is None else codec.grammars.matcher(constraint),
                prompt_ids=prompt_ids,
            )
            for index in range(params.n)
        ]
        eos_ends = not params.ignore_eos or constraint is not None  # a mask has it only where an answer may end
        ends = frozenset((*params.stop_token_ids, *(self._eos_token_ids if eos_ends else ())))
        answers = [codec.answer(request, sequence.token_ids) for sequence in sequences]
        logprobs = [] if params.logprobs is None else [Logprobs(params.logprobs) for _ in sequences]
        late = not (deltas or params.stop)
        return Live(request, sequences, answers, Timeline(self._clock()), ends, prompt.truncated, late, logprobs)

    def _require_blocks(self, field: str, prompt_len: int, max_len: int) -> None:
        """RequestError where not even an empty memory holds the sequence. Its last token has no KV."""
        limits = self._limits
        needed, held = ceil_div(max_len - 1, limits.block_size), limits.num_blocks - 1
        if needed > held:
            raise RequestError(
                "prompt_too_long",
                f"{field}: found {prompt_len} tokens, which with an answer of {max_len - prompt_len} need {needed} KV "
                f"blocks of {limits.block_size} tokens, and memory holds {held}: shorten it or lower max_tokens",
                field,
            )


def _listed(request: Request, prompt: Prompt) -> list[int]:
    """The ids of a prompt; those that came as ids are numbers already, which it takes long to make of an array."""
    given = request.prompt_token_ids
    return prompt.ids.tolist() if given is None or prompt.truncated else list(given)


def take_prompts(codec: TextCodec, requests: abc.Sequence[Request], context: int) -> list[Prompt | Exception]:
    """The prompt of each, or what take_prompt() raises for it."""
    return codec.together([_taking(codec, request, context) for request in requests])


def take_prompt(codec: TextCodec, request: Request, context: int) -> Prompt:
    """The ids of a prompt that leaves room for a token at least in a context of so many.

    A prompt that does not is cut where the request allows it (truncate_left), so that the whole answer fits, or where
    that would take more than half of the context, half of it. Raises RequestError prompt_too_long, and those of
    TextCodec.asking().
    """
    (prompt,) = take_prompts(codec, [request], context)
    if isinstance(prompt, Exception):
        raise prompt
    return prompt


def _taking(codec: TextCodec, request: Request, context: int) -> Asking[Prompt]:
    cut = request.truncate_left and codec.is_plain(request)
    # To tokenize what is far too long takes long, and some 250 bytes of memory a character.
    if not cut and (least := codec.least_tokens(request)) >= context:
        raise _too_long(request, f"at least {least}", context)
    ids: I32 = np.asarray((yield from codec.asking(request)), np.int32)
    assert len(ids), "an empty prompt is refused where it is encoded"
    if len(ids) < context:
        return Prompt(ids, 0)
    if not cut:
        raise _too_long(request, str(len(ids)), context)
    kept = codec.keep_end(ids.tolist(), context - max(1, min(request.params.max_tokens, context // 2)))
    return Prompt(np.array(kept, np.int32), len(ids) - len(kept))


def _too_long(request: Request, found: str, context: int) -> RequestError:
    field = request.prompt_field
    return RequestError(
        "prompt_too_long",
        f"{field}: found {found} tokens, wanted at most {context - 1} (the context holds {context}, "
        "one is for the answer): shorten it, or raise --max-model-len where model and memory allow it",
        field,
    )
