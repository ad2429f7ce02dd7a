"""From a request to the ids of its prompt, with room for an answer in the context: what a dry run does as well."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tinyvllm_cli.errors import RequestError
from tinyvllm_cli.types import Request

if TYPE_CHECKING:
    from tinyvllm_cli.text.codec import TextCodec


class Prompt(NamedTuple):
    ids: list[int]
    truncated: int  # tokens that were cut


def take_prompt(codec: TextCodec, request: Request, context: int) -> Prompt:
    """The ids of a prompt that leaves room for a token at least in a context of so many.

    A prompt that does not is cut where the request allows it (truncate_left), so that the whole answer fits, or where
    that would take more than half of the context, half of it. Raises RequestError prompt_too_long, and those of
    TextCodec.encode().
    """
    cut = request.truncate_left and codec.is_plain(request)
    # To tokenize what is far too long takes long, and some 250 bytes of memory a character.
    if not cut and (least := codec.least_tokens(request)) >= context:
        raise _too_long(request, f"at least {least}", context)
    ids = codec.encode(request)
    assert ids, "an empty prompt is refused where it is encoded"
    if len(ids) < context:
        return Prompt(ids, 0)
    if not cut:
        raise _too_long(request, str(len(ids)), context)
    kept = codec.keep_end(ids, context - max(1, min(request.params.max_tokens, context // 2)))
    return Prompt(kept, len(ids) - len(kept))


def _too_long(request: Request, found: str, context: int) -> RequestError:
    field = request.prompt_field
    return RequestError(
        "prompt_too_long",
        f"{field}: found {found} tokens, wanted at most {context - 1} (the context holds {context}, "
        "one is for the answer): shorten it, or raise --max-model-len where model and memory allow it",
        field,
    )
