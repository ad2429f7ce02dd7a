"""A leading <think>...</think> apart from the answer that follows it, in text that comes in pieces."""

from __future__ import annotations

OPEN, CLOSE = "<think>", "</think>"


def ends_inside_thought(text: str) -> bool:
    """Whether the text of an answer so far stops before its leading thought is closed."""
    return text.lstrip().startswith(OPEN) and CLOSE not in text


class ThoughtSplitter:
    """Takes the text of an answer and gives what is visible of it.

    A thought is a <think> that only white space stands before, and all up to </think>; newlines that follow belong to
    neither. `inside`: the prompt has opened the thought already. looks: whether there may be one; else all is visible.
    """

    def __init__(self, *, inside: bool = False, looks: bool = True) -> None:
        self.inside = inside  # in the thought
        self.undecided = looks and not inside  # all so far is white space and the beginning of <think>
        self._thought: str | None = "" if inside else None
        self._held = ""  # undecided: what may become <think>
        self._after_thought = False  # newlines are dropped

    @property
    def reasoning(self) -> str | None:
        """The thought so far without the newlines around it; None: there is none."""
        return None if self._thought is None else self._thought.strip("\n")

    def push(self, text: str) -> str:
        """The visible part. White space at the start is visible at once: a stop string may be in it."""
        if self.undecided:
            return self._decide(text)
        if self.inside:
            return self._think(text)
        return self._show(text)

    def finish(self) -> str:
        """The visible rest: a beginning of <think> that did not become one."""
        held, self._held, self.undecided = self._held, "", False
        return held

    def _decide(self, text: str) -> str:
        text = self._held + text
        word = text.lstrip()
        space = text[: len(text) - len(word)]
        if len(word) < len(OPEN) and OPEN.startswith(word):
            self._held = word
            return space
        self._held, self.undecided = "", False
        if not word.startswith(OPEN):
            return text
        self.inside, self._thought = True, ""
        return self._think(word[len(OPEN) :])

    def _think(self, text: str) -> str:
        known = len(self._thought or "")
        self._thought = (self._thought or "") + text
        end = self._thought.find(CLOSE, max(0, known - len(CLOSE) + 1))
        if end < 0:
            return ""
        text = self._thought[end + len(CLOSE) :]
        self._thought, self.inside, self._after_thought = self._thought[:end], False, True
        return self._show(text)

    def _show(self, text: str) -> str:
        if self._after_thought:
            text = text.lstrip("\n")
            self._after_thought = not text
        return text
