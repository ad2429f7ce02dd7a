"""Laws of penalties, masks, targets and likeliest ids, over the draw of any backend (draws.py says what a Draw is)."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from draws import Draw, bits_of, penalised
from gpu_tools import assert_same_bits
from sample_tools import FILTERS, LATE, random_logits, seeded

from tinyvllm_cli.types import F32, I32, SlotOptions

LAWS: list[Callable[[Draw, int, int], None]] = []
PENALTIES = (
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.6},
    {"presence_penalty": 1.5},
    {"presence_penalty": -0.7, "frequency_penalty": 0.3},
    {"frequency_penalty": -0.1},
    {"repetition_penalty": 1.8, "presence_penalty": 0.4, "frequency_penalty": 0.02},
)


def law(function: Callable[[Draw, int, int], None]) -> Callable[[Draw, int, int], None]:
    """A law takes a draw, the size of the vocabulary and the number of the tokenizer's ids, 40 at least."""
    LAWS.append(function)
    return function


def written_tables(rng: np.random.Generator, positions: I32, vocab: int, width: int) -> I32:
    """Rows of tokens of which many repeat, padding ids among them; what stands at positions[r] or later is noise that
    no draw may read, and a few marks of failed draws."""
    common = rng.integers(0, vocab, (len(positions), 12))
    table = common[np.arange(len(positions))[:, None], rng.integers(0, 12, (len(positions), width))]
    table = np.where(rng.random(table.shape) < 0.3, rng.integers(0, vocab, table.shape), table)
    table[rng.random(table.shape) < 0.05] = -1
    table[rng.random(table.shape) < 0.05] = -2
    return table.astype(np.int32)


def penalised_options(count: int, seed: int, positions: I32) -> list[SlotOptions]:
    """Every set of filters with every kind of penalties in turn, and prompts of any length."""
    starts = np.random.default_rng(seed).integers(0, positions + 1)
    return [
        replace(FILTERS[r % len(FILTERS)], **PENALTIES[r % len(PENALTIES)], output_start=int(start), seed=seed + r)
        for r, start in enumerate(starts[:count])
    ]


# ---------------------------------------------------------------- penalties


@law
def penalties_are_the_formula_in_float64(draw: Draw, vocab: int, num_ids: int) -> None:
    """In this order and no other: greedy tokens of rows whose likeliest ids stood in the text many times."""
    rng, count, width = np.random.default_rng(1), 120, 1300
    positions = rng.integers(1, width, count).astype(np.int32)
    table = written_tables(rng, positions, vocab, width)
    logits = random_logits(count, vocab, seed=2)
    slots = []
    for r, (row, tokens, slot) in enumerate(zip(logits, table, penalised_options(count, 3, positions), strict=True)):
        ids, times = np.unique(tokens[: positions[r]], return_counts=True)
        often = ids[(times > 1) & (ids >= 0)]
        row[often] += row[:num_ids].max() + 2  # the likeliest of any vocabulary
        bias = tuple((int(token), float(rng.normal(0, 2))) for token in often)
        every = {**PENALTIES[-1], "logit_bias": bias}  # in most rows, for only there the order shows
        slots.append(replace(slot, temperature=0.0, **every if r % 3 else {}))
    drawn = draw(logits, slots, positions, num_ids, table=table)

    def rows(order: str) -> npt.NDArray[np.float64]:
        return np.array(
            [
                penalised(row[:num_ids].astype(np.float64), slot, tokens[:position].tolist(), order)
                for row, slot, tokens, position in zip(logits, slots, table, positions, strict=True)
            ]
        )

    orders = [" ".join(order) for order in itertools.permutations(("repetition", "output", "bias"))]
    exact = rows(orders[0])
    second, first = np.sort(exact)[:, -2:].T
    clear = first - second > 1e-5
    assert clear.mean() > 0.9, "few rows all but tie"
    right, *others = (row.argmax(axis=1)[clear].tolist() for row in (exact, *map(rows, orders[1:])))
    assert drawn.token_ids[clear].tolist() == right
    # Presence, frequency and bias all add: which of these comes first changes no more than roundings.
    assert sum(other != right for other in others) == 4
    assert logits[clear, :num_ids].argmax(axis=1).tolist() != right


