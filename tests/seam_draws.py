"""Laws over the seam about what is drawn from a row: section 3 of the contract in backends/base.py, and masks."""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace

import numpy as np
import pytest
from draws import bits_of
from seam import GREEDY, NUM_IDS, Part, Run, Subject, alone, batch, i32, prompt, step

from tinyvllm_cli.backends.base import Backend
from tinyvllm_cli.backends.cpu.sample import sample_row
from tinyvllm_cli.types import Batch, SlotOptions

DRAW_LAWS: list[Callable[[Subject], None]] = []
VOCAB = 320


def law(function: Callable[[Subject], None]) -> Callable[[Subject], None]:
    DRAW_LAWS.append(function)
    return function


def penalised(output_start: int, seed: int = 0, temperature: float = 0.9) -> SlotOptions:
    """Ids of the output come again, each a few times; those of the prompt rather than others."""
    return SlotOptions(
        temperature=temperature,
        seed=seed,
        repetition_penalty=0.3,
        presence_penalty=-7.0,
        frequency_penalty=2.5,
        output_start=output_start,
    )


def unpenalised(options: SlotOptions) -> SlotOptions:
    return replace(options, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0)


def together(backend: Backend, runs: Sequence[Run], count: int) -> None:
    """Decode them in the same steps."""
    for _ in range(count):
        tokens = step(backend, *(run.part() for run in runs))
        for run, token in zip(runs, tokens, strict=True):
            run.out.append(token)


def arrays(arguments: Batch) -> list[np.ndarray]:
    values = (getattr(arguments, field.name) for field in fields(arguments))
    return [value for value in values if isinstance(value, np.ndarray)]


@law
def a_sampled_token_is_the_function_of_its_logits_options_tokens_and_position(subject: Subject) -> None:
    ids = prompt(21)
    drawn = SlotOptions(temperature=0.8, seed=7), SlotOptions(temperature=1.2, top_k=5, seed=8), penalised(9, seed=9)
    for options in (GREEDY, *drawn):
        logits = subject.fresh().logits(batch(Part(3, (1, 2), 0, ids)))
        backend = subject.fresh()
        backend.bind(3, ids, options)
        assert step(backend, Part(3, (1, 2), 0, ids)) == [sample_row(logits[0], options, 21, NUM_IDS, i32(ids))]


@law
def a_row_sampled_for_several_slots_obeys_the_options_of_each(subject: Subject) -> None:
    ids = prompt(18)
    options = [SlotOptions(temperature=1.5, seed=seed) for seed in range(4)] + [GREEDY, penalised(18)]
    backend = subject.fresh()
    for slot, slot_options in enumerate(options):
        backend.bind(slot, ids, slot_options)
    tokens = step(backend, Part(0, (1, 2), 0, ids, samples=range(6)))
    assert tokens == [alone(subject, ids, 0, slot_options)[0] for slot_options in options]
    assert [subject.tokens(backend, slot)[18] for slot in range(6)] == tokens
    assert len(set(tokens)) > 1


@law
def ids_past_the_tokenizer_never_come_out(subject: Subject) -> None:
    padding = tuple((token, 100.0) for token in range(NUM_IDS, VOCAB))
    backend = subject.fresh()
    assert backend.limits.vocab_size == VOCAB
    for temperature in (0.0, 1.0, 50.0):
        run = Run(prompt(5), options=SlotOptions(temperature=temperature, logit_bias=padding))
        run.prefill(backend)
        assert max(run.decode(backend, 20)) < NUM_IDS


@law
def a_chunk_without_its_last_row_samples_nothing(subject: Subject) -> None:
    output = subject.fresh().step(batch(Part(0, (1,), 0, prompt(9), ()))).result()
    assert output.token_ids.shape == (1, 0)


# ---------------------------------------------------------------- penalties


@law
def penalties_know_bound_tokens_and_drawn_ones_alike(subject: Subject) -> None:
    """Their state is the token table: nothing else is lost with a slot, and nothing stays in it."""
    ids, options = prompt(20), penalised(20)
    whole = alone(subject, ids, 8, options)
    assert whole != alone(subject, ids, 8, unpenalised(options))
    assert whole != alone(subject, ids, 8, replace(options, output_start=0))
    backend = subject.fresh()
    for known in (1, 4, 8):
        again = Run([*ids, *whole[:known]], slot=known % 8, blocks=(12, 9, 10), options=options)
        again.prefill(backend, chunk=7)
        assert whole[:known] + again.decode(backend, 8 - known) == whole


