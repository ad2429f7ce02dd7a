"""Texts of many requests become ids together, on all cores: one by one they would keep a GPU waiting."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias, TypeVar

if TYPE_CHECKING:
    from tinyvllm_cli.text.tokenizer import Tokenizer

T = TypeVar("T")
AT_ONCE = 2_000_000  # characters: while they are split they take up to some 250 bytes of memory each
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
    """What each comes to, or raises; a text that the tokenizer refuses ends the one that asked for it."""
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
        for place, ids in zip(places, _ids_of_each(texts, tokenizer), strict=True):
            if isinstance(ids, Exception):
                outcomes[place] = ids
            else:
                go_on(place, ids)
    return [outcomes[place] for place in range(len(askings))]


def _ids_of_each(texts: Sequence[str], tokenizer: Tokenizer) -> Sequence[list[int] | Exception]:
    """The ids of each text, or why it has none."""
    found: list[list[int] | Exception] = []
    for some in _portions(texts):
        try:
            found += tokenizer.ids_of_all(some)
        except Exception:  # of one of them
            found += [_ids_or_error(text, tokenizer) for text in some]
    return found


def _portions(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    """The texts in their order, so many at a time as are AT_ONCE characters, or one."""
    first, size = 0, 0
    for place, text in enumerate(texts):
        if place > first and size + len(text) > AT_ONCE:
            yield texts[first:place]
            first, size = place, 0
        size += len(text)
    yield texts[first:]


def _ids_or_error(text: str, tokenizer: Tokenizer) -> list[int] | Exception:
    try:
        return tokenizer.ids(text)
    except Exception as error:
        return error
