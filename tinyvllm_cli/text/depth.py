"""How deep JSON is nested, told without parsing it."""

from __future__ import annotations

import re

MAX_DEPTH = 100  # objects and arrays inside each other; far below where any parser's own stack ends
# Possessive, so that a long string costs no memory for ways back.
STRING_OR_BRACKET = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[\[{]|[\]}]', re.DOTALL)


def too_deep(text: bytes) -> bool:
    """Whether brackets outside strings open more than MAX_DEPTH levels. The text need not be JSON."""
    if text.count(b"[") + text.count(b"{") <= MAX_DEPTH:
        return False
    depth = 0
    for match in STRING_OR_BRACKET.finditer(text):
        token = match[0]
        depth += (token in b"[{") - (token in b"]}")
        if depth > MAX_DEPTH:
            return True
    return False
