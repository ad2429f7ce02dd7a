"""Control words inside message contents are plain text: they never become the ids that steer a model."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from tinyvllm_cli.text.chat_template import ChatTemplate, absent_character
from tinyvllm_cli.text.tokenizer import Tokenizer, well_formed
from tinyvllm_cli.types import Message

if TYPE_CHECKING:
    from tokenizers import Tokenizer as CoreTokenizer


class ControlWords:
    """The control words of a tokenizer, and the two steps that keep contents free of them.

    mark() puts a character that occurs nowhere else before every character of a control word in a content. The template
    writes its own words beside them; encode() takes the unmarked ones for control ids and all else for text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.core.get_added_tokens_decoder()
        self._words = [token.content for token in added.values() if token.special and token.content]
        # Longest first: of the words that start at one place `tokenizers` takes the longest.
        alternatives = "|".join(re.escape(word) for word in sorted(self._words, key=len, reverse=True))
        self._pattern = re.compile(alternatives or r"(?!)")

    def mark(self, messages: Sequence[Message], template: ChatTemplate) -> tuple[Sequence[Message], str | None]:
        """The messages with the control words in their contents marked, and the mark; None: there are none."""
        if not any(self._pattern.search(message.content) for message in messages):
            return messages, None
        mark = absent_character(template.source + "".join(message.content for message in messages))

        def marked(word: re.Match[str]) -> str:
            return "".join(mark + char for char in word[0])

        return [replace(message, content=self._pattern.sub(marked, message.content)) for message in messages], mark

    def encode(self, rendered: str, mark: str | None) -> list[int]:
        """The ids of a rendered conversation; never adds BOS."""
        if mark is None or mark not in rendered:
            return self._tokenizer.encode(rendered, add_bos=False)
        core, aliases, ids = self._aliased
        own_words = re.compile(f"(?<!{re.escape(mark)})(?:{self._pattern.pattern})")
        text = own_words.sub(lambda word: aliases[word[0]], rendered).replace(mark, "")
        encoding = core.encode(well_formed(text), add_special_tokens=False)
        return [ids.get(token, id) for token, id in zip(encoding.tokens, encoding.ids, strict=True)]

    @cached_property
    def _aliased(self) -> tuple[CoreTokenizer, dict[str, str], dict[str, int]]:
        """The same tokenizer with other names for its control words, that no text contains.

        Returns it, the alias of each control word, and the ids of the added tokens by their names in it.
        """
        from tokenizers import AddedToken
        from tokenizers import Tokenizer as Core

        own = self._tokenizer.core
        core = Core(own.model)  # shares the vocabulary
        if own.normalizer is not None:
            core.normalizer = own.normalizer
        if own.pre_tokenizer is not None:
            core.pre_tokenizer = own.pre_tokenizer
        nonce = secrets.token_hex(16)
        aliases, ids, added = {}, {}, []
        for id, token in sorted(own.get_added_tokens_decoder().items()):
            name = token.content
            if token.special:
                name = aliases[token.content] = f"<{nonce}.{id}>"
            ids[name] = id
            flags = {key: getattr(token, key) for key in ("single_word", "lstrip", "rstrip", "normalized", "special")}
            added.append(AddedToken(name, **flags))
        core.add_tokens(added)
        return core, aliases, ids
