"""Answers under a constraint that go on beside the engine's own work: llguidance needs no interpreter lock."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from tinyvllm_cli.engine.live import Live
from tinyvllm_cli.errors import RequestError
from tinyvllm_cli.types import U32, Sequence

if TYPE_CHECKING:
    from tinyvllm_cli.text.grammars import Grammars, Matcher

BESIDE_FROM = 48  # answers: for fewer it takes about as long to hand the work over

# Of each step of Grammars.advance() its outcome, and the errors of Grammars.fill().
Followed: TypeAlias = "tuple[list[bool | RequestError], dict[int, RequestError]]"


@dataclass(frozen=True, slots=True)
class Obeying:
    """Answers whose last tokens a thread gives to their matchers; then it makes the next masks."""

    answers: list[tuple[Live, Sequence, str]]  # with the texts that the tokens brought
    now: float  # when the tokens came
    bits: U32  # where the masks are made
    followed: Future[Followed]


def follow(grammars: Grammars, steps: list[tuple[Matcher, int]], matchers: list[Matcher | None], bits: U32) -> Followed:
    """Answers go on, then masks are made of those of them, and of others, that have not finished."""
    outcomes = grammars.advance(steps)
    left = [None if matcher is None or matcher.finished else matcher for matcher in matchers]
    return outcomes, grammars.fill(left, bits)
