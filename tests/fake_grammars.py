"""Constraints without a grammar: which ids may follow is a hash of the answer so far, often a single one."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tinyvllm_cli.errors import RequestError
from tinyvllm_cli.types import Constraint

BROKEN = "broken"


def constraint(seed: int) -> Constraint:
    return Constraint("grammar", str(seed), "grammar")


@dataclass(frozen=True)
class Rules:
    """Of one constraint over a vocabulary.

    allowed(): ids that may follow, sorted; none: the answer is whole. None: the constraint cannot be followed from
    here, which shows with the mask. is_broken(): the same, and it shows as the answer comes here.
    """

    source: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]

    def allowed(self, made: Sequence[int]) -> list[int] | None:
        if self._hash(made, "end") % 40 == 0 and made:
            return []
        if self._hash(made, "error") % 60 == 0:
            return None
        count = (1, 1, 1, 2, 4)[self._hash(made, "count") % 5]
        ids = {self._hash(made, f"id {i}") % self.vocab_size for i in range(count)}
        return sorted(ids if count > 1 else ids - {*self.eos_token_ids} or {0})

    def is_broken(self, made: Sequence[int]) -> bool:
        return self._hash(made, BROKEN) % 60 == 0

    def _hash(self, made: Sequence[int], what: str) -> int:
        return zlib.crc32(np.array(made, np.int32).tobytes(), zlib.crc32(f"{self.source} {what}".encode()))


@dataclass
class FakeMatcher:
    rules: Rules
    made: list[int] = field(default_factory=list)
    ended: bool = False

    @property
    def finished(self) -> bool:
        return self.ended or self.rules.allowed(self.made) == []

    def advance(self, token_id: int) -> None:
        assert not self.finished and token_id in (self.rules.allowed(self.made) or ())
        self.made.append(token_id)
        self.ended = token_id in self.rules.eos_token_ids
        if self.rules.is_broken(self.made):
            raise RequestError("invalid_schema", BROKEN, "grammar")

    def forced(self) -> list[int]:
        made = self.made.copy()
        while not self.ended and len(allowed := self.rules.allowed(made) or ()) == 1 and len(made) < 99:
            if allowed[0] in self.rules.eos_token_ids:
                break
            made += allowed
            if self.rules.is_broken(made):  # a grammar that breaks on the way does not look ahead
                return []
        return made[len(self.made) :]


@dataclass(frozen=True)
class FakeGrammars:
    vocab_size: int
    eos_token_ids: tuple[int, ...]

    def matcher(self, constraint: Constraint) -> FakeMatcher:
        return FakeMatcher(Rules(constraint.source, self.vocab_size, self.eos_token_ids))

    def advance(self, steps: Sequence[tuple[FakeMatcher, int]]) -> list[bool | RequestError]:
        outcomes: list[bool | RequestError] = []
        for matcher, token_id in steps:
            try:
                matcher.advance(token_id)
                outcomes.append(matcher.finished)
            except RequestError as error:
                outcomes.append(error)
        return outcomes

    def fill(self, matchers: Sequence[FakeMatcher | None], bits: np.ndarray) -> dict[int, RequestError]:
        bits[:] = 0xDEADBEEF
        errors = {}
        for row, matcher in enumerate(matchers):
            if matcher is None:
                continue
            assert not matcher.finished
            allowed = matcher.rules.allowed(matcher.made)
            bits[row] = 0
            for token in allowed or ():
                bits[row, token // 32] |= np.uint32(1 << token % 32)
            if allowed is None:
                errors[row] = RequestError("invalid_schema", BROKEN, "grammar")
        return errors
