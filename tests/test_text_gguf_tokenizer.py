"""Tokenizers built from GGUF metadata: the ids that the original tokenizers give."""

import re
from pathlib import Path

import gguf
import numpy as np
import pytest
from text_vocab import CONTROL, SENTENCEPIECE, UNKNOWN, UNUSED, USER_DEFINED, byte_level, sentencepiece
from tiny import byte_alphabet

from tinyvllm_cli.errors import ModelError
from tinyvllm_cli.text.gguf_tokenizer import PRE_TOKENIZERS, build_tokenizer
from tinyvllm_cli.text.tokenizer import load_tokenizer

DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="module")
def gpt2():
    return load_tokenizer(DATA / "vocab" / "ggml-vocab-gpt-2.gguf")


def gpt2_cases():
    border = "\n__ggml_vocab_test__\n"
    texts = (DATA / "vocab" / "ggml-vocab-gpt-2.gguf.inp").read_text(encoding="utf-8").removesuffix(border)
    ids = (DATA / "vocab" / "ggml-vocab-gpt-2.gguf.out").read_text()
    cases = [[int(id) for id in line.split()] for line in ids.removesuffix("\n").split("\n")]
    return list(zip(texts.split(border), cases, strict=True))


def test_llama_cpp_vocabulary_file(gpt2):
    cases = gpt2_cases()
    assert len(cases) == 46
    assert [gpt2.encode(text, add_bos=True) for text, _ in cases] == [ids for _, ids in cases]
    assert [gpt2.decode(ids) for _, ids in cases] == [text for text, _ in cases]


def test_sentencepiece_ids():
    tokenizer = build_tokenizer(sentencepiece(), "file")
    for case in SENTENCEPIECE["cases"]:
        assert tokenizer.encode(case["text"], add_bos=False) == case["ids"]
        assert tokenizer.decode(case["ids"]) == case["text"]


def test_sentencepiece_words_are_cut_out_first():
    tokenizer = build_tokenizer(sentencepiece(), "file")
    bos, user = SENTENCEPIECE["tokens"].index("<s>"), SENTENCEPIECE["tokens"].index("[USER]")
    the = tokenizer.encode("the", add_bos=False)
    assert tokenizer.encode("<s>the[USER]the", add_bos=False) == [bos, *the, user, *the]
    assert tokenizer.decode([bos, *the, user, *the]) == "the[USER] the"


def test_sentencepiece_without_space_prefix():
    tokenizer = build_tokenizer(sentencepiece(add_space_prefix=False), "file")
    with_prefix = build_tokenizer(sentencepiece(), "file")
    assert tokenizer.encode(" the", add_bos=False) == with_prefix.encode("the", add_bos=False)
    assert tokenizer.decode(tokenizer.encode(" the", add_bos=False)) == " the"


# The pieces that the patterns cut, worked out from the patterns by hand.
TEXT = "It's IT'S  a1234b\n\n c...d\t=x"
PIECES = {
    "gpt-2": ["It", "'s", " IT", "'", "S", " ", " a", "1234", "b", "\n\n", " c", "...", "d", "\t", "=", "x"],
    "smollm": ["It", "'s", " IT", "'", "S", " ", " a", *"1234", "b", "\n\n", " c", "...", "d", "\t", "=", "x"],
    "default": ["It", "'", "s", " IT", "'", "S", " ", " a", "123", "4", "b", "\n\n", " c", "...", "d", "\t", "=", "x"],
    "llama-bpe": ["It", "'s", " IT", "'S", " ", " a", "123", "4", "b", "\n\n", " c", "...", "d", "\t", "=x"],
    "qwen2": ["It", "'s", " IT", "'S", " ", " a", *"1234", "b", "\n\n", " c", "...", "d", "\t", "=x"],
    "tekken": ["It", "'s", " IT", "'S", " ", " a", *"1234", "b", "\n\n", " c", "...", "d", "\t", "=x"],
}
ALIASES = {
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
    "falcon3": "llama-bpe",
    "smaug-bpe": "llama-bpe",
    "dbrx": "llama-bpe",
    "deepseek-r1-qwen": "qwen2",
}


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_pre_tokenizers_cut_as_their_patterns_say(pre):
    core = build_tokenizer(byte_level(pre), "file").core
    back = {char: chr(byte) for byte, char in enumerate(byte_alphabet())}
    pieces = ["".join(back[char] for char in piece) for piece, _ in core.pre_tokenizer.pre_tokenize_str(TEXT)]
    assert pieces == PIECES[ALIASES.get(pre, pre)]


def test_tekken_cuts_camel_case():
    core = build_tokenizer(byte_level("tekken"), "file").core
    assert [piece for piece, _ in core.pre_tokenizer.pre_tokenize_str("HelloWorldABC")] == ["Hello", "World", "ABC"]


def test_a_whole_piece_wins_over_the_merges_in_llama_3():
    metadata = byte_level("llama-bpe", words=["hit"])
    assert build_tokenizer(metadata, "file").encode("hit", add_bos=False) == [257]
    hi, t = 256, byte_alphabet().index("t")
    assert build_tokenizer(metadata | {"tokenizer.ggml.pre": "gpt-2"}, "file").encode("hit", add_bos=False) == [hi, t]


