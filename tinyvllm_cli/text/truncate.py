"""The start of a text that holds at most so many tokens, for the filter truncate_tokens(n) of row templates."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from tinyvllm_cli.text.tokenizer import Tokenizer, well_formed, without_added_tokens

if TYPE_CHECKING:
    from tokenizers import Tokenizer as CoreTokenizer


class TokenCutter:
    """Counts as contents are counted: control words in a text are plain text, and no BOS is added."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __call__(self, text: str, limit: int) -> str:
        """The start of `text`, in whole characters, that its first `limit` tokens spell; `text` where it has no more.

        Counted alone: beside its neighbours in a prompt a text may have a token more or less.
        """
        text = well_formed(text)
        encoding = self._plain.encode(text, add_special_tokens=False)
        if len(encoding.ids) <= limit:
            return text
        # A character of several tokens spans them all: where it is cut, it goes. Without what followed, a start may be
        # split anew into more tokens, so it is counted again.
        for count in range(limit, 0, -1):
            start = text[: encoding.offsets[count][0]]
            if len(self._plain.encode(start, add_special_tokens=False).ids) <= limit:
                return start
        return ""

    @cached_property
    def _plain(self) -> CoreTokenizer:
        """The tokenizer without its control words."""
        own = self._tokenizer.core
        core = without_added_tokens(own)
        core.add_tokens([token for _, token in sorted(own.get_added_tokens_decoder().items()) if not token.special])
        return core
