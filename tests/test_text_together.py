"""Prompts that are tokenized together: each is what it is alone, and a bad one stops no other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import CHAT_TEMPLATE, SPECIAL_TOKENS, make_tiny_model
from tokenizers import Tokenizer as CoreTokenizer
from tokenizers import decoders, models

import tinyvllm_cli.text.together as module
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


def test_a_text_that_the_tokenizer_refuses_stops_no_other():
    """As a model without an unknown token does with a character that its vocabulary lacks: it refuses all at once."""
    core = CoreTokenizer(models.Unigram([("a", -1.0), ("b", -1.0)], unk_id=None))
    core.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer(core)

    first, refused, later, last = together(
        [asking_for("a"), asking_for("a", "é"), asking_for("é", "a"), asking_for("ab", "b")], tokenizer
    )
    assert first == [[0]] and last == [[0, 1], [1]]
    for error in (refused, later):
        assert isinstance(error, RequestError) and error.type == "invalid_value" and "unk_id" in error.message


class Counting(Tokenizer):
    """Keeps what it is asked for in each call."""

    def __init__(self, core: CoreTokenizer) -> None:
        self.core = core
        self.calls: list[list[str]] = []

    def ids_of_all(self, texts: Sequence[str]) -> list[list[int]]:
        self.calls.append(list(texts))
        return super().ids_of_all(texts)


def asking_for(*texts: str) -> Asking[list[list[int]]]:
    found = []
    for text in texts:
        found.append((yield text))
    return found


def test_texts_that_are_asked_for_at_once_are_tokenized_in_one_call(codec: TextCodec):
    tokenizer = Counting(codec.tokenizer.core)
    together([asking_for(*["text"] * count) for count in (2, 0, 3, 1)], tokenizer)
    assert [len(call) for call in tokenizer.calls] == [3, 2, 1]


def test_of_long_texts_few_are_tokenized_at_a_time(codec: TextCodec, monkeypatch: pytest.MonkeyPatch):
    """All at once they would take the memory of all of them."""
    monkeypatch.setattr(module, "AT_ONCE", 10)
    tokenizer, texts = Counting(codec.tokenizer.core), ["a" * size for size in (4, 6, 1, 30, 10, 0, 1)]
    found = together([asking_for(text) for text in texts], tokenizer)
    assert [[len(text) for text in call] for call in tokenizer.calls] == [[4, 6], [1], [30], [10, 0], [1]]
    assert found == [[codec.tokenizer.ids(text)] for text in texts]
