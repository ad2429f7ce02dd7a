"""A tokenizer from the metadata of a GGUF file: byte-level BPE with its pre-tokenizer, or SentencePiece BPE."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tinyvllm_cli.errors import ModelError
from tinyvllm_cli.text.detokenizer import SPACE_MARK
from tinyvllm_cli.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer as CoreTokenizer

# Values of tokenizer.ggml.token_type (the GGUF specification, and 0 of llama.cpp; UNUSED: padding of the vocabulary)
UNDEFINED, NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(7)

# What chat templates call the tokens that tokenizer.ggml.*_token_id names (one of them misspelt in the specification).
SPECIAL_KEYS = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "sep_token": "seperator",
    "pad_token": "padding",
    "cls_token": "cls",
    "mask_token": "mask",
}

# The split patterns are those of the models' own tokenizer.json files.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class PreTokenizer:
    """What a name in tokenizer.ggml.pre stands for."""

    patterns: tuple[str, ...]  # each splits the pieces that the one before it left
    ignore_merges: bool = False  # a piece that is in the vocabulary is one token, whatever the merges say
    adds_bos: bool = False  # where tokenizer.ggml.add_bos_token is missing
    nfc: bool = False


_LLAMA_BPE = PreTokenizer((_LLAMA3,), ignore_merges=True, adds_bos=True)
_QWEN = PreTokenizer((_QWEN2,), nfc=True)
PRE_TOKENIZERS = {
    # What llama.cpp takes where a file names none.
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2.removesuffix(r"|\s+"), r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": PreTokenizer((_GPT2,)),
    "smollm": PreTokenizer((r"\p{N}", _GPT2)),
    "llama-bpe": _LLAMA_BPE,
    "llama3": _LLAMA_BPE,
    "llama-v3": _LLAMA_BPE,
    "falcon3": _LLAMA_BPE,
    "smaug-bpe": PreTokenizer((_LLAMA3,)),
    "dbrx": PreTokenizer((_LLAMA3,)),
    "qwen2": _QWEN,
    "deepseek-r1-qwen": _QWEN,
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, adds_bos=True),
}


def build_tokenizer(metadata: Mapping[str, Any], name: str) -> Tokenizer:
    """The tokenizer that the tokenizer.ggml.* keys describe; `name` is the file's, for messages.

    Raises ModelError for keys that are missing or broken and for kinds that are not supported.
    """
    vocab = _read_vocab(metadata, name)
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        pre = _pre_tokenizer(metadata, name)
        core, adds_bos = _byte_level(vocab, pre, metadata, name), pre.adds_bos
    elif kind == "llama":
        core, adds_bos = _sentencepiece(vocab, metadata, name), True
    else:
        wanted = "'gpt2' (byte-level BPE) or 'llama' (SentencePiece)"
        raise ModelError(f"{name}: tokenizer.ggml.model is {kind!r}, wanted {wanted}")
    _add_words(core, vocab)
    names = special_tokens(metadata)
    bos = names.get("bos_token")
    adds_bos = _flag(metadata, "tokenizer.ggml.add_bos_token", adds_bos, name)
    if adds_bos and bos is None and metadata.keys() & {"tokenizer.ggml.add_bos_token", "tokenizer.ggml.bos_token_id"}:
        id, last = metadata.get("tokenizer.ggml.bos_token_id"), len(vocab.tokens) - 1
        raise ModelError(f"{name}: texts start with BOS, but tokenizer.ggml.bos_token_id is {id!r}, wanted 0 to {last}")
    return Tokenizer(
        core,
        bos_token=bos,
        eos_token=names.get("eos_token"),
        adds_bos=adds_bos and bos is not None,
        size=len(vocab.tokens),
        name=name,
    )


def special_tokens(metadata: Mapping[str, Any]) -> dict[str, str]:
    """The texts of bos_token, eos_token and the like that a file names by their ids.

    An id that no token has names none; SentencePiece has customary ids for files that give none.
    """
    tokens = metadata.get("tokenizer.ggml.tokens")
    customary = {"unknown": 0, "bos": 1, "eos": 2} if metadata.get("tokenizer.ggml.model") == "llama" else {}
    texts = {}
    for variable, key in SPECIAL_KEYS.items():
        id = metadata.get(f"tokenizer.ggml.{key}_token_id", customary.get(key))
        if isinstance(tokens, list) and type(id) is int and 0 <= id < len(tokens):
            texts[variable] = str(tokens[id])
    return texts


@dataclass(frozen=True)
class _Vocab:
    """The tokens of a file up to the last one in use, and the type of each."""

    tokens: list[str]
    types: list[int]

    def ids(self) -> dict[str, int]:
        return {token: id for id, token in enumerate(self.tokens)}


def _read_vocab(metadata: Mapping[str, Any], name: str) -> _Vocab:
    tokens = _strings(metadata, "tokenizer.ggml.tokens", name)
    types = [NORMAL] * len(tokens)
    if "tokenizer.ggml.token_type" in metadata:
        types = _numbers(metadata, "tokenizer.ggml.token_type", len(tokens), name).tolist()
        if strange := set(types) - set(range(7)):
            raise ModelError(f"{name}: tokenizer.ggml.token_type has {min(strange)}, wanted 0 to {BYTE}")
    size = len(tokens)
    while size > 1 and types[size - 1] == UNUSED:  # rows that pad the embedding are no tokens
        size -= 1
    vocab = _Vocab(tokens[:size], types[:size])
    last = vocab.ids()
    for id, token in enumerate(vocab.tokens):
        if last[token] != id:
            raise ModelError(f"{name}: tokenizer.ggml.tokens has {token!r} for {id} and {last[token]}, wanted it once")
    return vocab


def _strings(metadata: Mapping[str, Any], key: str, name: str) -> list[str]:
    value = metadata.get(key)
    if not isinstance(value, list) or not value or not all(isinstance(text, str) for text in value):
        raise ModelError(f"{name}: {key} is missing or no list of strings, wanted a GGUF file with its vocabulary")
    return value


def _numbers(metadata: Mapping[str, Any], key: str, count: int, name: str) -> npt.NDArray[Any]:
    value = metadata.get(key)
    if not isinstance(value, np.ndarray) or value.shape != (count,):
        found = f"shape {value.shape}" if isinstance(value, np.ndarray) else type(value).__name__
        raise ModelError(f"{name}: {key} is {found}, wanted {count} numbers, one for each token")
    return value


def _flag(metadata: Mapping[str, Any], key: str, default: bool, name: str) -> bool:
    value = metadata.get(key, default)
    if not isinstance(value, bool):
        raise ModelError(f"{name}: {key} is {value!r}, wanted true or false")
    return value


def _pre_tokenizer(metadata: Mapping[str, Any], name: str) -> PreTokenizer:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if not isinstance(pre, str) or pre not in PRE_TOKENIZERS:
        raise ModelError(f"{name}: tokenizer.ggml.pre is {pre!r}, wanted one of {', '.join(PRE_TOKENIZERS)}")
    return PRE_TOKENIZERS[pre]


def _byte_level(vocab: _Vocab, pre: PreTokenizer, metadata: Mapping[str, Any], name: str) -> CoreTokenizer:
    """BPE over bytes (Sennrich et al., 2016; Radford et al., GPT-2, 2019) with the merges of the file."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    merges = []
    if any(type == NORMAL and len(token) > 1 for token, type in zip(vocab.tokens, vocab.types, strict=True)):
        merges = _strings(metadata, "tokenizer.ggml.merges", name)
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    try:
        model = models.BPE(vocab.ids(), pairs, ignore_merges=pre.ignore_merges)
    except Exception as error:  # `tokenizers` raises bare Exception, e.g. for a merge of unknown tokens
        raise ModelError(f"{name}: tokenizer.ggml.merges do not fit the vocabulary ({error})") from error
    core = Tokenizer(model)
    if pre.nfc:
        core.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    core.decoder = decoders.ByteLevel()
    return core


