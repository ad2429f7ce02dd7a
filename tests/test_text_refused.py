"""A model whose vocabulary lacks characters, and an unknown token in their place: texts with them fail, no others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tiny import CHAT_TEMPLATE, make_tiny_model
from tokenizers import Tokenizer, decoders, models

from tinyvllm_cli import LLM, SamplingParams

ONE = SamplingParams(max_tokens=1)
WORDS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = make_tiny_model(tmp_path_factory.mktemp("lacking") / "model", chat_template=CHAT_TEMPLATE)
    pieces = [*WORDS, *map(chr, range(ord("a"), ord("z") + 1)), *"\n <>/|_"]
    core = Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], unk_id=None))
    core.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    core.add_special_tokens(list(WORDS))
    core.save(str(folder / "tokenizer.json"))
    with LLM(folder, backend="cpu", slots=2, max_model_len=128) as llm:
        yield llm


@pytest.mark.parametrize("lacking", ["é", "a</s>é"], ids=["a text", "one with a control word"])
def test_a_text_that_the_tokenizer_cannot_take_fails_alone(llm: LLM, lacking: str):
    texts = ["ab", lacking, "ba", "b</s>a"]
    for answers in (llm.generate(texts, ONE), llm.chat(texts, ONE), llm.score(texts)):
        assert [answer.error and answer.error.type for answer in answers] == [None, "invalid_value", None, None]
        assert answers[1].error is not None and answers[1].error.message.startswith("the model's tokenizer cannot")


def test_a_choice_is_between_the_texts_that_there_are_tokens_for(llm: LLM):
    some, none = (llm.generate(["ab"], SamplingParams(choice=texts))[0] for texts in (["é", "yes"], ["é"]))
    assert some.text == "yes"
    assert none.error is not None and none.error.type == "invalid_schema"
