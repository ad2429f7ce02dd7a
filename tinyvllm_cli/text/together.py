"""Texts of many requests become ids together, on all cores: one by one they would keep a GPU waiting."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, TypeAlias, TypeVar

if TYPE_CHECKING:
    from tinyvllm_cli.text.tokenizer import Tokenizer

T = TypeVar("T")
# Yields a text, is sent its ids (of Tokenizer.ids), as often as it needs some, and returns what it makes of them.
Asking: TypeAlias = Generator[str, list[int], T]


def alone(asking: Asking[T], tokenizer: Tokenizer) -> T:
    """What one comes to, or raises."""
    try:
        text = next(asking)
        while True:
            text = asking.send(tokenizer.ids(text))
    except StopIteration as end:
        result: T = end.value
        return result


def together(askings: Sequence[Asking[T]], tokenizer: Tokenizer) -> list[T | Exception]:
    """What each comes to, or raises."""
    outcomes: dict[int, T | Exception] = {}
    asked: dict[int, str] = {}

    def go_on(place: int, ids: list[int] | None) -> None:
        try:
            # A generator is begun by sending None.
            asked[place] = askings[place].send(ids)  # type: ignore[arg-type]
        except StopIteration as end:
            outcomes[place] = end.value
        except Exception as error:
            outcomes[place] = error

    for place in range(len(askings)):
        go_on(place, None)
    while asked:
        places, texts = list(asked), list(asked.values())
        asked.clear()
        for place, ids in zip(places, tokenizer.ids_of_all(texts), strict=True):
            go_on(place, ids)
    return [outcomes[place] for place in range(len(askings))]
