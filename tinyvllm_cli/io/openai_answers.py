"""OpenAI Batch lines out: an answer or an error in the envelope of that API."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from tinyvllm_cli.types import Choice, Completion, Failure, TokenLogprob

OUR_FAULT = frozenset({"nan_logits", "internal"})  # of the model or the program; every other error is the request's


@dataclass(frozen=True, slots=True)
class Stamp:
    """What the answers of a run have in common."""

    model: str  # that answers, whatever a body names
    created: int  # seconds since 1970: the frozen date of the run


def batch_answer(completion: Completion, stamp: Stamp, stats: dict[str, Any] | None) -> dict[str, Any]:
    """The output line of a completion whose request was an OpenAI Batch line. Ids are made from the index: the same
    run gives the same line."""
    index, error = completion.request_id, completion.error
    status, body = (200, _body(completion, stamp)) if error is None else _refusal(error)
    truncated = {"truncated_tokens": completion.truncated_tokens} if completion.truncated_tokens else {}
    return {
        "id": f"batch_req_{index}",
        "custom_id": completion.custom_id,
        "response": {"status_code": status, "request_id": f"req_{index}", "body": body},
        "error": None if error is None else {"code": error.type, "message": error.message},
        "tinyvllm": {"index": index, **truncated, "fingerprint": completion.fingerprint, "stats": stats},
    }


def _refusal(error: Failure) -> tuple[int, dict[str, Any]]:
    """Status code and body."""
    status, kind = (500, "server_error") if error.type in OUR_FAULT else (400, "invalid_request_error")
    return status, {"error": {"message": error.message, "type": kind, "code": error.type, "param": error.field}}


def _body(completion: Completion, stamp: Stamp) -> dict[str, Any]:
    chat, usage = completion.api == "chat", completion.usage
    assert usage is not None, "what has no error has usage"
    return {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{completion.request_id}",
        "object": "chat.completion" if chat else "text_completion",
        "created": stamp.created,
        "model": stamp.model,
        "choices": [_choice(choice, chat=chat) for choice in completion.choices],
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        },
    }


def _choice(choice: Choice, *, chat: bool) -> dict[str, Any]:
    reasoning = {} if choice.reasoning is None else {"reasoning": choice.reasoning}
    if chat:
        message = {"role": "assistant", "content": choice.text, "refusal": None, **reasoning}
        answer: dict[str, Any] = {"index": choice.index, "message": message}
    else:
        answer = {"index": choice.index, "text": choice.text, **reasoning}
    logprobs = None
    if choice.logprobs is not None:
        logprobs = _chat_logprobs(choice.logprobs) if chat else _text_logprobs(choice.logprobs)
    return answer | {"logprobs": logprobs, "finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}


def _chat_logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    content = [_named(token) | {"top_logprobs": [_named(other) for other in token.top]} for token in tokens]
    return {"content": content, "refusal": None}


def _named(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token.text, "bytes": list(token.token), "logprob": token.logprob}


def _text_logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Four lists of the same length. A place in the text is in characters, control words counted among them."""
    decode = codecs.getincrementaldecoder("utf-8")("replace").decode
    lengths = [len(decode(token.token)) for token in tokens]  # of what each token completes
    return {
        "text_offset": list(accumulate(lengths, initial=0))[:-1],
        "token_logprobs": [token.logprob for token in tokens],
        "tokens": [_key(token) for token in tokens],
        "top_logprobs": [_by_text(token) for token in tokens],
    }


def _by_text(token: TokenLogprob) -> dict[str, float]:
    """The likeliest tokens in a token's place, and the token itself, which wins where another one has its text."""
    top: dict[str, float] = {}
    for other in token.top:
        top.setdefault(_key(other), other.logprob)
    return top | {_key(token): token.logprob}


def _key(token: TokenLogprob) -> str:
    """As that API writes a token that is no whole characters: so two of them never have one text."""
    try:
        return token.token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.token)
