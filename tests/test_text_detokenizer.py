"""The bytes of ids under the decoders that tokenizer files have: what `tokenizers` itself prints."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers

from tinyvllm_cli.errors import ModelError
from tinyvllm_cli.text.detokenizer import Detokenizer, TokenBytes

REPLACE, BYTES, FUSE = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()
STRIP = decoders.Strip(" ", 1, 0)
PIECES = ("<unk>", "▁", "x", "▁x", "a", "<0x0A>", "<0xE2>", "_x", "<", "t", "o", "l", ">")

DECODERS = {
    "llama": decoders.Sequence([REPLACE, BYTES, FUSE, STRIP]),
    "gemma": decoders.Sequence([REPLACE, BYTES, FUSE]),
    "no bytes": decoders.Sequence([REPLACE, FUSE]),
    "metaspace": decoders.Metaspace(),
    "metaspace never": decoders.Metaspace(prepend_scheme="never"),
    "metaspace bytes": decoders.Sequence([BYTES, decoders.Metaspace(prepend_scheme="never"), FUSE]),
    "metaspace of another character": decoders.Metaspace(replacement="_", prepend_scheme="never"),
    "byte-level": decoders.ByteLevel(),
}


def core_with(decoder, normalizer=None):
    core = Tokenizer(models.BPE({piece: i for i, piece in enumerate(PIECES)}, [("▁", "x")], unk_token="<unk>"))
    core.decoder = decoder
    if normalizer is not None:
        core.normalizer = normalizer
    return core


def shown(core, ids):
    token_bytes = TokenBytes(core, "file")
    detokenizer = Detokenizer(token_bytes)
    text = "".join([*map(detokenizer.push, ids), detokenizer.finish()])
    return text.removeprefix(" ") if token_bytes.drops_first_space else text


@pytest.mark.parametrize("name", DECODERS)
@given(ids=st.lists(st.sampled_from([id for id, piece in enumerate(PIECES) if piece != "<0xE2>"]), max_size=8))
def test_a_decoder_of_any_stages_prints_what_tokenizers_prints(name, ids):
    core = core_with(DECODERS[name])
    assert shown(core, ids) == core.decode(ids)


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        decoders.WordPiece(),
        decoders.Fuse(),
        decoders.Replace("▁", "-"),
        decoders.Replace(Regex("▁+"), " "),
        decoders.Sequence([REPLACE, decoders.Replace("a", "b")]),
        decoders.Sequence([REPLACE, BYTES, decoders.Strip("x", 1, 0)]),
        decoders.Sequence([REPLACE, BYTES, decoders.Strip(" ", 0, 1)]),
        decoders.Sequence([decoders.Metaspace(), decoders.CTC()]),
    ],
)
def test_a_decoder_that_does_something_else_is_refused_with_its_name(decoder):
    core = Tokenizer(models.BPE({"a": 0}, []))
    if decoder is not None:
        core.decoder = decoder
    with pytest.raises(ModelError, match=r"^folder/tokenizer\.json: decoder .* is not supported"):
        TokenBytes(core, "folder/tokenizer.json")


SPACES = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("text", ["<tool>x <tool>", "x <tool> <tool>x", "<tool>", "x<tool>"])
def test_an_added_word_that_is_looked_for_in_normalized_text_keeps_its_space(text, special):
    core = core_with(DECODERS["llama"], SPACES)
    core.add_tokens([AddedToken("<tool>", normalized=True, special=special)])
    ids = core.encode(text).ids
    token_bytes = TokenBytes(core, "file")
    assert b"".join(token_bytes(id, skip_special=False) for id in ids).decode() == " " + text


def test_an_added_word_that_is_looked_for_as_it_is_has_no_space():
    core = core_with(DECODERS["llama"], SPACES)
    core.add_tokens([AddedToken("<tool>", normalized=False), AddedToken("▁<odd>", normalized=False)])
    token_bytes = TokenBytes(core, "file")
    assert token_bytes(core.token_to_id("<tool>")) == b"<tool>"
    assert token_bytes(core.token_to_id("▁<odd>")).decode() == "▁<odd>"