@law
def penalties_never_change_a_neighbour(subject: Subject) -> None:
    """Nor those who come into a slot or beside one later."""
    options = [penalised(9, seed=1), SlotOptions(temperature=0.9, seed=2), penalised(9, 3, 0.0), GREEDY]
    runs = [Run(prompt(9, seed), seed, (2 * seed + 1, 2 * seed + 2), slot) for seed, slot in enumerate(options)]
    expected = [alone(subject, run.ids, 6, run.options) for run in runs]
    backend = subject.fresh()
    for run in runs:
        run.prefill(backend)
    together(backend, runs, 3)
    late = [Run(prompt(9, seed), 1 - seed, (20 + seed,), options[seed]) for seed in range(2)]  # in each other's slot
    for run in late:
        run.prefill(backend)
    together(backend, [runs[3], late[1], runs[2], late[0]], 3)
    assert [run.out for run in (*late, *runs[2:])] == [expected[0][:4], expected[1][:4], *expected[2:]]
    assert [run.out for run in runs[:2]] == [out[:4] for out in expected[:2]]


@law
def rows_of_one_sequence_are_drawn_behind_the_tokens_that_were_fed(subject: Subject) -> None:
    """As drafts are: what one row draws for a position is not what the next row has there."""
    ids, options = prompt(12), penalised(6)
    rows = replace(batch(Part(0, (1,), 0, ids)), logits_indices=i32([7, 8, 9, 10, 11]), sample_slots=i32([0] * 5))
    logits = subject.fresh().logits(rows)
    backend = subject.fresh()
    backend.bind(0, ids, options)
    tokens = backend.step(rows).result().token_ids[0].tolist()
    assert tokens == [sample_row(row, options, 8 + j, NUM_IDS, i32(ids[: 8 + j])) for j, row in enumerate(logits)]


# ---------------------------------------------------------------- logprobs


def log_softmax(logits: np.ndarray) -> np.ndarray:
    raw = logits.astype(np.float64)
    return raw - np.log(np.exp(raw).sum(axis=-1, keepdims=True))


@law
def logprobs_are_of_the_raw_logits_where_a_slot_asks(subject: Subject) -> None:
    backend, rows = subject.fresh(), batch(Part(0, (1, 2), 0, prompt(21), samples=range(2)))
    backend.bind(1, [], SlotOptions(temperature=1.5, top_k=3, logit_bias=((40, 50.0),), logprobs=True))
    output, raw = backend.step(rows).result(), log_softmax(subject.fresh().logits(rows)[1])
    assert output.token_ids[0, 1] == 40
    np.testing.assert_allclose(output.logprobs, [[np.nan, raw[40]]], atol=1e-4)
    assert output.top_ids is None and output.top_logprobs is None


@law
def the_likeliest_ids_are_those_of_the_raw_logits(subject: Subject) -> None:
    ids = prompt(21)
    rows = batch(Part(0, (1, 2), 0, ids), Part(1, (3,), 0, ids[:7]))
    raw = subject.fresh().logits(rows)
    best = np.argsort(-raw[:, :NUM_IDS], axis=1, kind="stable")
    plain = subject.fresh().step(rows).result()
    for top in (1, 20):
        backend = subject.fresh()
        backend.bind(1, [], SlotOptions(temperature=1.5, seed=1, logit_bias=((40, 50.0),), logprobs=True))
        output = backend.step(replace(rows, top_logprobs=top)).result()
        assert output.token_ids[0].tolist() == [plain.token_ids[0, 0], 40]
        assert output.top_ids is not None and output.top_logprobs is not None
        assert output.top_ids.tolist() == [best[:, :top].tolist()]
        exact = np.take_along_axis(log_softmax(raw), best, axis=1)[:, :top]
        np.testing.assert_allclose(output.top_logprobs, [exact], atol=1e-4)


@law
def a_target_has_its_logprob_and_is_not_written(subject: Subject) -> None:
    """Every position of a text in one step, beside a sequence that draws."""
    ids, other = prompt(8), Part(0, (5,), 0, prompt(6, seed=1))
    parts = batch(other, Part(2, (1,), 0, ids))
    rows = replace(
        parts,
        logits_indices=i32([5, *range(6, 13)]),
        sample_slots=i32([0] + [2] * 7),
        targets=i32([-1, *ids[1:7], VOCAB - 1]),
    )
    raw = subject.fresh().logits(rows)
    backend = subject.fresh()
    backend.bind(2, ids[:4], SlotOptions(temperature=2.0, seed=1, logit_bias=((9, 90.0),), repetition_penalty=3.0))
    before = subject.tokens(backend, 2).copy()
    output = backend.step(rows).result()
    assert output.token_ids[0, 1:].tolist() == raw[1:, :NUM_IDS].argmax(axis=1).tolist()
    exact = log_softmax(raw)[np.arange(8), rows.targets]
    np.testing.assert_allclose(output.logprobs, [[np.nan, *exact[1:]]], atol=1e-4)
    after = subject.tokens(backend, 2)
    assert after[:8].tolist() == ids and after[8:].tolist() == before[8:].tolist()
    assert output.token_ids[0, 0] == subject.tokens(backend, 0)[6] == alone(subject, prompt(6, seed=1), 0)[0]


# ---------------------------------------------------------------- masks


