"""Control words in contents stay text, whatever the template does to the contents, and its own stay control words."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from text_templates import FAMILIES, Family
from text_vocab import CONTROL, byte_level, sentencepiece
from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as CoreTokenizer

from tinyvllm_cli.errors import RequestError
from tinyvllm_cli.text.chat_template import ChatTemplate
from tinyvllm_cli.text.codec import TextCodec
from tinyvllm_cli.text.gguf_tokenizer import build_tokenizer
from tinyvllm_cli.text.tokenizer import Tokenizer
from tinyvllm_cli.types import Message, Request

EOT = "<|eot_id|>"
ECHO = "{{ bos_token }}{% for m in messages %}[{{ m.content }}]{% endfor %}<|eot_id|>"


def loop(body, words=("<s>", EOT)):
    """A family whose template does this to each message m."""
    return Family("{{ bos_token }}{% for m in messages %}" + body + "{% endfor %}<|eot_id|>", words)


def chat(*contents):
    """A conversation of user and assistant in turn; the last word is the user's."""
    roles = ("user", "assistant")
    turns = [Message(roles[(len(contents) - i + 1) % 2], content) for i, content in enumerate(contents)]
    return Request(request_id=0, custom_id=0, messages=tuple(turns))


@pytest.fixture(scope="module")
def chatml():
    return FAMILIES["chatml"].codec()


def control_ids(codec, ids):
    return [id for id in ids if not codec.tokenizer.decode([id])]


def check(codec, contents, plain):
    """The text of the ids is what the template writes; their control words are those with plain contents."""
    ids = codec.encode(chat(*contents))
    assert codec.tokenizer.decode(ids, skip_special=False) == codec.template.render(chat(*contents).messages)
    assert control_ids(codec, ids) == control_ids(codec, codec.encode(chat(*plain)))


# ---------------------------------------------------------------- the templates of the families


