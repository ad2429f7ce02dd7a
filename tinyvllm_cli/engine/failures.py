"""From what went wrong with one request to its Completion."""

from __future__ import annotations

import traceback

from tinyvllm_cli.errors import RequestError
from tinyvllm_cli.types import Completion, Failure, Request

NAN_LOGITS = -1  # in the place of a token (StepOutput.token_ids)


def failed(request: Request, failure: Failure) -> Completion:
    """A request that has no answer."""
    return Completion(
        request_id=request.request_id,
        custom_id=request.custom_id,
        line=request.line,
        error=failure,
        metadata_json=request.metadata_json,
        api=request.api,
        fingerprint=request.fingerprint,
    )


def as_failure(error: Exception) -> Failure:
    """What went wrong with one request. Running out of memory is no request's fault and is raised again."""
    if isinstance(error, MemoryError):
        raise error
    if isinstance(error, RequestError):
        return Failure(error.type, error.message, error.field)
    message = " ".join(f"a bug in this program: {type(error).__name__}: {error}".split())
    return Failure("internal", message, detail="".join(traceback.format_exception(error)))


def no_token(token_id: int, num_output: int) -> Failure:
    """Why a backend could draw no token (StepOutput.token_ids)."""
    if token_id == NAN_LOGITS:
        return Failure("nan_logits", f"answer token {num_output + 1}: found NaN or infinity in the logits of the model")
    return Failure(
        "invalid_value",
        f"min_tokens: answer token {num_output + 1} found every id that may follow held back as an EOS or stop id, "
        "wanted one allowed",
        "min_tokens",
    )
