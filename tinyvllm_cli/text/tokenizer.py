"""The tokenizer of a model folder or GGUF file: text to ids and back, with control words under control."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinyvllm_cli.errors import ModelError, RequestError
from tinyvllm_cli.model.json_file import read_optional_json
from tinyvllm_cli.model.regular import require_regular
from tinyvllm_cli.text.detokenizer import TokenBytes

if TYPE_CHECKING:
    from tokenizers import Encoding
    from tokenizers import Tokenizer as CoreTokenizer

    from tinyvllm_cli.model.weights.gguf import GGUFFile

TOKENIZER_FILE, CONFIG_FILE, MAP_FILE = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """A `tokenizers` tokenizer with what an engine needs to know of it.

    size: ids below it exist. bos_token, eos_token and their ids are None where the model names none. name: the file's,
    for messages. Raises ModelError where the decoder is not supported.
    """

    def __init__(
        self,
        core: CoreTokenizer,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        adds_bos: bool = False,
        size: int | None = None,
        name: str = "tokenizer",
    ) -> None:
        self.core = core
        self.bos_token = bos_token
        self.eos_token = eos_token
        self.bos_token_id = None if bos_token is None else core.token_to_id(bos_token)
        self.eos_token_id = None if eos_token is None else core.token_to_id(eos_token)
        self.adds_bos = adds_bos
        vocab = core.get_vocab()
        self.size = max(vocab.values(), default=-1) + 1 if size is None else size
        self.token_bytes = TokenBytes(core, name)
        longest = max(map(len, vocab), default=1)  # characters; of a byte-level token, one for each byte
        # A normalizer may shorten a text: NFC makes one character of up to four.
        self._chars_per_token = longest if core.normalizer is None else 4 * longest

    def least_tokens(self, text: str) -> int:
        """No text of so many characters has fewer tokens: known at once, where to tokenize takes long."""
        return len(text) // self._chars_per_token

    def encode(self, text: str, *, add_bos: bool = True) -> list[int]:
        """The ids of a text; control words in it become control ids.

        add_bos puts BOS first where the tokenizer adds one and the text does not start with it.
        """
        return self.with_bos(self.ids(text)) if add_bos else self.ids(text)

    def ids(self, text: str) -> list[int]:
        """encode() without BOS. RequestError as encoding() raises it."""
        ids: list[int] = encoding(self.core, text).ids
        return ids

    def ids_of_all(self, texts: Sequence[str]) -> list[list[int]]:
        """ids() of each, on all cores. What it raises says nothing of which text it is."""
        encodings = self.core.encode_batch_fast([well_formed(text) for text in texts], add_special_tokens=False)
        return [found.ids for found in encodings]

    def with_bos(self, ids: list[int]) -> list[int]:
        """The ids of a text, behind BOS where the tokenizer adds one and the text does not start with it."""
        if self.adds_bos and self.bos_token_id is not None and ids[:1] != [self.bos_token_id]:
            return [self.bos_token_id, *ids]
        return ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of ids that start a text: the space that the tokenizer put before it is taken away again."""
        text = b"".join(self.token_bytes(id, skip_special=skip_special) for id in ids).decode(errors="replace")
        return text.removeprefix(" ") if self.token_bytes.drops_first_space else text


def encoding(core: CoreTokenizer, text: str) -> Encoding:
    """A text alone, without what the tokenizer puts around it.

    RequestError invalid_value where the vocabulary lacks a character of it, and an unknown token in its place.
    """
    try:
        return core.encode(well_formed(text), add_special_tokens=False)
    except Exception as error:  # `tokenizers` raises no kind of its own
        raise RequestError("invalid_value", f"the model's tokenizer cannot take the text: {error}") from None


def without_added_tokens(core: CoreTokenizer) -> CoreTokenizer:
    """What splits texts into ids and knows no control words; the vocabulary is shared."""
    from tokenizers import Tokenizer as Core

    bare = Core(core.model)
    if core.normalizer is not None:
        bare.normalizer = core.normalizer
    if core.pre_tokenizer is not None:
        bare.pre_tokenizer = core.pre_tokenizer
    return bare


def well_formed(text: str) -> str:
    """The text with U+FFFD for surrogates that have no partner, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def load_tokenizer(source: Path | GGUFFile) -> Tokenizer:
    """The tokenizer of a model folder (tokenizer.json) or GGUF file (its metadata), which may have been read already.

    Raises ModelError where it is missing, broken, or of a kind that is not supported.
    """
    if isinstance(source, Path) and source.is_dir():
        return _load_folder(source)
    from tinyvllm_cli.model.weights.gguf import read_gguf
    from tinyvllm_cli.text.gguf_tokenizer import build_tokenizer

    file = read_gguf(source) if isinstance(source, Path) else source
    return build_tokenizer(file.metadata, str(file.path))


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json; empty where the folder has none. Raises ModelError where it is no JSON object."""
    return read_optional_json(folder / CONFIG_FILE, dict[str, Any]) or {}


def read_special_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The texts of bos_token, eos_token and the like that a folder names; config: its tokenizer_config.json.

    Folders from before `added_tokens_decoder` have them in special_tokens_map.json, which then wins (transformers).
    """
    file, values = folder / CONFIG_FILE, config
    if "added_tokens_decoder" not in config and (older := read_optional_json(folder / MAP_FILE, dict[str, Any])):
        file, values = folder / MAP_FILE, {**config, **older}
    texts = {}
    for name in SPECIAL_TOKENS:
        value = values.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            texts[name] = text
        elif value is not None:
            raise ModelError(f"{file}: {name} is {value!r}, wanted a string or an object with content")
    return texts


def _load_folder(folder: Path) -> Tokenizer:
    names = read_special_tokens(folder, read_tokenizer_config(folder))
    core = _read_core(folder)
    # The post-processor alone decides whether BOS is added: where there is a tokenizer.json, transformers (5.24, every
    # class of tokenizer) throws add_bos_token of tokenizer_config.json away.
    first = _added_before(core)
    bos = names.get("bos_token") if first is None else first
    file = str(folder / TOKENIZER_FILE)
    return Tokenizer(core, bos_token=bos, eos_token=names.get("eos_token"), adds_bos=first is not None, name=file)


def _added_before(core: CoreTokenizer) -> str | None:
    """The token that the post-processor puts before a text; None: it puts nothing there."""
    found = core.encode("a")  # of an empty text one could not tell what stands before it from what stands after
    return core.id_to_token(found.ids[0]) if found.special_tokens_mask[:1] == [1] else None


def _read_core(folder: Path) -> CoreTokenizer:
    from tokenizers import Tokenizer as Core

    path = folder / TOKENIZER_FILE
    if not os.path.lexists(path):
        hint = ""
        if (folder / "tokenizer.model").is_file():
            hint = (
                "; found tokenizer.model only: save a tokenizer.json beside it with"
                " transformers' AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
            )
        raise ModelError(f"{folder}: no tokenizer.json{hint}")
    require_regular(path)
    try:
        core = Core.from_file(str(path))
    except Exception as error:  # `tokenizers` raises bare Exception for whatever is wrong
        raise ModelError(f"{path}: cannot be read as a tokenizer ({error})") from error
    # A file may carry settings of its training: cutting or padding a prompt would lose or add text in silence.
    core.no_truncation()
    core.no_padding()
    return core
