"""Reading lines in tests: what a line becomes, and why one is refused."""

import io
import json
from typing import Any

from hypothesis import strategies as st

from tinyvllm_cli.io.prompts import Defaults, Item, read_lines, read_requests
from tinyvllm_cli.types import Completion, Request

GOOD: dict[str, Any] = {"prompt": "Plum jam"}

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def read(data: bytes, defaults: Defaults | None = None, **options: Any) -> list[Item]:
    return list(read_requests(read_lines(io.BytesIO(data)), defaults or Defaults(), **options))


def read_one(line: bytes | dict[str, Any], defaults: Defaults | None = None) -> Item:
    (item,) = read(line if isinstance(line, bytes) else json.dumps(line).encode(), defaults)
    return item


def request(line: bytes | dict[str, Any], defaults: Defaults | None = None) -> Request:
    item = read_one(line, defaults)
    assert isinstance(item, Request), item
    return item


def refusal(line: bytes | dict[str, Any], defaults: Defaults | None = None) -> tuple[str, str, str | None]:
    item = read_one(line, defaults)
    assert isinstance(item, Completion), item
    assert item.error is not None and item.error.detail is None
    assert "\n" not in item.error.message
    return item.error.type, item.error.message, item.error.field
