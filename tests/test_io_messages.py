"""Messages and metadata of a line: read as they are, refused by place, never a bug."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lines import json_values, read_one, refusal, request

from tinyvllm_cli.types import Completion, Message, Request


def conversation(*contents: Any, role: str = "user", **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content, **more} for content in contents]}


def test_messages_are_read_and_text_parts_joined():
    parts = [{"type": "text", "text": "a\n"}, {"type": "text", "text": " b"}]
    line = {"messages": [{"role": "developer", "content": "s"}, {"role": "user", "content": parts, "name": None}]}
    assert request(line).messages == (Message("system", "s"), Message("user", "a\n b"))


message_keys = st.sampled_from(["role", "content", "type", "text", "tool_calls", "name"])
message_like = st.recursive(
    json_values | st.sampled_from(["user", "tool", "text", "image_url"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(message_keys, inner, max_size=3),
    max_leaves=6,
)


@given(role=message_like, content=message_like, more=st.dictionaries(message_keys, message_like, max_size=2))
def test_whatever_stands_in_a_message_is_no_bug(role: Any, content: Any, more: dict[str, Any]):
    item = read_one({"messages": [{**more, "role": role, "content": content}]})
    assert isinstance(item, Request) or (item.error and item.error.type != "internal")


@pytest.mark.parametrize(
    ("line", "type", "field"),
    [
        (conversation("a", role=[]), "invalid_value", "messages[0].role"),
        (conversation("a", role={"a": 1}), "invalid_value", "messages[0].role"),
        (conversation([{"type": "text", "text": "a", "txet": "b"}]), "unknown_field", "messages[0].content[0]"),
        (conversation(None), "invalid_value", "messages[0].content"),
        (conversation("a", 5), "invalid_value", "messages[1].content"),
        (conversation(["a"]), "invalid_value", "messages[0].content[0]"),
        (conversation([{"type": "text"}]), "invalid_value", "messages[0].content[0]"),
        (conversation([{"type": "text", "text": None}]), "invalid_value", "messages[0].content[0]"),
        (conversation([{"type": "image_url", "image_url": {}}]), "unsupported", "messages[0].content[0]"),
        (conversation([{"type": "input_audio"}]), "unsupported", "messages[0].content[0]"),
        (conversation([{"type": "file"}]), "unsupported", "messages[0].content[0]"),
        (conversation("a", role="tool"), "unsupported", "messages[0].role"),
        (conversation("a", role="User"), "invalid_value", "messages[0].role"),
        (conversation("a", role=""), "invalid_value", "messages[0].role"),
        (conversation("a", tool_calls=[{}]), "unsupported", "messages[0]"),
        (conversation("a", name="Ann"), "unsupported", "messages[0]"),
        (conversation("a", contents="b"), "unknown_field", "messages[0]"),
        ({"messages": [{"content": "a"}]}, "invalid_value", "messages[0].role"),
        ({**conversation("a"), "raw": True}, "invalid_value", "raw"),
    ],
)
def test_messages_that_are_none(line: dict[str, Any], type: str, field: str):
    assert refusal(line)[::2] == (type, field)


# ---------------------------------------------------------------- metadata


@pytest.mark.parametrize("text", [b"null", b"1.50", b"12345678901234567890123", b'{"a": [1, {"b": "\\u00e9"}]}', b'""'])
def test_metadata_is_kept_as_the_text_it_is(text: bytes):
    assert request(b'{"prompt": "x", "metadata": ' + text + b"}").metadata_json == text
    failed = read_one(b'{"prompt": 1, "metadata": ' + text + b"}")
    assert isinstance(failed, Completion) and failed.metadata_json == text


@given(json_values, st.sampled_from([b"\r", b" \r\t"]))
def test_metadata_never_holds_a_line_end(value: Any, space: bytes):
    text = json.dumps(value, indent=1).encode().replace(b"\n", space)
    kept = request(b'{"prompt": "x", "metadata": ' + text + b"}").metadata_json
    assert kept is not None and b"\r" not in kept and json.loads(kept) == value


def test_metadata_that_no_strict_reader_takes_back_is_refused():
    assert refusal(b'{"prompt": "x", "metadata": {"a": 1e999}}')[::2] == ("invalid_value", "metadata")
