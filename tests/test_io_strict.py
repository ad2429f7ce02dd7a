"""JSON beyond the grammar: a fixed limit of nesting, and no key twice in an object."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lines import read_one, refusal

from tinyvllm_cli.text.depth import MAX_DEPTH, too_deep
from tinyvllm_cli.types import Request


def nested(levels: int) -> bytes:
    return b"[" * levels + b"]" * levels


@pytest.mark.parametrize("field", [b"metadata", b"chat_template_kwargs"])
def test_the_limit_of_nesting_is_a_number_and_not_the_stack_that_is_left(field: bytes):
    for levels, fine in ((MAX_DEPTH - 2, True), (MAX_DEPTH - 1, False), (100_000, False)):
        line = b'{"custom_id": 1, "prompt": "x", "%s": {"a": %s}}' % (field, nested(levels))
        item = read_one(line)
        assert isinstance(item, Request) is fine
        assert item.custom_id == (1 if fine else "line-1")
        if not fine:
            message = f"the line is nested too deeply, wanted at most {MAX_DEPTH} levels"
            assert refusal(line) == ("invalid_json", message, None)


@given(st.text(st.sampled_from('[]{}"\\ax\n'), max_size=30), st.integers(0, 3))
def test_brackets_in_texts_do_not_nest(text: str, more: int):
    inner = json.dumps(["[" * 200 + text]).encode()
    line = b'{"prompt": %s, "metadata": %s}' % (json.dumps(text + "{" * 200).encode(), nested(more))
    assert not too_deep(line) and not too_deep(inner)
    assert too_deep(b"[" * (MAX_DEPTH - 1) + inner + b"[[")


@pytest.mark.parametrize(
    "line",
    [
        b'{"prompt": "a", "prompt": "a"}',
        b'{"messages": [{"role": "user", "role": "user", "content": "a"}]}',
        b'{"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "text": "b"}]}]}',
        b'{"prompt": "a", "logit_bias": {"5": 1, "\\u0035": 2}}',
        b'{"prompt": "a", "metadata": [{"k": {"l": 1, "l": 1}}]}',
        b'{"prompt": "a", "chat_template_kwargs": {"a": 1, "a": 1}}',
    ],
)
def test_no_object_has_a_key_twice_at_any_level(line: bytes):
    type, message, _ = refusal(line)
    assert type == "invalid_json" and "stands twice" in message
