"""Values in a schema that llguidance 1.9 would not give back as they are, and multiples that it has no room for."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection
from decimal import Decimal
from typing import Any

MOST_REMAINDERS = 10_000  # states of an automaton; some 100 MB at ten times as many, and the time with them
MOST_IN_ALL = 20 * MOST_REMAINDERS  # in one schema; some 5 us each
EXACT = 2**53  # numbers are compared and written as float64
DIGITS = 15  # that each decimal number has in float64, and llguidance reads them right
PLACES = 22  # behind the point: 10^22 is the last power of ten that float64 has
# llguidance leaves these out of texts, though not out of names. The other control characters have short escapes.
_LOST = re.compile(r"[^\x20-\x7e\x80-\ud7ff\ue000-\U0010ffff\b\t\n\f\r]")


def common_multiple(multiples: Collection[str]) -> int:
    """The least common multiple of decimal numbers above 0, in units of the last digit that any of them has.

    Not exact once it is past MOST_REMAINDERS.
    """
    numbers = [Decimal(digits).normalize() for digits in multiples]
    least = min((exponent_of(number) for number in numbers), default=0)
    unit, product = min(least, 0), 1  # units: powers of ten
    for number in numbers:
        if number.adjusted() - unit > len(str(MOST_REMAINDERS)):
            return int(number.scaleb(-unit))
        product = math.lcm(product, int(number.scaleb(-unit)))
        if product > MOST_REMAINDERS:
            break
    return product


def exponent_of(number: Decimal) -> int:
    """Of ten, in the unit of the last digit; the number is finite."""
    exponent = number.as_tuple().exponent
    assert isinstance(exponent, int), number
    return exponent


def refuse_value(value: Any) -> str | None:
    """What is wrong with a value of const, or in a list of them, at any depth, as the rest of a sentence; None:
    answers have it as it is."""
    if isinstance(value, str):
        if lost := _LOST.search(value):
            return f"with the character U+{ord(lost[0]):04X} in a text, wanted texts without it"
    elif isinstance(value, list | dict):
        inner = value.values() if isinstance(value, dict) else value
        return next((reason for item in inner if (reason := refuse_value(item))), None)
    elif isinstance(value, int | float) and not _is_exact(value):
        wanted = f"from -2^53 to 2^53, of at most {DIGITS} digits, and {PLACES} behind the point"
        shown = json.dumps(value)
        return f"with the number {shown if len(shown) <= 40 else shown[:37] + '...'}, wanted numbers {wanted}"
    return None


def _is_exact(value: float) -> bool:
    if abs(value) > EXACT:
        return False
    if isinstance(value, int):
        return True
    number = Decimal(repr(value)).normalize()
    return len(number.as_tuple().digits) <= DIGITS and exponent_of(number) >= -PLACES
