"""Laws of row invariance, for equal bits: what a row gives depends on its own sequence, and on nothing else.

test_gpu_invariance.py runs them on the card, test_emulated_invariance.py on the processor. Each takes a Model of
gpu_bits.py in whose pool nothing of IDS is left, and gives a line for each thing that differs.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from gpu_bits import ASCENDING, IDS, NAN, SHUFFLED, Model, Row, broken
from seam import NUM_IDS, Part, prompt

# Neighbours of other kinds than a row that decodes: a prompt, a prompt of one token, several rows over a past of NaN.
OTHERS = (
    Part(301, range(1800, 1844), 0, prompt(700, seed=5)),
    Part(302, [1850], 0, [9]),
    Part(303, range(1860, 1870), 130, [10, 11, 12, 13]),
)

SHOWN = 6  # lines of a failure


def assert_none(lines: list[str]) -> None:
    if lines:
        pytest.fail("\n".join([f"{len(lines)} differ:", *lines[:SHOWN]]), pytrace=False)


def chunks(model: Model, length: int, chunk: int) -> list[str]:
    """Chunks of 1 are decoding, teacher-forced."""
    return model.against_alone(f"chunks of {chunk}", model.run([*range(0, length, chunk), length]))


def decoded(model: Model, length: int) -> list[str]:
    """The last of so many rows decodes, the others prefill."""
    past = model.run([0, length - 1]) if length > 1 else None
    lines = [] if past is None else model.against_alone(f"prefill of {length - 1}", past)
    return lines + model.against_alone("decoded", model.run([length - 1, length]))


def drafts(model: Model, start: int, counts: Sequence[int]) -> list[str]:
    """Several rows of a decoded sequence at once, after others that were wrong and are replaced."""
    model.run([0, start])
    lines = []
    for count in counts:
        wrong = [IDS[start], *((token + 1) % NUM_IDS for token in IDS[start + 1 : start + count])]
        (first,) = model.logits([Part(0, ASCENDING, start, wrong)], [0])
        case = f"{count} rows at {start}"
        lines += model.differences(f"{case}, wrong ones: logits of {start}", "[id]", first, model.alone.logits[start])
        lines += model.against_alone(case, model.run([start, start + count]))
        lines += model.against_alone(f"decoded after {case}", model.run([start + 1, start + 2]))
    return lines


def among_others(model: Model, num_rows: int, firsts: Sequence[int]) -> list[str]:
    """Each row is at another place, among others, in each turn; their logits are asked for together and one by one."""
    alone, lines = model.crowd_alone, []
    for first in firsts:
        members = [(first + i) % len(model.crowd) for i in range(num_rows)]
        parts = [model.crowd[member] for member in members]
        logits, draws = model.logits(parts), model.draw(parts)
        for place, (member, part) in enumerate(zip(members, parts, strict=True)):
            case = f"row {place} of {num_rows}, position {part.computed}"
            if not broken(part.slot):
                lines += model.between(case, Row(logits[place], model.written(part), draws[place]), alone[member])
            elif draws[place][0] != -1:
                lines.append(f"{case}: drew {draws[place]} though the past is NaN")
        for place in sorted({0, num_rows // 2, num_rows - 1}):
            if not broken(parts[place].slot):
                (row,) = model.logits(parts, [place])
                case = f"row {place} of {num_rows}, sampled alone: logits"
                lines += model.differences(case, "[id]", row, alone[members[place]].logits)
    return lines


def neighbours(model: Model, start: int, end: int, others: Sequence[Part], places: Sequence[int]) -> list[str]:
    """A step of rows start .. end - 1 with these neighbours, so many of them before it."""
    lines = []
    for place in places:
        model.fill(NAN)
        if start:
            model.run([0, start])
        outcome = model.run([start, end], before=others[:place], after=others[place:])
        lines += model.against_alone(f"after {place} neighbours", outcome)
    return lines


def other_blocks(model: Model, blocks: Sequence[int], starts: Sequence[int]) -> list[str]:
    """In another slot each time; decoded from these positions on."""
    lines = model.against_alone("prefilled", model.run([0, model.length], slot=301, blocks=blocks))
    for start in starts:
        outcome = model.run([start, start + 1, start + 2], slot=302, blocks=blocks)
        lines += model.against_alone(f"decoded at {start}", outcome)
    return lines


def preempted(model: Model, decoded: int) -> list[str]:
    """Recomputed from all its tokens, prompt and answer, in chunks, in another slot and other blocks.

    decoded: rows before and after, on both sides of position 530.
    """
    lines = model.against_alone("before", model.run([0, 531 - decoded, *range(532 - decoded, 531)]))
    model.fill(NAN)
    lines += model.against_alone("again", model.run([0, 256, 512, 530], slot=303, blocks=SHUFFLED))
    steps, beside = range(530, 530 + decoded), {"before": model.crowd[:3], "after": model.crowd[3:9]}
    return lines + model.against_alone("decoded after", model.run(steps, slot=303, blocks=SHUFFLED, **beside))


def pool_of(model: Model, byte: int, decoded: int) -> list[str]:
    """The pool held this byte everywhere; so many rows decode."""
    model.fill(byte)
    lines = model.against_alone("prefilled", model.run([0, 505, 520]))
    return lines + model.against_alone("decoded", model.run(range(520, 520 + decoded)))
