"""Text of a model on a terminal: what would steer the terminal or turn the text around is shown as escapes."""

from __future__ import annotations

import io
import re

# All controls but tab and line feed, the other line ends, what overrides the direction of writing, and surrogates,
# which no encoding has. Joiners stay: emoji and several scripts need them.
STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    return STEERING.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class VisibleText:
    """The same for a text that comes in pieces, with each kind of line end as a line feed."""

    def __init__(self) -> None:
        self._line_ends = io.IncrementalNewlineDecoder(None, translate=True)

    def push(self, text: str, *, final: bool = False) -> str:
        """What can be shown now: a carriage return waits for the line feed that may follow."""
        return visible(self._line_ends.decode(text, final))
