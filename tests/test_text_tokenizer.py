"""Tokenizers of model folders: where BOS comes from, what is refused, and text that survives its way to ids."""

import json
import re
import shutil
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import BOS_ID, BYTE_OFFSET, SPECIAL_TOKENS, TOKENIZER_SIZE, byte_ids, make_tiny_model
from tiny_gguf import write_gguf_twin
from tokenizers import Tokenizer as CoreTokenizer
from tokenizers import decoders, normalizers, processors

from tinyvllm_cli.errors import ModelError
from tinyvllm_cli.text.tokenizer import Tokenizer, load_tokenizer

BOS = SPECIAL_TOKENS[BOS_ID]


@pytest.fixture(scope="module")
def models_made(tmp_path_factory):
    """Two model folders, by whether their post-processor adds BOS."""
    root = tmp_path_factory.mktemp("models")
    return {adds: make_tiny_model(root / str(adds), adds_bos=adds) for adds in (True, False)}


@pytest.fixture
def folder(models_made, tmp_path):
    """A fresh copy whose post-processor adds BOS and whose tokenizer_config.json says nothing of it."""
    return copy(models_made[True], tmp_path / "model", add_bos_token=None)


@pytest.fixture(scope="module")
def tokenizer(models_made):
    return load_tokenizer(models_made[True])


def copy(source, target, **config):
    """A copy of the text files, with these keys in tokenizer_config.json; None removes one."""
    target.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, target)
    change(target / "tokenizer_config.json", **config)
    return target


def change(path, **keys):
    value = json.loads(path.read_text()) | keys
    path.write_text(json.dumps({key: value for key, value in value.items() if value is not None}))


def change_core(folder, change=lambda core: None, **parts):
    """Rewrite tokenizer.json with a change, and with these parts."""
    core = CoreTokenizer.from_file(str(folder / "tokenizer.json"))
    change(core)
    for name, part in parts.items():
        setattr(core, name, part)
    core.save(str(folder / "tokenizer.json"))


@pytest.mark.parametrize("in_post_processor", [True, False])
@pytest.mark.parametrize("in_config", [True, False, None])
def test_bos_is_added_where_the_post_processor_adds_it(models_made, tmp_path, in_post_processor, in_config):
    folder = copy(models_made[in_post_processor], tmp_path / "model", add_bos_token=in_config)
    assert load_tokenizer(folder).encode("hi", add_bos=True) == [BOS_ID] * in_post_processor + byte_ids("hi")


@pytest.mark.parametrize("config", [{}, {"bos_token": None}, {"bos_token": "<pad>"}])
@pytest.mark.parametrize(("single", "first"), [("$A </s>", []), ("<s> $A </s>", [BOS_ID]), ("$A", [])])
def test_what_a_post_processor_puts_behind_a_text_is_no_bos(folder, single, first, config):
    change(folder / "tokenizer_config.json", **config)
    change_core(folder, post_processor=processors.TemplateProcessing(single, special_tokens=[("<s>", 1), ("</s>", 2)]))
    found = load_tokenizer(folder)
    assert found.encode("hi", add_bos=True) == [*first, *byte_ids("hi")]
    assert found.adds_bos is bool(first)


def test_bos_stands_once_and_only_where_asked(tokenizer):
    assert tokenizer.encode(BOS + "hi", add_bos=True) == [BOS_ID, *byte_ids("hi")]
    assert tokenizer.encode("hi" + BOS, add_bos=True) == [BOS_ID, *byte_ids("hi"), BOS_ID]
    assert tokenizer.encode("", add_bos=True) == [BOS_ID]
    assert tokenizer.encode("hi", add_bos=False) == byte_ids("hi")


def test_bos_as_an_object_is_its_content(folder):
    change(folder / "tokenizer_config.json", bos_token={"content": BOS, "lstrip": False})
    found = load_tokenizer(folder)
    assert (found.bos_token, found.bos_token_id, found.adds_bos) == (BOS, BOS_ID, True)


def test_bos_without_a_config_is_what_the_post_processor_adds(folder):
    (folder / "tokenizer_config.json").unlink()
    found = load_tokenizer(folder)
    assert (found.bos_token_id, found.adds_bos, found.eos_token_id) == (BOS_ID, True, None)


def test_another_models_bos_is_plain_text(tokenizer):
    assert tokenizer.encode("<|begin_of_text|>", add_bos=True) == [BOS_ID, *byte_ids("<|begin_of_text|>")]


