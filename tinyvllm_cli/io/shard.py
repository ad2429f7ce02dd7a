"""One part of the requests of an input, for several runs that share it (--shard I/N)."""

from __future__ import annotations

import re
from typing import NamedTuple

from tinyvllm_cli.errors import UsageError

PART = re.compile(r"([0-9]{1,9})/([0-9]{1,9})")


class Shard(NamedTuple):
    """The requests whose index leaves `part` when divided by `of`."""

    part: int
    of: int

    def holds(self, index: int) -> bool:
        return index % self.of == self.part

    def count(self, requests: int) -> int:
        """How many of so many requests."""
        return len(range(self.part, requests, self.of))


WHOLE = Shard(0, 1)


def read_shard(text: str | None) -> Shard:
    """I/N with I from 0 to N - 1; None: the whole input. UsageError for anything else."""
    if text is None:
        return WHOLE
    found = PART.fullmatch(text)
    part, of = (int(found[1]), int(found[2])) if found else (0, 0)
    if part >= of:
        raise UsageError(f"--shard is {text}, wanted I/N with I from 0 to N - 1: 0/2 and 1/2 are the halves of a file")
    return Shard(part, of)