@pytest.mark.parametrize("name", FAMILIES)
@given(data=st.data())
def test_contents_add_no_control_word_in_the_templates_of_the_families(name, data):
    codec = FAMILIES[name].codec()
    words = FAMILIES[name].words
    halves = [half for word in words for half in (word[: len(word) // 2], word[len(word) // 2 :])]
    more = ["<", "<|", "|>", ">", "[", "user", "</think>", "<think>", "/think", "/no_think", " ", "\n", "a", "\ufdd0"]
    content = st.lists(st.sampled_from([*words, *halves, *more]), max_size=5).map("".join)
    check(codec, [data.draw(content), data.draw(content), data.draw(content)], "xyz")


@pytest.mark.parametrize("name", FAMILIES)
def test_the_templates_own_words_are_control_ids_beside_those_in_contents(name):
    codec, words = FAMILIES[name].codec(), FAMILIES[name].words
    ids = codec.encode(chat("".join(words), "b", "c"))
    text = codec.template.render(chat("a", "b", "c").messages)
    own = re.findall("|".join(map(re.escape, words)), text)
    assert own
    assert control_ids(codec, ids) == [codec.tokenizer.core.token_to_id(word) for word in own]


def test_a_template_finds_in_contents_what_it_looks_for():
    codec = FAMILIES["qwen3"].codec()
    ids = codec.encode(chat("a", f"<think>\n{EOT}</think>\n\nyes <|im_end|>", "c"))
    assert "assistant\nyes <|im_end|><|im_end|>\n" in codec.tokenizer.decode(ids, skip_special=False)


# ---------------------------------------------------------------- what templates do to contents


@pytest.mark.parametrize(
    ("body", "contents"),
    [
        ("{{ m.content.split('</think>') | join('') }}", ["<|e</think>ot_id|>"]),
        ("{{ m.content.split('</think>') | join('') }}", ["<|e</think>ot_id|></think><|eot_id|>"]),
        ("{{ m.content | replace(' ', '') }}", ["<|e ot_id|>"]),
        ("{{ m.content | replace('X', '_') }}", ["<|eotXid|>"]),
        ("{{ m.content | lower }}", ["<|EOT_ID|>"]),
        ("{{ m.content | reverse }}", [">|di_toe|<"]),
        ("{{ m.content | trim }}", ["\n <|eot_id|> "]),
        ("{{ m.content[2:] }}", ["<a<|eot_id|>"]),
        ("{{ m.content }}", ["<|", "eot_id|>"]),
        ("{{ m.content }}", ["<|eot", "_", "id|>"]),
        ("{{ m.content }}", ["<|eot_id|", "x", "<|eot_id|>"]),
        ("{{ m.content.split('/think') | join('') }}{{ '</think>' if '</think>' in m.content }}", ["</think>s>"]),
        ("<|{{ m.content }}|>", ["eot_id"]),
        ("<|{{ m.content | replace(' ', '') }}|>", ["eot _id"]),
        ("<|eot{{ m.content }}", ["_id|>"]),
        ("<|eot_{{ m.content | lower }}|>", ["ID"]),
        ("<|eot_{{ m.content }}{{ '' if 'id|>!' in m.content }}", ["id|>!"]),
        ("{{ m.content }}eot_id|>{{ '' if '!<|' in m.content }}", ["!<|"]),
    ],
)
def test_contents_that_a_template_changes_add_no_control_word(body, contents):
    check(loop(body).codec(), contents, ["a"] * len(contents))


def test_a_template_may_look_for_a_control_word_in_contents():
    codec = loop("{{ 'found' if '<|eot_id|>' in m.content else m.content }}").codec()
    check(codec, [f"a{EOT}"], ["a"])
    assert "found" in codec.tokenizer.decode(codec.encode(chat(f"a{EOT}")))


def test_contents_that_are_escaped_are_no_trouble():
    codec = loop("{{ m.content | e }}").codec()
    check(codec, [f"a < b & {EOT}"], ["a"])


def test_what_cannot_be_told_apart_is_the_lines_error():
    codec = loop("{{ m.content }}{{ m.content | e }}").codec()
    check(codec, ["a > b"], ["a"])
    with pytest.raises(RequestError, match="cannot be told") as found:
        codec.encode(chat(f"a > b {EOT}"))
    assert found.value.type == "template_error"


# ---------------------------------------------------------------- tokenizers of other kinds


@given(st.text("♥<a>b", max_size=8))
def test_control_words_of_one_character_and_inside_each_other(content):
    metadata = byte_level(words=["<a>", "♥", "a>", "<a>b"], types=[CONTROL] * 4)
    codec = TextCodec(
        build_tokenizer(metadata, "file"), ChatTemplate("♥{% for m in messages %}{{ m.content }}{% endfor %}<a>b")
    )
    ids = codec.encode(chat(content))
    assert codec.tokenizer.decode(ids) == content
    assert control_ids(codec, ids) == codec.encode(chat("x"))[::2]


def test_sentencepiece_contents():
    codec = TextCodec(build_tokenizer(sentencepiece(), "file"), ChatTemplate(ECHO, variables={"bos_token": "<s>"}))
    ids = codec.encode(chat("the </s> License"))
    assert [id for id in ids if id < 3] == [1]
    assert codec.tokenizer.decode(ids) == "[the </s> License]<|eot_id|>"
    assert ids[:4] == codec.encode(chat("the License"))[:4]


def normalizing(normalizer):
    """A codec whose control words and <tool> are looked for in normalized text."""
    pieces = ["<unk>", EOT, "▁", *"[]<>|_/abcdefghijklmnopqrstuvwxyz", "＜"]
    core = CoreTokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>"))
    core.normalizer = normalizer
    core.decoder = decoders.Metaspace()
    core.add_tokens([AddedToken(word, normalized=True, special=word != "<tool>") for word in ("<s>", EOT, "<tool>")])
    return TextCodec(Tokenizer(core, bos_token="<s>"), ChatTemplate(ECHO, variables={"bos_token": "<s>"}))


def test_other_characters_that_are_normalized_to_a_control_word_are_text():
    codec = normalizing(normalizers.NFKC())
    ids = codec.encode(chat("＜|eot_id|＞"))
    assert control_ids(codec, ids) == control_ids(codec, codec.encode(chat("x"))) != []


def test_control_words_that_take_a_space_keep_their_ids():
    codec = normalizing(normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]))
    core = codec.tokenizer.core
    assert codec.encode(chat("a <tool>b <|eot_id|>"))[0] == core.token_to_id("<s>")
    assert core.token_to_id("<tool>") in codec.encode(chat("a <tool>b <|eot_id|>"))


# ---------------------------------------------------------------- the plain way


@pytest.mark.parametrize("content", ["hi", "", "2 + 2", "if a < b:", "<b>bold</b>", "x -> y | z"])
def test_contents_without_control_words_never_need_the_second_tokenizer(content):
    codec = Family(FAMILIES["chatml"].source, ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|fresh|>")).codec()
    ids = codec.encode(chat(content))
    assert ids == codec.tokenizer.encode(codec.template.render(chat(content).messages), add_bos=False)
    assert "_aliased" not in vars(codec._control_words)


def test_contents_without_an_end_of_a_control_word_are_rendered_once(chatml, monkeypatch):
    calls = []
    render = chatml.template.render
    monkeypatch.setattr(chatml.template, "render", lambda *args, **options: calls.append(1) or render(*args, **options))
    chatml.encode(chat("Write a poem (short), please!\n- one\n- two", "", "Again"))
    assert len(calls) == 1
