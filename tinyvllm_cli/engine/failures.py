"""From what went wrong with one request to its Completion."""

from __future__ import annotations

import traceback

from tinyvllm_cli.errors import RequestError
from tinyvllm_cli.types import Completion, Failure, Request


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