def test_qwen_composes_characters():
    tokenizer = build_tokenizer(byte_level("qwen2"), "file")
    assert tokenizer.decode(tokenizer.encode("e\u0301", add_bos=False)) == "\u00e9"


def test_token_types():
    words, types = ["<unk>", "<|end|>", "<think>", "[PAD1]"], [UNKNOWN, CONTROL, USER_DEFINED, UNUSED]
    tokenizer = build_tokenizer(byte_level(words=words, types=types), "file")
    ids = tokenizer.encode("hi<unk><|end|><think>", add_bos=False)
    assert ids == [256, 257, 258, 259]
    assert tokenizer.decode(ids) == "hi<think>"
    assert tokenizer.size == 260  # tokens that only pad the embedding do not exist


def test_added_words_are_their_own_text():
    # Neither a byte-level nor a SentencePiece spelling: the é of a piece would be a lone byte 0xE9.
    tokenizer = build_tokenizer(byte_level(words=["né"], types=[USER_DEFINED]), "file")
    assert tokenizer.decode(tokenizer.encode("né é", add_bos=False)) == "né é"


@pytest.mark.parametrize(
    ("metadata", "first"),
    [
        (byte_level(words=["<s>"], types=[CONTROL], bos_token_id=257), []),
        (byte_level(words=["<s>"], types=[CONTROL], bos_token_id=257, add_bos_token=True), [257]),
        (byte_level("llama-bpe", words=["<s>"], types=[CONTROL], bos_token_id=257), [257]),
        (byte_level("llama-bpe", words=["<s>"], types=[CONTROL], bos_token_id=257, add_bos_token=False), []),
        (sentencepiece(), [1]),
        (sentencepiece(add_bos_token=False), []),
    ],
)
def test_bos_is_added_where_the_file_says_so_else_where_its_kind_does(metadata, first):
    tokenizer = build_tokenizer(metadata, "file")
    assert tokenizer.encode("", add_bos=True) == first
    assert tokenizer.adds_bos is bool(first)


def test_the_file_of_a_broken_vocabulary_is_named_with_its_folder(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tokenizer_model("bert")
    writer.add_token_list(["a"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelError, match=f"^{re.escape(str(tmp_path / 'model.gguf'))}: tokenizer.ggml.model is 'bert'"):
        load_tokenizer(tmp_path / "model.gguf")


def test_a_bos_that_is_not_added_need_not_exist():
    tokenizer = build_tokenizer(byte_level(add_bos_token=False, bos_token_id=2**32 - 1), "file")
    assert (tokenizer.bos_token, tokenizer.adds_bos) == (None, False)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({}, "tokenizer.ggml.tokens is missing"),
        (byte_level() | {"tokenizer.ggml.model": "bert"}, "'bert', wanted 'gpt2'"),
        (byte_level("klingon"), "'klingon', wanted one of default, gpt-2, smollm"),
        (byte_level(pre=["gpt-2"]), "wanted one of"),
        (byte_level(merges=["q uux"]), "do not fit the vocabulary"),
        (byte_level(merges=["nospace"]), "do not fit the vocabulary"),
        (byte_level(merges=[]), "merges is missing"),
        (byte_level(tokens=[1, 2]), "no list of strings"),
        (byte_level(token_type=np.ones(3, dtype=np.int32)), r"shape \(3,\), wanted 257"),
        (byte_level(token_type="x"), "is str, wanted 257"),
        (sentencepiece(scores=None), "scores is NoneType"),
        (sentencepiece(scores=np.ones(5, dtype=np.float32)), r"shape \(5,\)"),
        (sentencepiece(scores=np.full(len(SENTENCEPIECE["tokens"]), np.nan)), "scores has NaN for token 0"),
        (byte_level(words=["x y"], types=[99]), "token_type has 99, wanted 0 to 6"),
        (byte_level(words=["x y"], types=[-1]), "token_type has -1"),
        (byte_level(tokens=["a"] * 257), "tokens has 'a' for 0 and 256"),
        (byte_level(tokens=[""] * 257), "tokens has '' for 0 and 256"),
        (byte_level(words=["hi"]), "tokens has 'hi' for 256 and 257"),
        (byte_level(add_bos_token=True), "bos_token_id is None, wanted 0 to 256"),
        (byte_level(add_bos_token=True, bos_token_id=257), "bos_token_id is 257, wanted 0 to 256"),
        (byte_level(add_bos_token=True, bos_token_id=-1), "bos_token_id is -1"),
        (byte_level(add_bos_token=True, bos_token_id="1"), "bos_token_id is '1'"),
        (byte_level("llama-bpe", bos_token_id=257), "bos_token_id is 257"),
        (sentencepiece(bos_token_id=2**32 - 1), "bos_token_id is 4294967295"),
        (byte_level(add_bos_token="false"), "add_bos_token is 'false', wanted true or false"),
        (byte_level(add_bos_token=1), "add_bos_token is 1"),
        (sentencepiece(add_space_prefix="no"), "add_space_prefix is 'no'"),
    ],
)
def test_broken_metadata_is_refused_in_one_line(metadata, message):
    with pytest.raises(ModelError, match=message) as found:
        build_tokenizer(metadata, "file")
    assert str(found.value).startswith("file: ")
    assert "\n" not in str(found.value)