def masked(ids: Sequence[int], mask_rows: Sequence[int]) -> Batch:
    """Three sequences that begin alike."""
    parts = (Part(slot, (slot + 1,), 0, ids[: 5 + slot]) for slot in range(3))
    return replace(batch(*parts), mask_rows=i32(mask_rows))


@law
def a_mask_says_which_ids_are_allowed(subject: Subject) -> None:
    """What the caller does with his arrays after a call does not matter."""
    ids, rows = prompt(7), [1, -1, 0]
    options = [SlotOptions(temperature=1.5, seed=4, logprobs=True), GREEDY, penalised(3, seed=5)]
    logits = subject.fresh().logits(masked(ids, rows))
    bits = bits_of([range(0, VOCAB, 7), [31, 32, 63, 64, NUM_IDS - 1, NUM_IDS, VOCAB - 1]], VOCAB)
    wanted = [
        sample_row(row, slot, 5 + r, NUM_IDS, i32(ids[: 5 + r]), None if place < 0 else bits[place])
        for r, (row, slot, place) in enumerate(zip(logits, options, rows, strict=True))
    ]
    backend = subject.fresh()
    for slot, slot_options in enumerate(options):
        backend.bind(slot, ids[: 5 + slot], slot_options)
    arguments = masked(ids, rows)
    pending = backend.step(arguments)
    for array in arrays(arguments):
        array[:] = 0
    pending.mask(bits)
    bits[:] = 0
    output = pending.result()
    assert output.token_ids[0].tolist() == wanted
    assert [subject.tokens(backend, slot)[5 + slot] for slot in range(3)] == wanted
    assert output.logprobs[0, 0] == pytest.approx(log_softmax(logits)[0, wanted[0]], abs=1e-4)


@law
def masks_may_lie_in_the_backends_own_memory(subject: Subject) -> None:
    """In the order of the rows that are masked, and in another."""
    ids, bits = prompt(7), bits_of([range(0, VOCAB, 7), range(3, VOCAB, 11)], VOCAB)
    for rows in ([0, -1, 1], [1, -1, 0], [-1, -1, 1]):
        drawn = []
        for own in (False, True):
            backend = subject.fresh()
            for slot in range(3):
                backend.bind(slot, ids[: 5 + slot], SlotOptions(temperature=1.5, seed=slot))
            memory = backend.mask_memory()[:2] if own else np.empty_like(bits)
            memory[:] = bits
            pending = backend.step(masked(ids, rows))
            pending.mask(memory)
            drawn.append(pending.result().token_ids.tolist())
        assert drawn[0] == drawn[1]


@law
def masks_may_come_while_the_next_step_runs(subject: Subject) -> None:
    """A mask that depends on the token before it, beside a sequence that knows no masks."""
    ids, options = prompt(9), SlotOptions(temperature=1.5, seed=6)
    backend = subject.fresh(max_in_flight=2)
    for slot in range(2):
        backend.bind(slot, ids, options)
    parts = [Part(slot, (1 + 2 * slot, 2 + 2 * slot), -1, [-1] * 9) for slot in range(2)]
    drawn, previous = [], None
    for _ in range(6):
        pending = backend.step(replace(batch(*parts), mask_rows=i32([0, -1])))
        if previous is not None:
            drawn.append(previous.result().token_ids[0].tolist())
        rest = sum(token for token, _ in drawn) % 5
        pending.mask(bits_of([range(rest, VOCAB, 5)], VOCAB))
        previous, parts = pending, [replace(part, tokens=[-1]) for part in parts]
    drawn.append(previous.result().token_ids[0].tolist())
    assert [other for _, other in drawn] == alone(subject, ids, 5, options)
    for n, (token, _) in enumerate(drawn):
        assert token % 5 == sum(before for before, _ in drawn[:n]) % 5
    assert len({token for token, _ in drawn}) > 3


@law
def a_step_that_waits_for_its_mask_lets_nothing_pass(subject: Subject) -> None:
    ids = prompt(7)
    backend = subject.fresh(max_in_flight=2)
    pending = backend.step(masked(ids, [0, 0, -1]))
    bits = bits_of([range(VOCAB)], VOCAB)
    for wrong in (bits[:0], bits[:, 1:], bits[0], bits.astype(np.int64)):
        with pytest.raises(ValueError, match="mask"):
            pending.mask(wrong)
    for call in (
        pending.result,
        lambda: backend.bind(5, ids, GREEDY),
        lambda: backend.step(batch(Part(5, (9,), 0, ids))),
    ):
        with pytest.raises(ValueError, match="waits for its mask"):
            call()
    pending.mask(bits)
    free = backend.step(batch(*(Part(slot + 3, (slot + 11,), 0, ids[: 5 + slot]) for slot in range(3))))
    assert free.result().token_ids.tolist() == pending.result().token_ids.tolist()
    for done in (pending, free):
        with pytest.raises(ValueError, match="mask"):
            done.mask(bits)
