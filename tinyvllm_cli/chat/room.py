"""Room in the context: how many of the oldest turns would have to go."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from typing import TYPE_CHECKING

from tinyvllm_cli.chat.session import Session
from tinyvllm_cli.types import Message

if TYPE_CHECKING:
    from tinyvllm_cli.text.codec import TextCodec


def turns_to_drop(session: Session, codec: TextCodec, context: int) -> int | None:
    """How many of the oldest turns to leave out, so that the rest leaves an answer the room of max_tokens, or a quarter
    of the context of so many tokens where that is less. Where the last turn alone does not, all others go; None: it has
    no room at all. RequestError.
    """
    request = session.request()

    def fits(count: int, room: int) -> bool:
        messages = session.without(count)
        if messages[-1].role == "assistant":  # only a user's message is answered: the next one may be short
            messages = (*messages, Message("user", ""))
        asked = replace(request, messages=messages)
        # To tokenize what is far too long takes long.
        return codec.least_tokens(asked) < context and len(codec.encode(asked)) <= context - room

    room = min(request.params.max_tokens, max(1, context // 4))
    count = bisect_left(range(session.turns), True, key=lambda count: fits(count, room))
    if count < session.turns:
        return count
    return session.turns - 1 if fits(session.turns - 1, 1) else None
