"""From a request to the options of its slot: seed, stop ids and the position from which they may stand."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from functools import lru_cache
from typing import Any

from tinyvllm_cli.types import Request, SamplingParams, SlotOptions

LARGEST = 2**31 - 1  # what a device's integers hold: more than any vocabulary or context
# A repetition penalty beyond these is one of them: a logit multiplied or divided by it is still a float32.
LEAST_PENALTY, GREATEST_PENALTY = 1e-30, 1e30


def slot_options(request: Request, prompt_len: int, *, run_seed: int, eos_token_ids: Sequence[int]) -> SlotOptions:
    """How the tokens of a request with prompt_len prompt tokens are drawn.

    The token at position q is output number q - prompt_len, counted from 0, so min_tokens of them stand before
    position prompt_len + min_tokens: the first at which a stop id is allowed. With ignore_eos an EOS id is a token
    like any other.
    """
    params = request.params
    stop_ids = (*(() if params.ignore_eos else eos_token_ids), *params.stop_token_ids)
    return SlotOptions(
        temperature=params.temperature,
        top_k=min(params.top_k, LARGEST),
        top_p=params.top_p,
        min_p=params.min_p,
        seed=request_seed(request, run_seed),
        logit_bias=params.logit_bias,
        stop_ids=tuple(dict.fromkeys(stop_ids)),
        min_position=min(prompt_len + params.min_tokens, LARGEST),
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=min(max(params.repetition_penalty, LEAST_PENALTY), GREATEST_PENALTY),
        output_start=prompt_len,
        logprobs=params.logprobs is not None,
    )


def request_seed(request: Request, run_seed: int) -> int:
    """The request's own seed, else 64 bits of a hash that does not know its place in the file.

    The hash is the first 8 bytes, little endian, of BLAKE2b (RFC 7693, 64-byte digest) over the canonical JSON of
    [run seed, custom_id]; a request without an id of its own puts what determines its answer in the place of the id.
    """
    if request.params.seed is not None:
        return request.params.seed
    return _hashed([run_seed, request.custom_id if request.has_own_id else canonical_request(request)])


def sample_options(options: SlotOptions, index: int) -> SlotOptions:
    """Those of answer number `index` of a request, of which the first has `options`."""
    return options if index == 0 else replace(options, seed=sample_seed(options.seed, index))


def sample_seed(seed: int, index: int) -> int:
    """Of answer number `index`, whatever the number of answers: the request's own for the first, for the others the
    hash of request_seed over [seed, index]."""
    return seed if index == 0 else _hashed([seed, index])


def canonical_json(value: Any) -> bytes:
    """JSON with sorted keys, no spaces, in UTF-8: the order of keys is no difference; 17, 17.0 and "17" are."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", "surrogatepass")  # half a surrogate pair in a string is no reason to fail


def canonical_request(request: Request) -> dict[str, Any]:
    """What determines the tokens of an answer to a request: not how many answers there are, nor what is told of them.
    Params at their defaults are left out, so that a parameter that joins later does not change the seeds of requests
    without it."""
    return {
        "prompt": request.prompt,
        "messages": None if request.messages is None else [asdict(message) for message in request.messages],
        "prompt_token_ids": request.prompt_token_ids,
        "raw": request.raw,
        "chat_template_kwargs": dict(request.chat_template_kwargs),
        "continue_final_message": request.continue_final_message,
        "params": _given(request.params),
    }


@lru_cache(maxsize=256)  # most lines of a file have the same
def _given(params: SamplingParams) -> Mapping[str, Any]:
    given = {
        field.name: value
        for field in fields(SamplingParams)
        if (value := getattr(params, field.name)) != field.default and field.name not in {"n", "logprobs"}
    }
    if params.constraint is not None:
        given["constraint"] = [params.constraint.kind, params.constraint.source]
    return given


def _hashed(value: Any) -> int:
    digest = hashlib.blake2b(canonical_json(value)).digest()
    return int.from_bytes(digest[:8], "little")
