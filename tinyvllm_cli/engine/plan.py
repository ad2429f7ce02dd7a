"""One step as the batcher plans it, the arrays of its rows, and what of it is in flight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tinyvllm_cli.types import I32, Batch, Sequence

if TYPE_CHECKING:
    from tinyvllm_cli.backends.base import Pending


@dataclass(frozen=True, slots=True)
class Plan:
    """One step to enqueue, and whose it is."""

    admitted: list[Sequence]  # to be bound before the step, which some may not live to see
    slots: list[int]  # theirs
    copies: list[tuple[int, int]]  # blocks to be copied before the step
    batch: Batch
    sampled: list[Sequence]  # [R] whose next token each sampled row is
    told: list[int]  # rows of `sampled` whose logprobs are wanted
    masked: list[int]  # rows of `sampled` that wait for a mask, in the order of their masks


@dataclass(slots=True)
class Step:
    """A step in flight."""

    pending: Pending
    sampled: list[Sequence]  # whose token each of its rows is
    told: list[int]  # rows whose logprobs are wanted
    masked: list[int]  # rows that wait for a mask; empty once it is there


def told_rows(sampled: list[Sequence]) -> tuple[list[int], int]:
    """The rows whose logprobs are wanted, and how many of the likeliest ids at most."""
    told = [row for row, sequence in enumerate(sampled) if sequence.options.logprobs]
    return told, max([sampled[row].request.params.logprobs or 0 for row in told], default=0)


def mask_rows(num_sampled: int, masked: list[int]) -> I32:
    """Batch.mask_rows where these rows have one mask after another."""
    rows = np.full(num_sampled, -1, np.int32)
    rows[masked] = np.arange(len(masked))
    return rows


def joined(first: I32, then: list[int]) -> I32:
    return np.concatenate([first, np.array(then, np.int32)]) if then else first
