"""Stop strings in text that comes in pieces: nothing is shown that would have to be taken back."""

from __future__ import annotations

from collections.abc import Sequence


class StopFinder:
    """Looks for stop strings across the borders of pieces.

    The match that is complete first wins, whatever the order of the list; of those that end at the same character the
    one that starts first (the longest). So the result does not depend on how the text is cut into pieces.

    stops: none of them empty. include: whether the stop string itself belongs to the text.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self.matched: str | None = None
        self._stops = tuple(stops)
        self._include = include
        self._longest = max(map(len, stops), default=0)
        self._held = ""  # the end of the text so far: it may be the beginning of a stop string

    def push(self, text: str, *, counts: bool = True) -> str:
        """The text that is certain now; after a match the rest before it (and the match, if included), then ''.

        counts=False: a stop string that ends in this piece is no match (min_tokens is not reached).
        """
        if self.matched is not None or not self._stops:
            return "" if self._stops else text
        text = self._held + text
        if counts and (match := self._first_match(text)):
            start, end, self.matched = match
            self._held = ""
            return text[: end if self._include else start]
        keep = self._open_suffix(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """What was held back, now that no more text comes."""
        held, self._held = self._held, ""
        return held

    def clear(self) -> None:
        """Forget the text so far."""
        self._held = ""

    def _first_match(self, text: str) -> tuple[int, int, str] | None:
        """(start, end, stop) of the match that ends first, among those that end in the new part of the text."""
        old = len(self._held)
        found = []
        for stop in self._stops:
            start = text.find(stop, max(0, old - len(stop) + 1))
            if start >= 0:
                found.append((start + len(stop), start, stop))
        if not found:
            return None
        end, start, stop = min(found)
        return start, end, stop

    def _open_suffix(self, text: str) -> int:
        """Length of the longest end of the text that is a beginning of a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            if any(len(stop) > length and text.endswith(stop[:length]) for stop in self._stops):
                return length
        return 0
