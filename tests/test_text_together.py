"""Prompts that are tokenized together: each is what it is alone, and a bad one stops no other."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import CHAT_TEMPLATE, SPECIAL_TOKENS, make_tiny_model

from tinyvllm_cli.errors import RequestError
from tinyvllm_cli.text.chat_template import ChatTemplate
from tinyvllm_cli.text.codec import TextCodec
from tinyvllm_cli.text.together import Asking, alone, together
from tinyvllm_cli.text.tokenizer import Tokenizer, load_tokenizer
from tinyvllm_cli.types import Message, Request


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    tokenizer = load_tokenizer(make_tiny_model(tmp_path_factory.mktemp("tiny") / "model"))
    return TextCodec(tokenizer, ChatTemplate(CHAT_TEMPLATE))


PIECES = st.lists(st.sampled_from(["a", " the", "é", "\ud800", "\n", "😀", "", *SPECIAL_TOKENS]), max_size=8)
TEXTS = PIECES.map("".join)


def asked(text: str, kind: int) -> Request:
    """As a prompt, as it is, as a conversation, or as ids, one of which there is not."""
    fields: list[dict[str, Any]] = [
        {"prompt": text},
        {"prompt": text, "raw": True},
        {"messages": (Message("user", text),)},
        {"prompt_token_ids": (len(text), 10**6 if "a" in text else 5)},
    ]
    return Request(request_id=0, custom_id=0, **fields[kind])


@given(st.lists(st.tuples(TEXTS, st.integers(0, 3)), max_size=12))
def test_each_prompt_is_what_it_is_alone(codec: TextCodec, prompts: list[tuple[str, int]]):
    requests = [asked(*prompt) for prompt in prompts]
    for request, found in zip(requests, codec.together([codec.asking(each) for each in requests]), strict=True):
        if isinstance(found, Exception):
            with pytest.raises(RequestError) as caught:
                codec.encode(request)
            assert str(caught.value) == str(found)
        else:
            assert found.tolist() == codec.encode(request)


def test_what_asks_several_times_or_never_is_answered_in_its_place(codec: TextCodec):
    def asking(*texts: str) -> Asking[list[list[int]]]:
        found = []
        for text in texts:
            found.append((yield text))
        if "bad" in texts:
            raise ValueError("bad")
        return found

    lists = [("a", "b", "c"), (), ("b",), ("a", "bad"), ("c", "a")]
    wanted = [[codec.tokenizer.ids(text) for text in texts] for texts in lists]
    found = together([asking(*texts) for texts in lists], codec.tokenizer)
    assert isinstance(found.pop(3), ValueError)
    assert found == [wanted[place] for place in (0, 1, 2, 4)]
    assert alone(asking(*lists[0]), codec.tokenizer) == wanted[0]


def test_texts_that_are_asked_for_at_once_are_tokenized_in_one_call(codec: TextCodec):
    calls = []

    class Counting(Tokenizer):
        def __init__(self) -> None:
            self.core = codec.tokenizer.core

        def ids_of_all(self, texts: Any) -> list[list[int]]:
            calls.append(len(texts))
            return super().ids_of_all(texts)

    def asking(count: int) -> Asking[None]:
        for _ in range(count):
            yield "text"

    together([asking(count) for count in (2, 0, 3, 1)], Counting())
    assert calls == [3, 2, 1]