def test_settings_of_training_do_not_cut_or_pad_a_prompt(folder):
    change_core(folder, lambda core: (core.enable_truncation(4), core.enable_padding(length=6)))
    for text in ("a", "a long prompt"):
        assert load_tokenizer(folder).encode(text, add_bos=False) == byte_ids(text)


def test_ids_below_size_exist(tokenizer):
    assert tokenizer.size == TOKENIZER_SIZE
    last = byte_ids("a")[0] - ord("a") + 255
    assert last == tokenizer.size - 1 == BYTE_OFFSET + 255


@given(st.text())
def test_text_survives(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text, add_bos=True), skip_special=True) == text


@given(st.lists(st.sampled_from(["a", "é", "🙂", "\ud83d", "\ude42", "\udfff"])))
def test_surrogates_become_characters_or_replacement(tokenizer, pieces):
    text = "".join(pieces)
    expected = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    assert tokenizer.decode(tokenizer.encode(text, add_bos=False)) == expected


def refusals(folder):
    broken = folder / "tokenizer.json"
    yield "no tokenizer.json", broken.unlink
    yield "cannot be read as a tokenizer", lambda: broken.write_text('{"model": 1}')
    yield "cannot be read as a tokenizer", lambda: broken.write_bytes(b"\xff\x00")
    yield "tokenizer_config.json", lambda: (folder / "tokenizer_config.json").write_text("[1]")
    yield "tokenizer_config.json", lambda: (folder / "tokenizer_config.json").write_bytes(b"{")
    yield r"tokenizer_config\.json: bos_token is 7", lambda: change(folder / "tokenizer_config.json", bos_token=7)
    yield r"tokenizer\.json: decoder .*WordPiece", lambda: change_core(folder, decoder=decoders.WordPiece())
    for name in ("tokenizer.json", "tokenizer_config.json"):
        path = folder / name
        yield rf"{re.escape(str(path))}: cannot be read", lambda path=path: (path.unlink(), path.mkdir())
        yield rf"{re.escape(str(path))}: cannot be read", lambda path=path: (path.unlink(), path.symlink_to("nowhere"))
    yield r"special_tokens_map\.json: cannot be read", (folder / "special_tokens_map.json").mkdir


@pytest.mark.parametrize("index", range(12))
def test_broken_folders_are_refused_in_one_line(folder, index):
    message, break_it = list(refusals(folder))[index]
    break_it()
    with pytest.raises(ModelError, match=message) as found:
        load_tokenizer(folder)
    assert "\n" not in str(found.value)


def test_numbers_that_only_python_writes_are_no_trouble(folder):
    path = folder / "tokenizer_config.json"
    path.write_text(path.read_text().replace("{", '{"model_max_length": Infinity, "x": NaN, ', 1))
    assert load_tokenizer(folder).bos_token == BOS


@pytest.mark.parametrize("name", ["model.gguf", "model", "weights.bin"])
def test_a_gguf_file_is_known_by_what_it_holds(models_made, tmp_path, name):
    path = write_gguf_twin(models_made[True], tmp_path / name)
    assert load_tokenizer(path).encode("hi", add_bos=True) == [BOS_ID, *byte_ids("hi")]
    path.write_text("{}")
    with pytest.raises(ModelError, match=f"^{re.escape(str(path))}: "):
        load_tokenizer(path)


def test_a_folder_with_a_sentencepiece_file_only_is_told_what_is_wanted(folder):
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    with pytest.raises(ModelError, match=r"tokenizer\.model only.*save_pretrained"):
        load_tokenizer(folder)


@given(text=st.text() | st.text("e\u0301 ab<s>", max_size=200))
def test_no_text_has_fewer_tokens_than_is_said_before_it_is_tokenized(tokenizer, text):
    assert tokenizer.least_tokens(text) <= len(tokenizer.encode(text, add_bos=False))


def test_a_text_that_a_normalizer_makes_shorter_is_not_taken_for_longer(folder):
    core = CoreTokenizer.from_file(str(folder / "tokenizer.json"))
    core.normalizer = normalizers.NFC()
    made = Tokenizer(core)
    text = "\u1f82" * 50  # one character each ...
    apart = unicodedata.normalize("NFD", text)  # ... of four
    assert len(apart) == 4 * len(text)
    assert made.least_tokens(apart) <= len(made.encode(apart, add_bos=False))
