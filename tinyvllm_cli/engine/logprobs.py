"""The logprobs of an answer: what its steps bring, and what is told of it at its end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tinyvllm_cli.types import F32, I32, StepOutput, TokenLogprob

# Finite logits may lie further apart than a float32 can say, and JSON has no infinity.
LEAST = np.finfo(np.float32).min


class Logprobs:
    """Of one answer, whose tokens come in one by one. They stay here while its sequence has no slot.

    top: how many of the likeliest tokens are told with each.
    """

    def __init__(self, top: int) -> None:
        self._top = top
        self._drawn: list[np.float32] = []
        self._top_ids: list[I32] = []
        self._top_logprobs: list[F32] = []

    def push(self, output: StepOutput, row: int) -> None:
        """A row of a step has drawn the next token."""
        logprob = output.logprobs[0, row]
        assert not np.isnan(logprob), "a backend owes the logprob of a token"
        self._drawn.append(logprob)
        if self._top:
            assert output.top_ids is not None and output.top_logprobs is not None, "they were asked for"
            # Copies, for a part would keep the arrays of the whole step.
            self._top_ids.append(output.top_ids[0, row, : self._top].copy())
            self._top_logprobs.append(output.top_logprobs[0, row, : self._top].copy())

    def told(self, token_ids: Sequence[int], token_bytes: Callable[[int], bytes]) -> tuple[TokenLogprob, ...]:
        """Those of the answer's tokens, which are all that came in."""
        tops = self._tops(token_bytes) or [()] * len(token_ids)
        drawn = zip(token_ids, _finite(self._drawn), tops, strict=True)
        return tuple(TokenLogprob(token_id, token_bytes(token_id), logprob, top) for token_id, logprob, top in drawn)

    def _tops(self, token_bytes: Callable[[int], bytes]) -> list[tuple[TokenLogprob, ...]]:
        rows = zip(np.array(self._top_ids).tolist(), _finite(self._top_logprobs), strict=True)
        return [
            tuple(
                TokenLogprob(token_id, token_bytes(token_id), logprob)
                for token_id, logprob in zip(*row, strict=True)
                if token_id >= 0  # a vocabulary may have fewer
            )
            for row in rows
        ]


def _finite(logprobs: Sequence[np.float32] | Sequence[F32]) -> list[Any]:
    finite: list[Any] = np.maximum(np.array(logprobs, np.float32), LEAST).tolist()
    return finite
