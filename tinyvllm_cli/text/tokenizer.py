"""The tokenizer of a model folder or GGUF file: text to ids and back, with control words under control."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinyvllm_cli.errors import ModelError
from tinyvllm_cli.model.json_file import read_json
from tinyvllm_cli.text.detokenizer import TokenBytes

if TYPE_CHECKING:
    from tokenizers import Tokenizer as CoreTokenizer


class Tokenizer:
    """A `tokenizers` tokenizer with what an engine needs to know of it.

    size: ids below it exist. bos_token, eos_token and their ids are None where the model names none.
    """

    def __init__(
        self,
        core: CoreTokenizer,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        adds_bos: bool = False,
        size: int | None = None,
    ) -> None:
        self.core = core
        self.bos_token = bos_token
        self.eos_token = eos_token
        self.bos_token_id = None if bos_token is None else core.token_to_id(bos_token)
        self.eos_token_id = None if eos_token is None else core.token_to_id(eos_token)
        self.adds_bos = adds_bos
        self.size = max(core.get_vocab().values(), default=-1) + 1 if size is None else size
        self.token_bytes = TokenBytes(core)

    def encode(self, text: str, *, add_bos: bool) -> list[int]:
        """The ids of a text; control words in it become control ids.

        add_bos puts BOS first where the tokenizer adds one and the text does not start with it.
        """
        ids: list[int] = self.core.encode(well_formed(text), add_special_tokens=False).ids
        if add_bos and self.adds_bos and self.bos_token_id is not None and ids[:1] != [self.bos_token_id]:
            ids.insert(0, self.bos_token_id)
        return ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of ids that start a text: the space that the tokenizer put before it is taken away again."""
        text = b"".join(self.token_bytes(id, skip_special=skip_special) for id in ids).decode(errors="replace")
        return text.removeprefix(" ") if self.token_bytes.drops_first_space else text


def well_formed(text: str) -> str:
    """The text with U+FFFD for surrogates that have no partner, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a model folder (tokenizer.json) or GGUF file (its metadata).

    Raises ModelError where it is missing, broken, or of a kind that is not supported.
    """
    if path.is_dir():
        return _load_folder(path)
    from tinyvllm_cli.model.weights.gguf import read_gguf
    from tinyvllm_cli.text.gguf_tokenizer import build_tokenizer

    return build_tokenizer(read_gguf(path).metadata, path.name)


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json; empty where the folder has none. Raises ModelError where it is no JSON object."""
    path = folder / "tokenizer_config.json"
    return read_json(path, dict[str, Any]) if path.is_file() else {}


def token_text(config: dict[str, Any], name: str) -> str | None:
    """The text of bos_token or eos_token, which a config gives as a string or as an object with `content`."""
    value = config.get(name)
    if isinstance(value, dict):
        value = value.get("content")
    if value is not None and not isinstance(value, str):
        raise ModelError(f"tokenizer_config.json: {name} is {value!r}, wanted a string or an object with content")
    return value


def _load_folder(folder: Path) -> Tokenizer:
    config = read_tokenizer_config(folder)
    core = _read_core(folder)
    bos = token_text(config, "bos_token")
    adds_bos = config.get("add_bos_token")
    if not isinstance(adds_bos, bool):
        # No word in the config: what the post-processor puts first decides.
        first = core.encode("").ids[:1]
        if first and bos is None:
            bos = core.id_to_token(first[0])
        adds_bos = bool(first) and bos is not None and first == [core.token_to_id(bos)]
    if adds_bos and (bos is None or core.token_to_id(bos) is None):
        raise ModelError(f"{folder}: add_bos_token is true, but bos_token is {bos!r}, which is not in the vocabulary")
    return Tokenizer(core, bos_token=bos, eos_token=token_text(config, "eos_token"), adds_bos=adds_bos)


def _read_core(folder: Path) -> CoreTokenizer:
    from tokenizers import Tokenizer as Core

    path = folder / "tokenizer.json"
    try:
        core = Core.from_file(str(path))
    except Exception as error:  # `tokenizers` raises bare Exception for whatever is wrong
        if path.is_file():
            raise ModelError(f"{path}: cannot be read as a tokenizer ({error})") from error
        hint = ""
        if (folder / "tokenizer.model").is_file():
            hint = (
                "; found tokenizer.model only: save a tokenizer.json beside it with"
                " transformers' AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
            )
        raise ModelError(f"{folder}: no tokenizer.json{hint}") from error
    # A file may carry settings of its training: cutting or padding a prompt would lose or add text in silence.
    core.no_truncation()
    core.no_padding()
    return core