def _sentencepiece(vocab: _Vocab, metadata: Mapping[str, Any], name: str) -> CoreTokenizer:
    """SentencePiece BPE (Kudo and Richardson, 2018): characters are merged by score, unknown ones become bytes."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = _numbers(metadata, "tokenizer.ggml.scores", len(metadata["tokenizer.ggml.tokens"]), name)
    if np.isnan(scores).any():
        raise ModelError(f"{name}: tokenizer.ggml.scores has NaN for token {np.isnan(scores).argmax()}, wanted numbers")
    model = models.BPE(
        vocab.ids(),
        list(_merges_of_scores(vocab, scores.tolist())),
        unk_token=special_tokens(metadata).get("unk_token"),
        fuse_unk=True,
        byte_fallback=BYTE in vocab.types,
    )
    core = Tokenizer(model)
    spaces = normalizers.Replace(" ", SPACE_MARK)
    strip = []
    core.normalizer = spaces
    if _flag(metadata, "tokenizer.ggml.add_space_prefix", True, name):
        core.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE_MARK), spaces])
        strip = [decoders.Strip(" ", 1, 0)]
    parts = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    core.decoder = decoders.Sequence(parts)
    return core


def _merges_of_scores(vocab: _Vocab, scores: list[float]) -> Iterator[tuple[str, str]]:
    """Every pair of tokens whose join is a token, best score of the join first.

    SentencePiece merges the pair whose join has the highest score, the leftmost of equals; BPE merges the pair of the
    lowest rank, the leftmost of equals. So ranks in the order of falling scores give the same pieces.
    """
    mergeable = {t: id for id, t in enumerate(vocab.tokens) if vocab.types[id] in (NORMAL, USER_DEFINED)}
    for token in sorted(mergeable, key=lambda token: (-scores[mergeable[token]], mergeable[token])):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in mergeable and right in mergeable:
                yield left, right


def _add_words(core: CoreTokenizer, vocab: _Vocab) -> None:
    """Words that are cut out of a text before all else: control words, which decoding skips, and user-defined ones."""
    from tokenizers import AddedToken

    typed = list(zip(vocab.tokens, vocab.types, strict=True))
    core.add_special_tokens([AddedToken(t, normalized=False) for t, type in typed if type in (UNKNOWN, CONTROL)])
    core.add_tokens([AddedToken(t, normalized=False) for t, type in typed if type == USER_DEFINED])
