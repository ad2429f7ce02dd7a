"""Control words inside message contents are plain text: they never become the ids that steer a model."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Protocol

from tinyvllm_cli.errors import RequestError
from tinyvllm_cli.text.chat_template import ChatTemplate, absent_characters
from tinyvllm_cli.text.together import Asking
from tinyvllm_cli.text.tokenizer import Tokenizer, encoding, without_added_tokens
from tinyvllm_cli.types import Message

if TYPE_CHECKING:
    from tokenizers import Tokenizer as CoreTokenizer

Words = list[tuple[int, str]]  # control words in a text: where each starts, and what it is


class Render(Protocol):
    def __call__(self, messages: Sequence[Message]) -> str: ...


class ControlWords:
    """Encodes conversations; only the control words that the template itself wrote become control ids.

    Which those are shows a second rendering, its shadow, in which the characters of the contents are replaced one by
    one with stand-ins that no control word has: a control word in the shadow owes nothing to a content. This holds
    however the template joins, cuts, strips or lowers the contents, and whatever words it builds from its own pieces
    and the roles. chat_template_kwargs are no contents.

    The text that is encoded is the first rendering, so a template finds in contents what it looks for. For the shadow
    to take the same turns, the template's own string constants (</think>, /no_think) keep their characters in it, but
    for those that a control word has a piece of. Only a template that cuts such a constant apart could be deceived.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self._tokenizer = tokenizer
        self._template = template
        special = [t for t in tokenizer.core.get_added_tokens_decoder().values() if t.special and t.content]
        # Longest first: of the words that start at one place `tokenizers` takes the longest.
        self._words = sorted((token.content for token in special), key=len, reverse=True)
        self._pattern = _any_of(self._words)
        self._edges = frozenset("".join(form for word in self._words for form in _cases(word[0] + word[-1])))
        self._joined = "\n".join(self._words).lower()
        # Where `tokenizers` looks for a word in normalized text, other characters can spell it.
        self._normalizes = tokenizer.core.normalizer is not None and any(token.normalized for token in special)

    def asking(
        self, messages: Sequence[Message], *, continue_final_message: bool = False, kwargs: Mapping[str, Any]
    ) -> Asking[list[int]]:
        """The ids of a conversation in the template; never adds BOS.

        Raises RequestError(template_error) as the template does, and where it rewrites contents so that nobody can
        tell whose a control word is.
        """
        render = partial(self._template.render, continue_final_message=continue_final_message, kwargs=kwargs)
        text = render(messages)
        own = found = self._find(text)
        if any(self._may_spell(message.content) for message in messages):
            own = self._own_words(text, found, messages, render)
        if own == found and not self._normalizes:
            return (yield text)
        return self._encode_own(text, own)

    def _find(self, text: str) -> Words:
        return [(word.start(), word[0]) for word in self._pattern.finditer(text)]

    def _may_spell(self, content: str) -> bool:
        """Whether a content holds an end of a control word, or is from the middle of one."""
        if not self._edges.isdisjoint(content):
            return True
        squeezed = "".join(content.split()).lower()
        return bool(squeezed) and squeezed in self._joined

    def _own_words(self, text: str, found: Words, messages: Sequence[Message], render: Render) -> Words:
        """Those of the control words found in the text that are the template's."""
        free = absent_characters(self._template.source + text + "".join(message.content for message in messages))
        stand_ins = {ord(char): next(free) for char in self._characters}
        originals = {ord(stand_in): chr(char) for char, stand_in in stand_ins.items()}

        def shade(content: str) -> str:
            parts = self._kept.split(content)
            parts[::2] = [part.translate(stand_ins) for part in parts[::2]]  # at odd places stands what is kept
            return "".join(parts)

        shadow = render([replace(message, content=shade(message.content)) for message in messages])
        own = self._find(shadow)
        # Stand-ins have no case: what the template lowers or raises differs in that alone.
        if shadow.translate(originals).lower() == text.lower():
            return own
        if [word for _, word in own] == [word for _, word in found]:  # the template changes contents, but adds no word
            return found
        message = "the chat template rewrites the contents, so that control words in them cannot be told from its own"
        raise RequestError("template_error", message)

    @cached_property
    def _characters(self) -> str:
        """What control words consist of, in both cases. A template may strip white space: that stays as it is."""
        words = [word if word.isspace() else "".join(word.split()) for word in self._words]
        return "".join(sorted({char for word in words for form in _cases(word) for char in form}))

    @cached_property
    def _kept(self) -> re.Pattern[str]:
        """Matches the template's string constants that have no piece in common with a control word."""
        constants = sorted((text for text in self._template.constants if text.strip()), key=len, reverse=True)
        free = [text for text in constants if not any(_touch(text, word) for word in self._words)]
        return re.compile(f"({_any_of(free).pattern})")

    def _encode_own(self, text: str, own: Words) -> list[int]:
        """The ids of a text in which these control words are ids, and all others text."""
        core, aliases, ids = self._aliased
        pieces, at = [], 0
        for start, word in own:
            pieces += [text[at:start], aliases[word]]
            at = start + len(word)
        found = encoding(core, "".join([*pieces, text[at:]]))
        return [ids.get(token, id) for token, id in zip(found.tokens, found.ids, strict=True)]

    @cached_property
    def _aliased(self) -> tuple[CoreTokenizer, dict[str, str], dict[str, int]]:
        """The same tokenizer with other names for its control words, that no text contains.

        Returns it, the alias of each control word, and the ids of the added tokens by what it calls them.
        """
        from tokenizers import AddedToken

        own = self._tokenizer.core
        core = without_added_tokens(own)
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
        # In an encoding a token that is looked for in normalized text has its normalized name.
        shown = {str(core.id_to_token(id)): ids[token.content] for id, token in core.get_added_tokens_decoder().items()}
        return core, aliases, shown


def _any_of(words: Sequence[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, words)) or r"(?!)")


def _cases(text: str) -> tuple[str, str, str]:
    return text, text.lower(), text.upper()


def _touch(one: str, other: str) -> bool:
    """Whether one text holds the other or ends with a beginning of it, in either order and any case."""
    one, other = one.lower(), other.lower()
    lengths = range(1, min(len(one), len(other)))
    return (
        one in other
        or other in one
        or any(one.endswith(other[:length]) or other.endswith(one[:length]) for length in lengths)
    )
