"""From token ids to text, exactly and one id at a time: every id is some bytes, and the text is their UTF-8."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Container, Iterable
from typing import TYPE_CHECKING, Any

from tinyvllm_cli.errors import ModelError

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as CoreTokenizer

SPACE_MARK = "▁"  # U+2581: how SentencePiece writes a space
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte in byte-level vocabularies (Radford et al., GPT-2, 2019).

    Printable Latin-1 bytes stand for themselves; the other 68 are numbered on from U+0100 in ascending order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


class TokenBytes:
    """The bytes that each id of a vocabulary stands for.

    Byte by byte rather than through the tokenizer's own decode: that one drops the first space of whatever it is
    given, and turns a whole run of byte tokens into U+FFFD when only its end is cut.
    """

    def __init__(self, core: CoreTokenizer, name: str) -> None:
        """name: the tokenizer's, for the ModelError of a decoder that is neither byte-level nor SentencePiece's."""
        stages = _decoder_stages(core)
        types = {stage["type"] for stage in stages}
        if not types & {"ByteLevel", "Metaspace", "ByteFallback", "Replace"} or not all(map(_is_known, stages)):
            found = "+".join(json.dumps(stage, ensure_ascii=False) for stage in stages) or "none"
            raise ModelError(f"{name}: decoder {found} is not supported (wanted ByteLevel, or SentencePiece's)")
        added = core.get_added_tokens_decoder()
        self._core = core
        self._special = frozenset(id for id, token in added.items() if token.special)
        self._alphabet = _byte_alphabet() if "ByteLevel" in types else None
        self._has_byte_pieces = "ByteFallback" in types
        self._space_marks = [mark for stage in stages if (mark := _space_mark(stage)) is not None]
        self._literal = {id: self._added_text(token) for id, token in added.items()}
        self._cache: dict[int, bytes] = {}
        self.drops_first_space = any(_drops_first_space(stage) for stage in stages)

    def __call__(self, token_id: int, *, skip_special: bool = True) -> bytes:
        """The bytes of one id; none for an id that does not exist, nor for a control id under skip_special."""
        if skip_special and token_id in self._special:
            return b""
        found = self._cache.get(token_id)
        if found is None:
            found = self._cache[token_id] = self._look_up(token_id)
        return found

    def _look_up(self, token_id: int) -> bytes:
        if token_id in self._literal:
            return self._literal[token_id].encode()
        piece = self._core.id_to_token(token_id)
        if piece is None:
            return b""
        if self._alphabet is not None:
            # A piece outside the alphabet is plain text, as `tokenizers` has it.
            return bytes(map(self._alphabet.__getitem__, piece)) if self._is_byte_level(piece) else piece.encode()
        if self._has_byte_pieces and (byte := _BYTE_PIECE.fullmatch(piece)):
            return bytes([int(byte[1], 16)])
        return self._with_spaces(piece).encode()

    def _added_text(self, token: AddedToken) -> str:
        """What an added token stands for: its content, or the normalized content where it is looked for as such.

        The normalizer of SentencePiece puts a space before it, and so it takes the space of the text before it.
        """
        if not token.normalized or self._core.normalizer is None:
            return token.content
        return self._with_spaces(self._core.normalizer.normalize_str(token.content))

    def _with_spaces(self, piece: str) -> str:
        for mark in self._space_marks:
            piece = piece.replace(mark, " ")
        return piece

    def _is_byte_level(self, piece: str) -> bool:
        return self._alphabet is not None and all(char in self._alphabet for char in piece)


def _decoder_stages(core: CoreTokenizer) -> list[dict[str, Any]]:
    """The decoder as its parts; `tokenizers` shows their options only in JSON."""
    if core.decoder is None:
        return []
    state: dict[str, Any] = json.loads(core.decoder.__getstate__())
    return list(state["decoders"]) if state["type"] == "Sequence" else [state]


def _is_known(stage: dict[str, Any]) -> bool:
    """Whether a decoder stage does what is done here, and no more."""
    if stage["type"] == "Replace":
        return _space_mark(stage) is not None
    if stage["type"] == "Strip":
        return bool(stage["content"] == " " and stage["start"] <= 1 and stage["stop"] == 0)
    return stage["type"] in {"ByteLevel", "Metaspace", "ByteFallback", "Fuse"}


def _space_mark(stage: dict[str, Any]) -> str | None:
    """The character that this stage turns into a space."""
    if stage["type"] == "Metaspace":
        return str(stage["replacement"])
    pattern = stage.get("pattern", {}).get("String")
    return pattern if stage["type"] == "Replace" and stage["content"] == " " and len(pattern or "") == 1 else None


def _drops_first_space(stage: dict[str, Any]) -> bool:
    """Whether this decoder stage takes away the space that SentencePiece puts before a text."""
    if stage["type"] == "Metaspace":
        return bool(stage.get("prepend_scheme") != "never")
    return bool(stage["type"] == "Strip" and stage["content"] == " " and stage["start"] > 0)


class Detokenizer:
    """The text of one answer, as its ids come in.

    push() gives the text that is certain: an unfinished character waits for its last byte. All pieces with finish()
    joined are the UTF-8 of all the ids' bytes, with U+FFFD for what is not UTF-8. The first space of an answer stays:
    an answer continues its prompt.
    """

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int, *, skip_special: bool = True) -> str:
        return self._utf8.decode(self._token_bytes(token_id, skip_special=skip_special))

    def push_all(self, token_ids: Iterable[int], *, shown: Container[int] = ()) -> str:
        """The same of many ids at once; control ids are seen only where they are among those `shown`."""
        token_bytes = self._token_bytes
        return self._utf8.decode(b"".join([token_bytes(id, skip_special=id not in shown) for id in token_ids]))

    def finish(self) -> str:
        """What is left: U+FFFD where the ids ended inside a character, else ''."""
        return self._utf8.decode(b"", final=True)
