"""The contract of backends/base.py as laws over any backend; test_cpu_backend.py runs them on the CPU's.

A law takes a Subject. Its pool is full of NaN whenever a backend is made, so that a read of what no step wrote shows.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from seam import BLOCK, GREEDY, NUM_IDS, Part, Run, Subject, alone, batch, i32, positions_of_kv, prompt, step
from seam_draws import DRAW_LAWS, arrays

from tinyvllm_cli.types import SlotOptions

LAWS: list[Callable[[Subject], None]] = [*DRAW_LAWS]


def law(function: Callable[[Subject], None]) -> Callable[[Subject], None]:
    LAWS.append(function)
    return function


# ---------------------------------------------------------------- 1. what a step leaves behind


@law
def kv_and_tokens_lie_at_their_positions(subject: Subject) -> None:
    ids, blocks = prompt(33), (7, 3, 5)
    backend = subject.fresh()
    (token,) = step(backend, Part(2, blocks, 0, ids))
    kv = positions_of_kv(subject, backend, blocks)
    assert np.isfinite(kv[..., :33, :]).all()
    assert np.isnan(kv[..., 33:, :]).all()
    assert all(np.isnan(subject.kv(backend, block)).all() for block in range(40) if block not in blocks)
    assert subject.tokens(backend, 2)[:34].tolist() == [*ids, token]


@law
def what_is_stored_for_a_row_depends_on_that_row_alone(subject: Subject) -> None:
    ids = prompt(33)
    whole, chunked = subject.fresh(), subject.fresh()
    step(whole, Part(0, (1, 2, 3), 0, ids))
    step(chunked, Part(5, (9, 4, 6), 0, ids[:10], ()), Part(1, (20,), 0, prompt(9, seed=1)))
    step(chunked, Part(5, (9, 4, 6), 10, ids[10:]))
    np.testing.assert_allclose(
        positions_of_kv(subject, whole, (1, 2, 3))[..., :33, :],
        positions_of_kv(subject, chunked, (9, 4, 6))[..., :33, :],
        rtol=0 if subject.exact else subject.kv_rtol,
        atol=0 if subject.exact else 2e-5,
    )


@law
def writing_a_position_again_replaces_it(subject: Subject) -> None:
    ids = prompt(20)
    backend = subject.fresh()
    run = Run(ids)
    run.prefill(backend)
    first = list(run.out)
    wrong = [(first[0] + 1) % NUM_IDS, 9, 10, 11]
    step(backend, Part(0, run.blocks, 20, wrong))
    assert subject.tokens(backend, 0)[20:24].tolist() == wrong
    assert run.decode(backend, 6) == alone(subject, ids)


@law
def a_preempted_sequence_starts_over_in_another_slot_and_other_blocks(subject: Subject) -> None:
    ids = prompt(20)
    backend = subject.fresh()
    run = Run(ids)
    run.prefill(backend)
    run.decode(backend, 3)
    again = Run([*ids, *run.out[:-1]], slot=4, blocks=(12, 11, 10))
    again.prefill(backend, chunk=7)
    assert again.out[0] == run.out[-1]
    assert run.out[:-1] + again.decode(backend, 3) == alone(subject, ids)


# ---------------------------------------------------------------- 2. what a row sees


@law
def a_row_attends_to_its_past_and_never_to_its_future(subject: Subject) -> None:
    ids = prompt(30)
    rows = replace(batch(Part(0, (1, 2), 0, ids)), logits_indices=i32([11]))
    reference = subject.fresh().logits(rows)

    def moved(position: int) -> float:
        changed = [*ids[:position], ids[position] % (NUM_IDS - 1) + 1, *ids[position + 1 :]]
        return float(np.abs(subject.fresh().logits(replace(rows, token_ids=i32(changed))) - reference).max())

    assert min(moved(position) for position in range(12)) > 1e-3
    assert max(moved(position) for position in range(12, 30)) <= (0 if subject.exact else 1e-4)


@law
def chunks_of_any_size_give_the_same_tokens(subject: Subject) -> None:
    ids = prompt(33)
    whole = alone(subject, ids)
    backend = subject.fresh()
    for chunk in range(1, 18):
        run = Run(ids, slot=chunk % 8, blocks=(2 * chunk, 2 * chunk + 1, 39))
        run.prefill(backend, chunk)
        assert run.decode(backend, 6) == whole, f"chunks of {chunk}"


@law
def many_rows_of_long_sequences_give_the_same_tokens(subject: Subject) -> None:
    """Long enough for several tiles of attention: one chunk, uneven chunks, one row at a time."""
    ids = prompt(200)
    whole = None
    for chunk in (200, 150, 67, 1):
        backend = subject.fresh(max_batch_tokens=200)
        run = Run(ids, blocks=(*range(1, 10), *range(30, 20, -1)))
        run.prefill(backend, chunk)
        whole = whole or run.out
        assert run.out == whole, f"chunks of {chunk}"


# ---------------------------------------------------------------- 4. order of calls


@law
def what_the_device_counted_and_wrote_stands_for_minus_one(subject: Subject) -> None:
    ids = prompt(33)
    backend = subject.fresh()
    backend.bind(1, ids, GREEDY)
    out = []
    for length in (20, 13, 1, 1, 1):
        out += step(backend, Part(1, (3, 2, 1), -1, [-1] * length, () if length == 20 else None))
    assert out == alone(subject, ids, 3)


@law
def steps_may_run_ahead_of_their_results(subject: Subject) -> None:
    prompts = [prompt(33), prompt(5, seed=1)]
    backend = subject.fresh(max_in_flight=4)
    assert backend.limits.max_in_flight == 4
    for slot, ids in enumerate(prompts):
        backend.bind(slot, ids, GREEDY)
    parts = [Part(0, (1, 2, 3), -1, [-1] * 33), Part(1, (4,), -1, [-1] * 5)]
    pending = [backend.step(batch(*parts))]
    pending += [backend.step(batch(*(replace(part, tokens=[-1]) for part in parts))) for _ in range(3)]
    tokens = [step.result().token_ids[0].tolist() for step in reversed(pending)][::-1]
    assert np.transpose(tokens).tolist() == [alone(subject, ids, 3) for ids in prompts]


@law
def a_slot_bound_again_starts_anew(subject: Subject) -> None:
    backend = subject.fresh()
    old = Run(prompt(30), options=SlotOptions(temperature=2.0, seed=3))
    old.prefill(backend)
    backend.bind(0, prompt(12, seed=1), GREEDY)
    tokens = step(backend, Part(0, (5,), -1, [-1] * 12))
    assert tokens == alone(subject, prompt(12, seed=1), 0)


@law
def copied_blocks_hold_what_their_source_held(subject: Subject) -> None:
    ids = prompt(32)
    backend = subject.fresh()
    step(backend, Part(0, (1, 2), 0, ids))
    backend.copy_blocks([(1, 9), (2, 8), (9, 10)])
    step(backend, Part(0, (1, 2), 0, prompt(32, seed=1)))  # comes after the copies, and must not show in them
    for blocks in ((9, 8, 20), (10, 8, 21)):
        assert step(backend, Part(1, blocks, 32, [40])) == alone(subject, [*ids, 40], 0)


@law
def arguments_may_be_reused_once_a_call_returns(subject: Subject) -> None:
    ids = prompt(20)
    backend = subject.fresh(max_in_flight=2)
    known = i32(ids)
    backend.bind(0, known, GREEDY)
    known[:] = 5
    batches = [batch(Part(0, (1, 2), -1, [-1] * 20)), batch(Part(0, (1, 2), -1, [-1]))]
    pending = []
    for arguments in batches:
        pending.append(backend.step(arguments))
        for array in arrays(arguments):
            array[:] = 0
    assert [step.result().token_ids[0, 0] for step in pending] == alone(subject, ids, 1)


# ---------------------------------------------------------------- 5. and 6. what must not matter


@law
def null_block_and_free_blocks_do_not_matter(subject: Subject) -> None:
    ids = prompt(20)
    for value in (np.nan, np.inf, 1e30, 0.0):
        backend = subject.fresh()
        subject.fill(backend, value, None)
        run = Run(ids, blocks=(5, 3))
        run.prefill(backend, chunk=9)
        subject.fill(backend, value, 0)
        assert run.decode(backend, 6) == alone(subject, ids), f"a pool full of {value}"


@law
def what_a_finished_sequence_left_does_not_matter(subject: Subject) -> None:
    backend = subject.fresh()
    for seed in range(3):
        run = Run(prompt(40 - 9 * seed, seed))
        run.prefill(backend)
        assert run.decode(backend, 6) == alone(subject, prompt(40 - 9 * seed, seed))


@law
def neighbours_order_slots_and_blocks_do_not_matter(subject: Subject) -> None:
    runs = [
        Run(prompt(length, seed=length), slot, blocks, SlotOptions(temperature=temperature, seed=length))
        for slot, (length, blocks, temperature) in enumerate(
            [(3, (9,), 0.0), (30, (11, 10, 12), 1.0), (17, (1, 2), 0.0), (47, (4, 30, 31, 5), 0.7), (16, (7, 6), 0.0)]
        )
    ]
    expected = [alone(subject, run.ids, 6, run.options) for run in runs]
    backend = subject.fresh(max_batch_tokens=128)
    for order in ([0, 1, 2, 3, 4], [4, 2, 0, 3, 1]):
        for run in runs:
            backend.bind(run.slot, run.ids, run.options)
            run.out.clear()
        ordered = [runs[index] for index in order]
        tokens = step(backend, *(Part(run.slot, run.blocks, 0, run.ids) for run in ordered))
        for _ in range(7):
            for run, token in zip(ordered, tokens, strict=True):
                run.out.append(token)
            tokens = step(backend, *(run.part() for run in ordered))
        assert [run.out for run in runs] == expected
        runs = [replace(run, slot=7 - run.slot, blocks=[block + 1 for block in run.blocks]) for run in runs]


@law
def prefill_and_decode_share_a_step(subject: Subject) -> None:
    backend = subject.fresh()
    early = Run(prompt(20), slot=0, blocks=(1, 2))
    early.prefill(backend)
    late = Run(prompt(33, seed=1), slot=1, blocks=(3, 4, 5))
    backend.bind(1, late.ids, GREEDY)
    for start in range(0, 33, 11):
        chunk = Part(1, late.blocks, start, late.ids[start : start + 11], None if start == 22 else ())
        token, *rest = step(backend, early.part(), chunk)
        early.out.append(token)
        late.out += rest
    assert early.out == alone(subject, early.ids, 3)
    assert late.decode(backend, 6) == alone(subject, late.ids)


@law
def the_last_token_of_a_full_context_is_read(subject: Subject) -> None:
    backend = subject.fresh(num_blocks=3)
    length = backend.limits.max_seq_len
    assert length == 2 * BLOCK
    ids = prompt(length)
    backend.bind(0, ids[:-1], GREEDY)
    backend.bind(1, [9] * 5, GREEDY)
    step(backend, Part(0, (1, 2), 0, ids[:-1]))
    (token,) = step(backend, Part(0, (1, 2), length - 1, ids[-1:]))
    assert token == alone(subject, ids, 0)[0]
    assert subject.tokens(backend, 1)[:5].tolist() == [9] * 5


# ---------------------------------------------------------------- bugs of the caller


@law
def a_malformed_batch_is_refused(subject: Subject) -> None:
    good = batch(Part(0, (1, 2), 0, prompt(20)), Part(1, (3,), 0, prompt(4)))
    bad: dict[str, Any] = {
        "query_start_loc": [[0, 20, 23], [1, 20, 24], [0, 25, 24], [0, 24]],
        "slots": [[0, 8], [-1, 1], [0, 0], [0]],
        "block_tables": [[[1, 0], [3, 0]], [[1, 40], [3, 0]], [[1, -1], [3, 0]], [[1], [3]]],
        "num_computed": [[13, 0], [0, 640], [0]],
        "token_ids": [[320] * 24, [-2] * 24, []],
        "logits_indices": [[19, 24], [-1, 23], [19]],
        "sample_slots": [[0, 8], [0, -1], [0]],
        "targets": [[320, 0], [0, -2], [0]],
        "mask_rows": [[0, -2], [0]],
    }
    for name, values in bad.items():
        for value in values:
            backend = subject.fresh()
            with pytest.raises(ValueError, match="malformed batch"):
                backend.step(replace(good, **{name: i32(value)}))
    for top in (-1, 21):
        with pytest.raises(ValueError, match="malformed batch: top_logprobs"):
            subject.fresh().step(replace(good, top_logprobs=top))


@law
def more_sampled_rows_than_slots_are_refused(subject: Subject) -> None:
    nine = {"logits_indices": i32([3] * 9), "sample_slots": i32([0] * 9)}
    with pytest.raises(ValueError, match="malformed batch: at most 8 rows"):
        subject.fresh().step(replace(batch(Part(0, (1,), 0, prompt(4))), **nine))


@law
def more_rows_than_the_limit_are_refused(subject: Subject) -> None:
    with pytest.raises(ValueError, match="malformed batch"):
        subject.fresh(max_batch_tokens=16).step(batch(Part(0, (1, 2), 0, prompt(17))))
