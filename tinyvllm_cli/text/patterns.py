"""Regular expressions as users write them: what every reader of them takes alike, and how llguidance is given it."""

from __future__ import annotations

import re

_CLASS = re.compile(r"\\.|\[((?:\\.|[^\]\\])*)\]", re.DOTALL)  # an escaped character, or a character class
_ESCAPE = re.compile(r"\\.", re.DOTALL)
_SETS = re.compile(r"\[|&&|--|~~")

_YEAR = r"(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"  # 1 to 9999, as programs have them
_BY_4 = r"(?:0[48]|[2468][048]|[13579][26])"  # two digits that 4 divides, but 00
_DAY = (
    rf"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    rf"|02-(?:0[1-9]|1[0-9]|2[0-8]))|(?:[0-9]{{2}}{_BY_4}|{_BY_4}00)-02-29)"
)
# Formats of which llguidance 1.9 allows a little too much: it has a 29th of February in every year, and a year 0.
EXACT_FORMATS = {"date": f"^{_DAY}$", "date-time": f"^{_DAY}[tT]"}


def refuse_pattern(pattern: str) -> str | None:
    """What is wrong with a pattern that Rust's regex (which llguidance has), Python and ECMAScript read differently:
    sets inside a character class. None: nothing.
    """
    for found in _CLASS.finditer(pattern):
        inside = found[1]
        if inside is not None and (inside in ("", "^") or _SETS.search(_ESCAPE.sub("", inside))):
            return f"in which the class {found[0]} is not supported: write [ ] & - ~ in it as \\[ \\] \\& \\- \\~"
    return None


def choice_pattern(texts: list[str]) -> str:
    """A pattern of these texts and no other."""
    return "|".join("".join(char if char.isalnum() else f"\\x{{{ord(char):x}}}" for char in text) for text in texts)
