"""Regular expressions as users write them: what every reader of them takes alike, and how llguidance is given it."""

from __future__ import annotations

import re

# An escaped character, or a character class. One without an end is found too: else each [ would be gone through to it.
_CLASS = re.compile(r"\\.|\[((?:\\.|[^\]\\])*+)(\]?)", re.DOTALL)
_ESCAPE = re.compile(r"\\.", re.DOTALL)
_SETS = re.compile(r"\[|&&|--|~~")
_COUNT = re.compile(r"\\.(?:\{[^}]*+\}?)?|\{([0-9]{1,18})(?:,([0-9]{0,18}))?\}", re.DOTALL)  # or another escape
MOST_TIMES = 10_000  # a million of one letter take llguidance 200 MB
_NO_LOOKING = re.compile(r"(\\[bB<>1-9]|\(\?<?[=!])|\\.", re.DOTALL)  # what is not supported, or another escape
_ONE = r"(\\(?:[xuUpP]\{[^}]{0,60}+\}|x..|u.{4}|U.{8}|[pP].|.)|.)"  # of what a class lists
_RANGE = re.compile(f"{_ONE}(?:-{_ONE})?", re.DOTALL)  # or one alone
SEVERAL = (r"\d", r"\D", r"\w", r"\W")  # characters, in a class
_LINE_END = re.compile(r"[\n\r\t]")
_VERBOSE = re.compile(r"\\.|(\(\?[a-zA-Z]*x)", re.DOTALL)
# Only where it is sure: beside groups and repetitions these may be at an end after all.
_INSIDE = re.compile(r"[a-zA-Z0-9.]\^(?![*?{])|\$[a-zA-Z0-9.](?![*?{])")

_YEAR = r"(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"  # 1 to 9999, as programs have them
_BY_4 = r"(?:0[48]|[2468][048]|[13579][26])"  # two digits that 4 divides, but 00
_DAY = (
    rf"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    rf"|02-(?:0[1-9]|1[0-9]|2[0-8]))|(?:[0-9]{{2}}{_BY_4}|{_BY_4}00)-02-29)"
)
# Formats of which llguidance 1.9 allows a little too much: it has a 29th of February in every year, and a year 0.
EXACT_FORMATS = {"date": f"^{_DAY}$", "date-time": f"^{_DAY}[tT]"}


def refuse_pattern(pattern: str) -> str | None:
    """What is wrong with a pattern, as the rest of a sentence; None: nothing, as far as it can be seen here.

    Sets inside a character class, which Rust's regex (that of llguidance), Python and ECMAScript read differently; what
    llguidance reads as something else; and what it refuses in words of its own.
    """
    for found in _CLASS.finditer(pattern):
        if found[1] is not None and (reason := _refuse_class(found)):
            return reason
    plain = _CLASS.sub(lambda found: found[0] if found[1] is None else " ", pattern)
    return _refuse_misread(pattern, plain) or _refuse_unsupported(plain)


def _refuse_class(found: re.Match[str]) -> str | None:
    """found: by _CLASS."""
    inside = found[1]
    if not found[2]:
        return f"in which {_shown(found[0])} is an unclosed character class, wanted \\[ for the character"
    if inside in ("", "^") or _SETS.search(_ESCAPE.sub("", inside)):
        return f"in which the class {_shown(found[0])} is not supported: write [ ] & - ~ in it as \\[ \\] \\& \\- \\~"
    for part in _RANGE.finditer(inside.removeprefix("^")):
        # llguidance sees one that goes up to [, and more. From several, as in [\w-.], it takes - as most readers do.
        if part[2] in SEVERAL and part[1] not in SEVERAL:
            return (
                f"in which {_shown(part[0])} in the class {_shown(found[0])} is no range, wanted \\- for the character"
            )
    return None


def _refuse_misread(pattern: str, plain: str) -> str | None:
    """plain: the pattern without classes."""
    if _ESCAPE.sub("", pattern).endswith("\\"):  # llguidance drops it
        return "in which \\ at the end escapes nothing, wanted \\\\ for the character"
    if _LINE_END.search(pattern) and any(found[1] for found in _VERBOSE.finditer(plain)):  # it would be no blank
        return (
            "in which (?x) stands beside a line end or tab, which is not supported: write it on one line, with blanks"
        )
    return None


def _refuse_unsupported(plain: str) -> str | None:
    for found in _COUNT.finditer(plain):
        if found[1] and max(int(found[1]), int(found[2] or 0)) > MOST_TIMES:
            return f"in which {found[0]} repeats something, wanted at most {MOST_TIMES} times"
    for found in _NO_LOOKING.finditer(plain):
        if found[1]:
            return f"in which {found[1]} is not supported: no look-ahead or look-behind, word border or back-reference"
    if inner := _INSIDE.search(_ESCAPE.sub(" ", plain)):
        sign = "^" if "^" in inner[0] else "$"
        return f"in which {sign} stands inside, wanted it at an end only, or \\{sign} for the character"
    return None


def _shown(text: str) -> str:
    return text if len(text) <= 40 else text[:37] + "..."


def choice_pattern(texts: list[str]) -> str:
    """A pattern of these texts and no other."""
    return "|".join("".join(char if char.isalnum() else f"\\x{{{ord(char):x}}}" for char in text) for text in texts)
