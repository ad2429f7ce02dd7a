"""OpenAI Batch lines out: an answer or an error in the envelope of that API."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tinyvllm_cli.types import Choice, Completion, Failure

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
    failed = error is not None and error.type in OUR_FAULT
    return {
        "id": f"batch_req_{index}",
        "custom_id": completion.custom_id,
        "response": {
            "status_code": 200 if error is None else 500 if failed else 400,
            "request_id": f"req_{index}",
            "body": _body(completion, stamp) if error is None else {"error": _error(completion, error)},
        },
        "error": None if error is None else {"code": error.type, "message": error.message},
        "tinyvllm": {"index": index, "stats": stats},
    }


def _error(completion: Completion, error: Failure) -> dict[str, Any]:
    param = error.field
    if completion.api == "completions" and param == "prompt_token_ids":
        param = "prompt"  # a list of ids came under this name
    kind = "server_error" if error.type in OUR_FAULT else "invalid_request_error"
    return {"message": error.message, "type": kind, "code": error.type, "param": param}


def _body(completion: Completion, stamp: Stamp) -> dict[str, Any]:
    chat, usage = completion.api == "chat", completion.usage
    body: dict[str, Any] = {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{completion.request_id}",
        "object": "chat.completion" if chat else "text_completion",
        "created": stamp.created,
        "model": stamp.model,
        "choices": [_chat_choice(choice) if chat else _text_choice(choice) for choice in completion.choices],
    }
    if usage is not None:
        body["usage"] = {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }
    return body


def _chat_choice(choice: Choice) -> dict[str, Any]:
    message = {"role": "assistant", "content": choice.text, "refusal": None, **_reasoning(choice)}
    return {"index": choice.index, "message": message, **_end(choice)}


def _text_choice(choice: Choice) -> dict[str, Any]:
    return {"index": choice.index, "text": choice.text, **_reasoning(choice), **_end(choice)}


def _reasoning(choice: Choice) -> dict[str, str]:
    return {} if choice.reasoning is None else {"reasoning": choice.reasoning}


def _end(choice: Choice) -> dict[str, Any]:
    return {"logprobs": None, "finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
