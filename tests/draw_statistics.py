"""Whether draws follow the exact probabilities of their settings: Pearson's chi-square test, over any backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt
from draws import Draw, bits_of, penalised

from tinyvllm_cli.backends.cpu.filters import filtered_ids, temperature
from tinyvllm_cli.backends.cpu.sample import gumbel_from_words, processed_logits
from tinyvllm_cli.philox import philox4x32_10
from tinyvllm_cli.types import F32, I32, SlotOptions

VOCAB, NUM_IDS = 26, 23  # the most probable ids are no tokens
DRAWS = 100_000  # of each setting
ROWS = 10_000  # of one draw at most
Z = 3.719  # of the normal distribution, at 1e-4
HISTORY = (3, 11, 4, 11, 22, 7, 7, 4, 7, 0, 15, 7, -2, 25)
OUTPUT = {"output_start": 5}


@dataclass(frozen=True)
class Setting:
    options: SlotOptions
    history: tuple[int, ...] = ()  # tokens at the first positions; behind them lie marks, up to the drawn one's
    allowed: tuple[int, ...] | None = None  # ids of a mask


SETTINGS = [
    *(Setting(SlotOptions(temperature=t)) for t in (0.5, 1.0, 3.0)),
    Setting(SlotOptions(temperature=1.0, top_k=3)),
    Setting(SlotOptions(temperature=2.0, top_k=10)),
    Setting(SlotOptions(temperature=1.0, top_p=0.5)),
    Setting(SlotOptions(temperature=1.5, top_p=0.9)),
    Setting(SlotOptions(temperature=1.0, min_p=0.05)),
    Setting(SlotOptions(temperature=1.3, min_p=0.2)),
    Setting(SlotOptions(temperature=1.0, top_k=8, top_p=0.8)),
    Setting(SlotOptions(temperature=1.8, top_k=12, top_p=0.9, min_p=0.03)),
    Setting(SlotOptions(temperature=1.0, repetition_penalty=1.5), HISTORY),
    Setting(SlotOptions(temperature=1.0, repetition_penalty=0.7, top_p=0.9), HISTORY),
    Setting(SlotOptions(temperature=1.0, presence_penalty=1.2, **OUTPUT), HISTORY),
    Setting(SlotOptions(temperature=1.4, frequency_penalty=0.6, **OUTPUT), HISTORY),
    Setting(SlotOptions(temperature=1.0, frequency_penalty=-0.4, presence_penalty=-0.5, top_k=6, **OUTPUT), HISTORY),
    Setting(SlotOptions(temperature=1.0, logit_bias=((2, 2.5), (9, -1.0), (24, 9.0)), top_p=0.95)),
    Setting(SlotOptions(temperature=1.0, stop_ids=(1, 8, 13), min_position=2**31 - 1)),
    Setting(SlotOptions(temperature=2.0), allowed=(0, 5, 6, 12, 14, 20, 22, 24)),
    Setting(
        SlotOptions(
            temperature=1.2,
            top_k=9,
            top_p=0.97,
            min_p=0.01,
            repetition_penalty=1.2,
            presence_penalty=0.5,
            frequency_penalty=0.3,
            logit_bias=((7, 1.5), (11, 0.7)),
            stop_ids=(16,),
            min_position=2**31 - 1,
            **OUTPUT,
        ),
        HISTORY,
        allowed=tuple(range(2, 24)),
    ),
]


class ManyDraws(Protocol):
    """Tokens i32[S, P] of one row of logits f32[V] with each of S seeds at each of P positions."""

    def __call__(self, logits: F32, setting: Setting, seeds: Sequence[int], positions: I32, num_ids: int) -> I32: ...


def draw_many(draw: ManyDraws, number: int, *, seeds: int) -> I32:
    """DRAWS tokens of SETTINGS[number]: of so many seeds, each at DRAWS / seeds positions."""
    setting = SETTINGS[number]
    positions = len(setting.history) + np.arange(DRAWS // seeds, dtype=np.int32)
    drawn = draw(fixed_logits(), setting, [2**40 * number + seed for seed in range(seeds)], positions, NUM_IDS)
    assert drawn.shape == (seeds, len(positions))
    return drawn


def assert_probable(drawn: I32, number: int) -> None:
    """What draw_many gave for the setting follows its exact probabilities."""
    expected = exact_probabilities(fixed_logits(), SETTINGS[number], NUM_IDS)
    assert np.count_nonzero(expected) > 1, "a single id is no test"
    assert_follows(drawn.ravel(), expected, str(SETTINGS[number]))


def assert_numpys(drawn: I32, number: int) -> None:
    """What draw_many gave is what NumPy draws, but for fewer than one token in 10,000: where two ids all but tie, the
    last bit of a logarithm decides."""
    others = np.count_nonzero(drawn != draw_many(cpu_draws, number, seeds=len(drawn)))
    assert others * 10_000 < drawn.size, f"{SETTINGS[number]}: {others} of {drawn.size} tokens are not those of NumPy"


def fixed_logits() -> F32:
    logits = np.random.default_rng(5).normal(0, 1.5, VOCAB).astype(np.float32)
    logits[NUM_IDS:] += 6
    return logits


def exact_probabilities(logits: F32, setting: Setting, num_ids: int) -> npt.NDArray[np.float64]:
    row = penalised(logits[:num_ids].astype(np.float64), setting.options, setting.history)
    if setting.allowed is not None:
        row[[token for token in range(num_ids) if token not in setting.allowed]] = -np.inf
    if setting.options.min_position:
        row[list(setting.options.stop_ids)] = -np.inf
    return probabilities(row, setting.options)


def probabilities(logits: npt.NDArray[np.floating], options: SlotOptions) -> npt.NDArray[np.float64]:
    """What a draw must follow, in float64 from the definitions of the filters: sort, then walk down the list."""
    weight = np.exp((logits.astype(np.float64) - logits.max()) / options.temperature)
    order = np.argsort(-logits, kind="stable")[: options.top_k or None]
    mass = np.cumsum(weight[order])
    order = order[: np.searchsorted(mass, options.top_p * mass[-1]) + 1]
    order = order[weight[order] >= options.min_p]
    exact = np.zeros(len(logits))
    exact[order] = weight[order] / weight[order].sum()
    return exact


def assert_follows(drawn: I32, expected: npt.NDArray[np.float64], what: str) -> None:
    """Chi-square of the counts of ids below what one in 10,000 samples exceeds (Wilson and Hilferty, "The distribution
    of chi-square", 1931). Ids that are expected less than 5 times count together in 32 groups, such groups as one."""
    outside = drawn[(drawn < 0) | (drawn >= len(expected)) | (expected[np.clip(drawn, 0, len(expected) - 1)] == 0)]
    assert not len(outside), f"{what}: {len(outside)} tokens that the filters leave out, as {outside[:5]}"
    group = np.where(
        expected * len(drawn) >= 5, np.arange(len(expected)), len(expected) + np.arange(len(expected)) % 32
    )
    wanted, found = np.bincount(group, expected * len(drawn)), np.bincount(group[drawn], minlength=group.max() + 1)
    common = wanted >= 5
    wanted, found = (np.append(of[common], of[~common].sum()) for of in (wanted, found))
    possible = wanted > 1e-9  # what 1 is off by in float64 is no id
    chi_square = float(((found - wanted)[possible] ** 2 / wanted[possible]).sum())
    freedom = max(1, np.count_nonzero(possible) - 1)
    limit = freedom * (1 - 2 / (9 * freedom) + Z * (2 / (9 * freedom)) ** 0.5) ** 3
    assert chi_square < limit, f"{what}: chi-square {chi_square:.1f} of {freedom} degrees of freedom, limit {limit:.1f}"


# ---------------------------------------------------------------- ways to draw so many


def one_by_one(draw: Draw) -> ManyDraws:
    """Each token of a row of its own, all positions of a few seeds at once."""

    def some(logits: F32, setting: Setting, seeds: Sequence[int], positions: I32, num_ids: int) -> I32:
        options = [replace(setting.options, seed=seed) for seed in seeds for _ in positions]
        table = np.full((len(options), int(positions.max()) + 1), -1, np.int32)
        table[:, : len(setting.history)] = setting.history
        masked = (
            {}
            if setting.allowed is None
            else {
                "masks": bits_of([setting.allowed], len(logits)),
                "mask_rows": np.zeros(len(options), np.int32),
            }
        )
        places = np.tile(positions, len(seeds))
        rows = np.tile(logits, (len(options), 1))  # edits of a row go into its logits for the time of the draw
        drawn = draw(rows, options, places, num_ids, table=table, **masked)
        return drawn.token_ids.reshape(len(seeds), -1)

    def many(logits: F32, setting: Setting, seeds: Sequence[int], positions: I32, num_ids: int) -> I32:
        few = max(1, ROWS // len(positions))
        parts = [seeds[start : start + few] for start in range(0, len(seeds), few)]
        return np.concatenate([some(logits, setting, part, positions, num_ids) for part in parts])

    return many


def cpu_draws(logits: F32, setting: Setting, seeds: Sequence[int], positions: I32, num_ids: int) -> I32:
    """What NumPy's draw does for one row, its noise made for all positions at once: the parts that do not depend on the
    position are its own. one_by_one(cpu_draw) gives the same tokens."""
    options, history = setting.options, np.array(setting.history, np.int32)
    mask = None if setting.allowed is None else bits_of([setting.allowed], len(logits))[0]
    row = processed_logits(logits[:num_ids], options, int(positions[0]), history, mask)
    kept = filtered_ids(row, row.max(), options)
    ids = np.arange(num_ids) if kept is None else kept
    counter = np.zeros((len(positions), -(-num_ids // 4), 4), np.uint32)
    counter[..., 0], counter[..., 1] = np.arange(counter.shape[1]), positions[:, None]
    tokens = []
    for seed in seeds:
        key = np.array([seed % 2**32, seed >> 32], np.uint32)
        words = philox4x32_10(counter.reshape(-1, 4), key).reshape(len(positions), -1)
        noise = gumbel_from_words(words[:, ids])
        tokens.append(ids[(row[ids] / temperature(options) + noise).argmax(axis=1)])
    return np.array(tokens, np.int32)