@law
def penalised_logits_have_the_bits_of_the_formula(draw: Draw, vocab: int, num_ids: int) -> None:
    """Each operation rounds to the nearest float32 and none are fused: beside the penalised id stands another one with
    the number it must get, and the lower of the two wins; had it the next number up or down, one of the rows shows."""
    rng = np.random.default_rng(4)
    logits, slots, tables, wanted, fused = [], [], [], [], []
    for case in range(60):
        x = np.float32(rng.normal(0, 8)) if case > 2 else np.float32((0.0, -0.0, 1.0)[case])
        start, times = int(rng.integers(0, 20)), int(rng.integers(1, 40))
        slot = SlotOptions(
            repetition_penalty=float(rng.uniform(0.5, 2)) if case % 3 else 1.0,
            presence_penalty=float(rng.uniform(-2, 2)) if case % 2 else 0.0,
            frequency_penalty=float(rng.uniform(-2, 2)) if case % 5 else 0.0,
            logit_bias=((num_ids // 2, float(rng.uniform(-3, 3))),) * (case % 2),
            output_start=start,
        )
        place = num_ids // 2
        tokens = [place if start <= i < start + times or i == 59 else 1 for i in range(60)]
        row = np.full(vocab, -1e4, np.float32)
        row[place] = x
        exact = penalised(row, slot, tokens)[place]
        once = penalised(row.astype(np.float64), as_float32(slot), tokens)[place].astype(np.float32)
        fused.append(bool(once != exact))
        for rival, winner in ((place - 1, place - 1), (place + 1, place)):
            logits.append(row.copy())
            logits[-1][rival] = exact
            slots.append(slot)
            tables.append([*tokens, -1, -1, -1, -1])
            wanted.append(winner)
    drawn = draw(np.array(logits), slots, [60] * len(slots), num_ids, table=np.array(tables, np.int32))
    assert drawn.token_ids.tolist() == wanted
    assert any(fused), "cases in which one rounding in the place of several is another number"


def as_float32(options: SlotOptions) -> SlotOptions:
    names = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    rounded = {name: float(np.float32(getattr(options, name))) for name in names}
    bias = tuple((token, float(np.float32(value))) for token, value in options.logit_bias)
    return replace(options, **rounded, logit_bias=bias)


@law
def a_penalised_draw_is_the_draw_of_the_penalised_logits(draw: Draw, vocab: int, num_ids: int) -> None:
    """With every filter, with bias and masked stop ids."""
    rng, count = np.random.default_rng(5), 2 * len(FILTERS)
    positions = rng.integers(1, 65, count).astype(np.int32)  # 64 is past the table: the last token of a full context
    table, logits = written_tables(rng, positions, vocab, 64), random_logits(count, vocab, seed=6)
    slots = [
        replace(slot, logit_bias=((3, 2.0), (7, -1.5)), stop_ids=(1, 4), min_position=LATE)
        for slot in penalised_options(count, 7, positions)
    ]
    processed = logits.copy()
    for row, slot, tokens, position in zip(processed, slots, table, positions.tolist(), strict=True):
        row[:num_ids] = penalised(row[:num_ids], slot, tokens[:position].tolist())
    plain = [
        replace(slot, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0, logit_bias=())
        for slot in slots
    ]
    found = draw(logits, slots, positions, num_ids, table=table)
    wanted = draw(processed, plain, positions, num_ids, table=table)
    assert found.token_ids.tolist() == wanted.token_ids.tolist()
    assert found.token_ids.tolist() != draw(logits, plain, positions, num_ids, table=table).token_ids.tolist()
    assert np.array_equal(found.table, wanted.table)


@law
def penalties_read_their_own_past_alone(draw: Draw, vocab: int, num_ids: int) -> None:
    """Not what lies in the table at the drawn token's position or later, nor anything of another row; and rows without
    penalties have the tokens that they have without such neighbours."""
    rng, count = np.random.default_rng(8), 2 * len(FILTERS)
    positions = rng.integers(0, 64, count).astype(np.int32)
    table, logits = written_tables(rng, positions, vocab, 64), random_logits(count, vocab, seed=9)
    plain = seeded([FILTERS[r % len(FILTERS)] for r in range(count)], seed=10)
    slots = [
        slot if r % 3 else option
        for r, (slot, option) in enumerate(zip(penalised_options(count, 11, positions), plain, strict=True))
    ]
    slots = [replace(slot, logprobs=True) for slot in slots]
    found = draw(logits, slots, positions, num_ids, table=table)
    cleared = np.where(np.arange(64) < positions[:, None], table, -1).astype(np.int32)
    assert draw(logits, slots, positions, num_ids, table=cleared).token_ids.tolist() == found.token_ids.tolist()
    without = draw(logits[::3], plain[::3], positions[::3], num_ids).token_ids
    assert without.tolist() == found.token_ids[::3].tolist()
    for order in (rng.permutation(count), np.array([4]), np.array([1, 1, 2])):
        parts = [np.ascontiguousarray(array[order]) for array in (logits, positions, table)]
        again = draw(parts[0], [slots[r] for r in order], parts[1], num_ids, table=parts[2])
        assert again.token_ids.tolist() == found.token_ids[order].tolist()
        assert_same_bits("logprobs at other places", again.logprobs, found.logprobs[order])


@law
def penalties_past_the_range_of_float32_leave_finite_logits(draw: Draw, vocab: int, num_ids: int) -> None:
    """The greatest and the least finite number take the place of infinities: an id is still no masked one, and a draw
    has a token."""
    largest = np.finfo(np.float32).max
    row = np.linspace(-1, 1, vocab, dtype=np.float32) * largest
    row[num_ids // 2] = 0
    table = np.arange(64, dtype=np.int32)[None] % num_ids
    for penalty in (1e-300, 1e-30, 1e30, 1e300):
        slots = [
            SlotOptions(temperature=temperature, repetition_penalty=penalty, top_p=top_p, seed=seed)
            for seed, (temperature, top_p) in enumerate(((0.0, 1.0), (1.0, 1.0), (1.0, 0.9), (1e30, 0.5)))
        ]
        tokens = draw(np.stack([row] * 4), slots, [64] * 4, num_ids, table=np.repeat(table, 4, axis=0)).token_ids
        assert all(0 <= token < num_ids for token in tokens), (penalty, tokens)
    low = np.full((1, vocab), -largest, np.float32)
    everything = np.arange(num_ids, dtype=np.int32)[None]
    slot = SlotOptions(repetition_penalty=1e30, stop_ids=(0,), min_position=LATE)
    assert draw(low, [slot], [num_ids], num_ids, table=everything).token_ids.tolist() == [1]


# ---------------------------------------------------------------- masks


@law
def a_mask_leaves_what_masked_stop_ids_would(draw: Draw, vocab: int, num_ids: int) -> None:
    """With every filter, penalties and bias on what is masked and what is not; rows without a mask are as ever."""
    rng, count = np.random.default_rng(12), 2 * len(FILTERS)
    positions = rng.integers(1, 60, count).astype(np.int32)
    table, logits = written_tables(rng, positions, vocab, 64), random_logits(count, vocab, seed=13)
    slots = [replace(slot, logit_bias=((5, 4.0), (6, 3.0))) for slot in penalised_options(count, 14, positions)]
    borders = [token for token in (0, 31, 32, 63, 64, num_ids - 1, num_ids, vocab - 1) if token < vocab]
    allowed = [[*borders], *(np.flatnonzero(rng.random(vocab) < share).tolist() for share in (0.1, 0.5, 0.97)), [9]]
    mask_rows = rng.integers(-1, len(allowed), count).astype(np.int32)
    forbidden = [sorted(set(range(num_ids)) - set(ids)) for ids in allowed]
    stopped = [
        replace(slot, stop_ids=tuple(forbidden[place]), min_position=LATE) if place >= 0 else slot
        for slot, place in zip(slots, mask_rows.tolist(), strict=True)
    ]
    masks = bits_of(allowed, vocab)
    found = draw(logits, slots, positions, num_ids, table=table, masks=masks, mask_rows=mask_rows)
    assert found.token_ids.tolist() == draw(logits, stopped, positions, num_ids, table=table).token_ids.tolist()
    for place, token in zip(mask_rows.tolist(), found.token_ids.tolist(), strict=True):
        assert 0 <= token < num_ids and (place < 0 or token in allowed[place])
    assert set(found.token_ids[mask_rows == len(allowed) - 1].tolist()) == {9}


@law
def masks_add_up_and_may_leave_nothing(draw: Draw, vocab: int, num_ids: int) -> None:
    """A mask's ids but the stop ids that wait; ids past the tokenizer never. A row of NaN stays one."""
    allowed = [[3, 8, 20], [3], list(range(num_ids, vocab)), [], list(range(vocab))]
    slots = [SlotOptions(temperature=temperature, logprobs=True) for temperature in (0.0, 1.0) for _ in range(6)]
    slots = [replace(slot, stop_ids=(3, 8), min_position=LATE) for slot in slots]
    logits = random_logits(12, vocab, seed=15)
    logits[:, [3, 8]] += 50
    logits[[5, 11], num_ids - 1] = np.nan
    mask_rows = np.array([0, 1, 2, 3, 4, 4] * 2, np.int32)
    drawn = draw(logits, slots, [5] * 12, num_ids, masks=bits_of(allowed, vocab), mask_rows=mask_rows)
    for tokens, logprobs in ((drawn.token_ids[:6], drawn.logprobs[:6]), (drawn.token_ids[6:], drawn.logprobs[6:])):
        assert tokens[0] == 20 and tokens[1:4].tolist() == [-2] * 3 and tokens[5] == -1
        assert 0 <= tokens[4] < num_ids and tokens[4] not in (3, 8)
        assert np.isfinite(logprobs).tolist() == [True, False, False, False, True, False]


# ---------------------------------------------------------------- targets and likeliest ids


@law
def a_target_has_its_logprob_and_writes_nothing(draw: Draw, vocab: int, num_ids: int) -> None:
    """The raw logits' in float64, over padding ids too, whatever the options of the slot; its token is the greedy one.
    The rows beside it draw as ever."""
    rng, count = np.random.default_rng(16), 3 * len(FILTERS)
    positions = rng.integers(1, 60, count).astype(np.int32)
    table, logits = written_tables(rng, positions, vocab, 64), random_logits(count, vocab, seed=17)
    logits[:, num_ids:] += 5
    logits[4, 1] = np.nan
    slots = [replace(slot, logit_bias=((2, 90.0),)) for slot in penalised_options(count, 18, positions)]
    targets = rng.integers(0, vocab, count).astype(np.int32)
    targets[::3] = -1
    targets[[1, 2]] = 0, vocab - 1
    mask_rows = np.zeros(count, np.int32)
    masks = bits_of([range(7)], vocab)
    asked = {"masks": masks, "mask_rows": mask_rows, "table": table}
    found = draw(logits, slots, positions, num_ids, targets=targets, **asked)
    without = draw(logits, slots, positions, num_ids, **asked)
    scored = targets >= 0
    assert found.token_ids[~scored].tolist() == without.token_ids[~scored].tolist()
    greedy = logits[:, :num_ids].argmax(axis=1)
    greedy[4] = -1
    assert found.token_ids[scored].tolist() == greedy[scored].tolist()
    assert np.array_equal(found.table, np.where(scored[:, None], table, without.table))
    assert (found.table != table).any()
    exact = log_softmax64(logits)[np.arange(count), targets]
    exact[~scored | (targets < 0)] = np.nan
    np.testing.assert_allclose(found.logprobs, exact, rtol=1e-5, atol=1e-5)


@law
def the_likeliest_ids_are_those_of_the_raw_logits_in_order(draw: Draw, vocab: int, num_ids: int) -> None:
    """Descending, of equals the lowest id first, none past the tokenizer; logprobs over the whole vocabulary. Neither
    tokens nor their logprobs change because somebody asks."""
    rng, count = np.random.default_rng(19), 2 * len(FILTERS)
    positions = rng.integers(1, 60, count).astype(np.int32)
    table, logits = written_tables(rng, positions, vocab, 64), random_logits(count, vocab, seed=20)
    logits[::3] = np.round(logits[::3])
    logits[1::6] = rng.choice(np.array([-0.0, 0.0, -7.5], np.float32), (len(logits[1::6]), vocab))
    logits[:, num_ids:] += 5
    logits[5, vocab - 1] = np.inf
    slots = [replace(slot, logprobs=bool(r % 2)) for r, slot in enumerate(penalised_options(count, 21, positions))]
    targets = np.where(np.arange(count) % 5, -1, 3).astype(np.int32)
    plain = draw(logits, slots, positions, num_ids, table=table, targets=targets)
    assert plain.top_ids is None and plain.top_logprobs is None
    order = np.argsort(-logits[:, :num_ids], axis=1, kind="stable")
    order[5] = -1
    exact = np.take_along_axis(log_softmax64(logits), order, axis=1)
    for top in (1, 2, 7, 20):
        found = draw(logits, slots, positions, num_ids, table=table, targets=targets, top_logprobs=top)
        assert found.token_ids.tolist() == plain.token_ids.tolist()
        assert_same_bits("logprobs beside the likeliest ids", found.logprobs, plain.logprobs)
        assert found.top_ids is not None and found.top_logprobs is not None
        assert found.top_ids.dtype == np.int32 and found.top_logprobs.dtype == np.float32
        assert found.top_ids.tolist() == order[:, :top].tolist()
        np.testing.assert_allclose(found.top_logprobs, exact[:, :top], rtol=1e-5, atol=1e-5)
        drawn = (found.top_ids == found.token_ids[:, None]) & np.isfinite(found.logprobs)[:, None]
        drawn[targets >= 0] = False
        ones = np.broadcast_to(found.logprobs[:, None], drawn.shape)
        assert drawn.any()
        assert_same_bits("logprob of a likeliest id that was drawn", found.top_logprobs[drawn], ones[drawn])


def log_softmax64(logits: F32) -> npt.NDArray[np.float64]:
    """NaN for rows that are not finite."""
    with np.errstate(invalid="ignore"):
        shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
        return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
