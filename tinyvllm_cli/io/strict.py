"""What JSON must be besides valid: nested no deeper than a fixed limit, and with no key twice in an object."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from tinyvllm_cli.errors import RequestError
from tinyvllm_cli.io.fields import shown
from tinyvllm_cli.text.depth import MAX_DEPTH, too_deep


def refuse_deep(text: bytes, what: str) -> None:
    """RequestError invalid_json where `text`, called `what`, is too_deep()."""
    if too_deep(text):
        raise RequestError("invalid_json", f"{what} is nested too deeply, wanted at most {MAX_DEPTH} levels")


def refuse_equal_keys(text: str) -> None:
    """RequestError invalid_json where an object of this JSON has a key twice: parsers keep one of them in silence.

    ValueError where it is no JSON.
    """
    _decode(text)


def _once(pairs: list[tuple[str, Any]]) -> None:
    if len(dict(pairs)) == len(pairs):
        return
    counts = Counter(key for key, _ in pairs)
    key = max(counts, key=counts.__getitem__)
    raise RequestError("invalid_json", f"the field {shown(key)} stands twice in an object, wanted it once")


_decode = json.JSONDecoder(object_pairs_hook=_once, parse_int=str, parse_float=str).decode
