"""From a text, or a context and its continuations, to ids, and which of them are scored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from tinyvllm_cli.errors import RequestError
from tinyvllm_cli.types import Request

if TYPE_CHECKING:
    from tinyvllm_cli.text.codec import TextCodec


class Part(NamedTuple):
    """What gets one score."""

    ids: list[int]
    num_scored: int  # of them, the last ones; the first one never is, for nothing stands before it


def take_parts(codec: TextCodec, request: Request, context: int) -> list[Part]:
    """One for a text, one for each continuation. context: ids of a part at most.

    RequestError empty_prompt, prompt_too_long, invalid_token_id, invalid_value.
    """
    if request.continuations is not None:
        if request.prompt_token_ids is not None:
            return _ids_behind(codec, request.prompt_token_ids, request.continuations, context)
        return _texts_behind(codec, request.prompt or "", request.continuations, context)
    if request.prompt_token_ids is not None:
        ids, what = list(request.prompt_token_ids), "ids"
        codec.check_ids("text", ids)
    else:
        text, what = request.prompt or "", "tokens"
        _refuse_far_too_long(codec, text, context, "text", "text")
        ids = codec.encode_plain(text, "text")
    if not ids:
        raise RequestError("empty_prompt", f"the text has no {what}", "text")
    _refuse_long(len(ids), context, "text", "text")
    return [Part(ids, len(ids) - 1)]


def _ids_behind(
    codec: TextCodec, head: Sequence[int], continuations: Sequence[str | tuple[int, ...]], context: int
) -> list[Part]:
    codec.check_ids("context", head)
    if not head:
        raise RequestError(
            "empty_prompt", "context has no ids, wanted one at least before the continuations", "context"
        )
    parts = []
    for number, tail in enumerate(continuations):
        what = f"continuations[{number}]"
        if isinstance(tail, str) or not tail:
            found = "a text beside a context of ids" if isinstance(tail, str) else "empty"
            raise RequestError("invalid_value", f"{what} is {found}, wanted a list of ids", "continuations")
        codec.check_ids("continuations", tail)
        # The last id is a target only: one more than the context holds, as the windows of lm-evaluation-harness have.
        _refuse_long(len(head) + len(tail), context + 1, f"context with {what}", "continuations")
        parts.append(Part([*head, *tail], len(tail)))
    return parts


def _texts_behind(
    codec: TextCodec, text: str, continuations: Sequence[str | tuple[int, ...]], context: int
) -> list[Part]:
    """The border is that of lm-evaluation-harness (api/model.py, TemplateLM._encode_pair): white space at the end of
    the context goes to the continuation; then the ids of a continuation are those of both together behind as many as
    the context alone has. Before them stand the context's own ids, also where a token of both together spans the
    border."""
    _refuse_far_too_long(codec, text, context, "context", "context")
    stripped = text.rstrip()
    blank = text[len(stripped) :]
    head = codec.encode_plain(stripped, "context")
    if not head:
        message = "context has no tokens, and the model no BOS that could stand in its place, wanted a text before the"
        raise RequestError("empty_prompt", f"{message} continuations", "context")
    parts = []
    for number, continuation in enumerate(continuations):
        if not isinstance(continuation, str):
            message = f"continuations[{number}] is ids beside a context that is a text, wanted a text"
            raise RequestError("invalid_value", message, "continuations")
        whole, what = stripped + blank + continuation, f"context with continuations[{number}]"
        _refuse_far_too_long(codec, whole, context, what, "continuations")
        tail = codec.encode_plain(whole, "continuations")[len(head) :]
        if not tail:
            message = f"continuations[{number}] has no token of its own: it merges into the last one of the context"
            raise RequestError("invalid_value", f"{message}, wanted a longer text", "continuations")
        _refuse_long(len(head) + len(tail), context, what, "continuations")
        parts.append(Part(head + tail, len(tail)))
    return parts


def _refuse_far_too_long(codec: TextCodec, text: str, context: int, what: str, field: str) -> None:
    """To tokenize what is far too long takes long, and some 250 bytes of memory a character."""
    least = codec.least_plain(text)
    _refuse_long(least, context, what, field, found=f"at least {least}")


def _refuse_long(tokens: int, context: int, what: str, field: str, found: str | None = None) -> None:
    if tokens > context:
        raise RequestError(
            "prompt_too_long",
            f"{what}: found {found or tokens} tokens, wanted at most {context}, which the context holds: shorten it, "
            "or raise --max-model-len where model and memory allow it",
            field,
        )
