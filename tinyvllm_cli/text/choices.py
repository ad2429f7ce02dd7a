"""A grammar of the texts of a choice, each spelt in the ids that the tokenizer has for it.

Any ids that spell a text would do, and a model that is not led to the texts would rather begin one of them with a blank
or a letter, which says little of which it means.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from tinyvllm_cli.errors import RequestError
from tinyvllm_cli.text.tokenizer import Tokenizer, encoding, without_added_tokens

# What may follow, by id; END: the text may end here.
Trie: TypeAlias = "dict[int, Trie]"
END = -1
DEEPEST = 200  # texts that begin one another: llguidance goes through rules by recursion
ANCHOR = "\n"  # before a text, where the tokenizer writes a text's first word otherwise than one inside


def choice_grammar(tokenizer: Tokenizer, texts: Iterable[str], vocab_size: int) -> str | None:
    """In llguidance's dialect of Lark; None where a text has no such ids, all are empty, or too many begin
    one another."""
    spelt = _Spelling(tokenizer, vocab_size)
    root: Trie = {}
    for text in texts:
        ids = spelt.ids(text)
        if ids is None:
            return None
        node = root
        for id in ids:
            node = node.setdefault(id, {})
        node[END] = {}
    if set(root) == {END}:
        return None
    rules = _rules(root)
    return None if rules is None else "\n".join([f"start: {_behind(root, 0)}", *rules])


class _Spelling:
    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._core = without_added_tokens(tokenizer.core)
        self._vocab_size = vocab_size

    def ids(self, text: str) -> list[int] | None:
        """Those of a text that goes on with another."""
        try:
            lone, anchor, whole = (encoding(self._core, each).ids for each in (text, ANCHOR, ANCHOR + text))
        except RequestError:
            return None
        for ids in (lone, whole[len(anchor) :]):
            if all(id < self._vocab_size for id in ids) and self._spell(ids) == text.encode():
                return ids
        return None

    def _spell(self, ids: list[int]) -> bytes:
        return b"".join(map(self._tokenizer.token_bytes, ids))


def _rules(root: Trie) -> list[str] | None:
    """A rule for each node at which texts part: n0 for the root, and so on. None where they are too deep."""
    rules: list[str] = []
    nodes, depths = [root], [0]
    for node, depth in zip(nodes, depths, strict=True):  # which grow under way
        if depth > DEEPEST:
            return None
        alternatives = []
        for id in node.keys() - {END}:
            path, end = _straight(id, node[id])
            if end.keys() != {END}:
                path.append(_behind(end, len(nodes)))
                nodes.append(end)
                depths.append(depth + 1)
            alternatives.append(" ".join(path))
        rules.append(f"n{len(rules)}: {' | '.join(alternatives)}")
    return rules


def _straight(id: int, node: Trie) -> tuple[list[str], Trie]:
    """An id and those that follow it without another way to go on, and where they lead."""
    path = [f"<[{id}]>"]
    while len(node) == 1 and END not in node:
        ((id, node),) = node.items()
        path.append(f"<[{id}]>")
    return path, node


def _behind(node: Trie, number: int) -> str:
    """What follows at a node, by its rule's number."""
    return f"n{number}{'?' if END in node else ''}"
