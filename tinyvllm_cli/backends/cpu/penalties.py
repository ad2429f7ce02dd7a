"""Penalties on tokens that were there before: what a row's own history takes from its logits, in float32.

Each operation rounds to the nearest float32, and none are fused, so that every backend has the same bits.
"""

from __future__ import annotations

import numpy as np

from tinyvllm_cli.types import F32, I32, SlotOptions

FLOAT32 = np.finfo(np.float32)


def has_penalties(options: SlotOptions) -> bool:
    return options.repetition_penalty != 1 or _has_output_penalties(options)


def repetition_factor(options: SlotOptions) -> np.float32:
    """In the range of normal float32: a factor of 0 or infinity would make NaN of a logit of 0."""
    return np.float32(min(max(options.repetition_penalty, float(FLOAT32.tiny)), float(FLOAT32.max)))


def penalize(row: F32, options: SlotOptions, history: I32) -> None:
    """Apply the penalties to logits f32[num_ids], in place. history: the tokens at positions 0.. of the sequence.

    Repetition, for ids of prompt and output: x / r where x > 0, else x * r (Keskar et al., "CTRL", 2019). Then
    presence and frequency, for ids that stand c > 0 times in the output: x - (c * frequency + presence) (the formula
    of OpenAI's API). Marks below 0 and ids past the row are no tokens. What overflows becomes the greatest finite
    number: an infinity would be a mask, or NaN in a softmax.
    """
    if options.repetition_penalty != 1:
        seen, factor = np.unique(_tokens(history, len(row))), repetition_factor(options)
        x = row[seen]
        with np.errstate(over="ignore"):
            row[seen] = _finite(np.where(x > 0, x / factor, x * factor))
    if _has_output_penalties(options):
        seen, counts = np.unique(_tokens(history[options.output_start :], len(row)), return_counts=True)
        taken = counts.astype(np.float32) * np.float32(options.frequency_penalty)
        taken += np.float32(options.presence_penalty)
        with np.errstate(over="ignore"):
            row[seen] = _finite(row[seen] - taken)


def _has_output_penalties(options: SlotOptions) -> bool:
    return options.presence_penalty != 0 or options.frequency_penalty != 0


def _tokens(history: I32, num_ids: int) -> I32:
    return history[(history >= 0) & (history < num_ids)]


def _finite(values: F32) -> F32:
    return np.clip(values, FLOAT32.min, FLOAT32.max)
