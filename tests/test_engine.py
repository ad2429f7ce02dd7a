"""What a request gets from the engine: its tokens, its end, its limits, its times, its errors."""

import pytest
from fake_backend import FakeBackend, FakeCodec, NextToken, VirtualClock, hashed, limits, request, scripted

from tinyvllm_cli.engine.engine import TAKEN_IN_AHEAD, Engine
from tinyvllm_cli.errors import DeviceError
from tinyvllm_cli.types import Completion, Delta, Event, Failure, Limits, Request, Stats, Usage

EOS = (2, 7)


def make_engine(next_token: NextToken, lim: Limits | None = None, **codec: object) -> tuple[Engine, FakeBackend]:
    clock = VirtualClock()
    backend = FakeBackend(lim or limits(), next_token, clock)
    return Engine(backend, FakeCodec(clock, **codec), eos_token_ids=EOS, clock=clock), backend


def finish(engine: Engine) -> list[Event]:
    events: list[Event] = []
    while not engine.idle:
        events += engine.step()
        engine.check()
    return events


def answer(next_token: NextToken, req: Request, lim: Limits | None = None, **codec: object) -> Completion:
    """The completion of one request alone."""
    engine, _ = make_engine(next_token, lim, **codec)
    engine.add(req)
    events = finish(engine)
    completions = [e for e in events if isinstance(e, Completion)]
    assert len(completions) == 1
    return completions[0]


def end(completion: Completion) -> tuple[object, ...]:
    (choice,) = completion.choices
    assert completion.usage is not None and completion.usage.completion_tokens == len(choice.token_ids)
    return choice.token_ids, choice.text, choice.finish_reason, choice.stop_reason


WORDS = scripted(1, 30, 31, 7, 32, 2, 33)  # two EOS ids among words


@pytest.mark.parametrize(
    ("params", "wanted"),
    [
        ({}, ((30, 31, 7), " 30 31.", "stop", None)),
        ({"max_tokens": 2}, ((30, 31), " 30 31.", "length", None)),
        ({"max_tokens": 3}, ((30, 31, 7), " 30 31.", "stop", None)),
        (
            {"max_tokens": 8, "ignore_eos": True},
            ((30, 31, 7, 32, 2, 33, 30, 31), " 30 31 7 32 2 33 30 31.", "length", None),
        ),
        ({"stop_token_ids": (31,)}, ((30, 31), " 30.", "stop", 31)),
        ({"stop_token_ids": (31,), "include_stop_str_in_output": True}, ((30, 31), " 30 31.", "stop", 31)),
        ({"stop_token_ids": (31,), "max_tokens": 2}, ((30, 31), " 30.", "stop", 31)),
        ({"stop_token_ids": (7,)}, ((30, 31, 7), " 30 31.", "stop", 7)),
        ({"stop_token_ids": (7,), "ignore_eos": True}, ((30, 31, 7), " 30 31.", "stop", 7)),
        ({"include_stop_str_in_output": True}, ((30, 31, 7), " 30 31.", "stop", None)),
        ({"stop": ("zz", "31")}, ((30, 31), " 30 31", "stop", "31")),
        ({"stop": ("31",), "max_tokens": 2}, ((30, 31), " 30 31", "stop", "31")),
        ({"stop": (".",), "max_tokens": 2}, ((30, 31), " 30 31.", "stop", ".")),
        (
            {"stop": ("31",), "stop_token_ids": (31,), "include_stop_str_in_output": True},
            ((30, 31), " 30 31", "stop", "31"),
        ),
    ],
)
@pytest.mark.parametrize("ahead", [1, 3])
def test_how_an_answer_ends(params: dict[str, object], wanted: tuple[object, ...], ahead: int):
    assert end(answer(WORDS, request(0, (5,), **params), limits(max_in_flight=ahead))) == wanted


def test_min_tokens_hold_eos_and_stop_ids_back():
    plain = end(answer(hashed(8), request(0, (5,), stop_token_ids=(3,), seed=1)))
    held = end(answer(hashed(8), request(0, (5,), stop_token_ids=(3,), seed=1, min_tokens=6)))
    assert len(plain[0]) < 6 < len(held[0])
    assert not {2, 3, 7} & set(held[0][:6])


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens", "made"),
    [(127, 512, 1), (126, 512, 2), (100, 100, 28), (100, 28, 28), (100, 27, 27), (1, 512, 127)],
)
def test_an_answer_is_shortened_to_the_context(prompt_len: int, max_tokens: int, made: int):
    lim = limits(max_seq_len=128, block_size=16)
    completion = answer(scripted(prompt_len, 9), request(0, (5,) * prompt_len, max_tokens=max_tokens), lim)
    assert completion.usage == Usage(prompt_len, made)
    assert completion.choices[0].finish_reason == "length"


@pytest.mark.parametrize("max_tokens", [0, 1, 512])
@pytest.mark.parametrize("prompt_len", [128, 129, 5000])
def test_a_prompt_that_leaves_no_room_is_an_error_and_the_others_go_on(prompt_len: int, max_tokens: int):
    engine, _ = make_engine(hashed(), limits(max_seq_len=128))
    engine.add(request(0, (5,) * prompt_len, max_tokens=max_tokens))
    engine.add(request(1, (5,), max_tokens=3, ignore_eos=True))
    failed, good = (e for e in finish(engine) if isinstance(e, Completion))
    assert (failed.choices, failed.usage, failed.stats) == ((), None, None)
    assert failed.error.type == "prompt_too_long" and failed.error.field == "prompt_token_ids"
    assert f"{prompt_len} tokens" in failed.error.message and "128" in failed.error.message
    assert good.usage == Usage(1, 3)


def test_a_request_that_no_pool_holds_is_an_error_with_the_figures():
    lim = limits(num_blocks=1 + 5, block_size=4)
    assert answer(scripted(10, 9), request(0, (5,) * 10, max_tokens=11), lim).error is None
    error = answer(scripted(10, 9), request(0, (5,) * 10, max_tokens=12), lim).error
    assert error.type == "prompt_too_long"
    for figure in ("10 tokens", "answer of 12", "6 KV blocks", "4 tokens", "holds 5"):
        assert figure in error.message


def test_memory_for_3_of_16_sequences():
    engine, _ = make_engine(hashed(), limits(num_blocks=1 + 3 * 5, block_size=4, max_slots=16))
    for i in range(16):
        engine.add(request(i, (5 + i,) * 8, max_tokens=13, ignore_eos=True))
    done = [e for e in finish(engine) if isinstance(e, Completion)]
    assert [c.usage for c in done] == [Usage(8, 13)] * 16
    assert engine.stats.peak_blocks == 15


def test_no_tokens_wanted_is_usage_only():
    completion = answer(hashed(), request(0, (5, 6), max_tokens=0))
    assert (completion.choices, completion.usage, completion.error) == ((), Usage(2, 0), None)
    assert completion.stats == Stats(queue_s=0, ttft_s=None, decode_s=None, e2e_s=0, tokens_per_s=0)


def test_deltas_join_to_the_answer():
    engine, _ = make_engine(WORDS, limits(max_in_flight=2))
    engine.add(request(3, (5,)))
    *deltas, completion = finish(engine)
    assert all(isinstance(d, Delta) and (d.request_id, d.index) == (3, 0) for d in deltas)
    assert "".join(d.text for d in deltas) == completion.choices[0].text
    assert tuple(i for d in deltas for i in d.token_ids) == completion.choices[0].token_ids


def test_a_completion_carries_what_tells_its_line():
    req = Request(request_id=4, custom_id=17, line=9, prompt_token_ids=(5,), metadata_json=b'{"a":1}')
    bad = Request(request_id=5, custom_id="x", line=10, prompt="refused", metadata_json=b"2")
    for r in (req, bad):
        c = answer(WORDS, r)
        assert (c.request_id, c.custom_id, c.line, c.metadata_json) == (
            r.request_id,
            r.custom_id,
            r.line,
            r.metadata_json,
        )


# ---------------------------------------------------------------- errors of one request


def neighbours(next_token: NextToken, bad: Request, ahead: int, **codec: object) -> tuple[Completion, list[Completion]]:
    """The completion of a bad request, and those of two good ones about it."""
    engine, _ = make_engine(next_token, limits(max_in_flight=ahead), **codec)
    for r in (request(0, (5,), max_tokens=9), bad, request(2, (6,), max_tokens=9)):
        engine.add(r)
    done = {e.request_id: e for e in finish(engine) if isinstance(e, Completion)}
    return done[1], [done[0], done[2]]


def after(prompt: tuple[int, ...], made: int, token: int) -> NextToken:
    """9 for everyone, but `token` to this prompt once so many tokens were made."""
    return lambda history, options: token if history == (*prompt, *(9,) * made) else 9


@pytest.mark.parametrize("ahead", [1, 3])
@pytest.mark.parametrize(("token", "type"), [(-1, "nan_logits"), (-2, "invalid_value")])
@pytest.mark.parametrize("made", [0, 3])
def test_no_token_fails_its_request_alone(token: int, type: str, made: int, ahead: int):
    failed, good = neighbours(after((8,), made, token), request(1, (8,), max_tokens=9), ahead)
    assert failed.error.type == type and f"answer token {made + 1}" in failed.error.message
    assert (failed.choices, failed.usage, failed.stats) == ((), None, None)
    assert all(c.choices[0].token_ids == (9,) * 9 for c in good)


@pytest.mark.parametrize("ahead", [1, 3])
def test_a_bug_in_text_work_fails_its_request_alone(ahead: int):
    failed, good = neighbours(after((8,), 2, 13), request(1, (8,), max_tokens=9), ahead, broken_token=13)
    assert failed.error.type == "internal" and "LookupError" in failed.error.message
    assert "\n" not in failed.error.message, "one line"
    assert "Traceback" in failed.error.detail and "in push" in failed.error.detail
    assert all(c.choices[0].token_ids == (9,) * 9 for c in good)


def test_a_prompt_that_cannot_be_made_fails_its_request_alone():
    bad = Request(request_id=1, custom_id="b", prompt="no system turns here")
    failed, good = neighbours(after((8,), 9, 9), bad, 1)
    assert (failed.error.type, failed.error.message, failed.error.field) == (
        "template_error",
        "no system turns here",
        "prompt",
    )
    assert all(c.error is None for c in good)


@pytest.mark.parametrize("fault", ["failing_step", "failing_result"])
@pytest.mark.parametrize("ahead", [1, 3])
def test_what_the_backend_raises_leaves_step_and_fails_those_that_hold_a_slot(fault: str, ahead: int):
    engine, backend = make_engine(hashed(), limits(max_slots=2, max_in_flight=ahead))
    setattr(backend, fault, 4)
    for i in range(4):
        engine.add(request(i, (5 + i,), max_tokens=9, ignore_eos=True, min_tokens=2))
    engine.abort(0)
    with pytest.raises(DeviceError, match="device lost"):
        finish(engine)
    failed = engine.fail_running("the device is lost")
    assert [c.request_id for c in failed] == [1, 2], "the last one waits"
    assert {(c.choices, c.usage, c.stats, c.error) for c in failed} == {
        ((), None, None, Failure("internal", "the device is lost"))
    }
    engine.check()
    assert engine.fail_running("again") == []


def test_memory_that_runs_out_in_text_work_is_no_request_s_fault():
    engine, _ = make_engine(WORDS)

    def out_of_memory(*args: object) -> None:
        raise MemoryError

    engine._codec.answer = out_of_memory
    engine.add(request(0, (5,)))
    with pytest.raises(MemoryError):
        engine.step()


def test_a_request_id_is_not_used_twice_at_once():
    engine, _ = make_engine(WORDS)
    engine.add(request(0, (5,)))
    with pytest.raises(ValueError, match="request_id 0"):
        engine.add(request(0, (5,)))
    finish(engine)
    engine.add(request(0, (5,)))
    assert len(finish(engine)) == 4


# ---------------------------------------------------------------- the loop


def test_wants_more_feeds_the_queue_lazily():
    engine, _ = make_engine(hashed(), limits(max_slots=4))
    added = 0
    while engine.wants_more:
        engine.add(request(added, (5,), max_tokens=2, ignore_eos=True))
        added += 1
    assert added == 4
    engine.step()
    assert engine.wants_more, "all of them have a slot"


def test_a_step_takes_in_what_the_next_ones_need_and_some_more_while_the_backend_computes():
    """Of many that were added at once. Whoever cannot be answered is told as it is taken in."""
    taken = []
    engine, backend = make_engine(hashed(), limits(max_slots=4, admit_slots=2, max_in_flight=2))
    together = engine._codec.together
    engine._codec.together = lambda askings: taken.append((len(askings), len(backend.steps))) or together(askings)
    for i in range(30):
        engine.add(request(i, () if i == 3 else (5, i), max_tokens=2, ignore_eos=True))
    events = finish(engine)
    assert taken[:2] == [(2, 0), (TAKEN_IN_AHEAD, 1)], "requests, and steps that run meanwhile"
    assert sum(count for count, _ in taken) == 30
    told = [event.request_id for event in events if isinstance(event, Completion)]
    assert told[0] == 3 and sorted(told) == list(range(30))


def test_bad_requests_alone_do_not_read_a_whole_file_ahead():
    engine, _ = make_engine(hashed(), limits(max_slots=4))
    added = 0
    while engine.wants_more:
        engine.add(request(added, ()))
        added += 1
    assert added == 4
    assert len(engine.step()) == 4
    assert engine.idle


def test_an_aborted_request_is_never_told():
    engine, backend = make_engine(hashed(), limits(max_slots=1, max_in_flight=2))
    for i, prompt in enumerate([(5,), (6,), (), (8,)]):
        engine.add(request(i, prompt, max_tokens=6, ignore_eos=True))
    engine.abort(2)  # failed already, not told yet
    assert {e.request_id for e in engine.step()} == {0}
    assert not engine.idle and backend.in_flight
    engine.abort(0)  # running, one step in flight
    engine.abort(1)  # waiting
    engine.abort(99)  # unknown
    engine.check()
    assert {e.request_id for e in finish(engine)} == {3}


def test_a_request_that_was_only_added_is_under_way_until_it_is_aborted():
    engine, _ = make_engine(WORDS)
    engine.add(request(0, (5,)))
    assert not engine.idle
    with pytest.raises(ValueError, match="request_id 0"):
        engine.add(request(0, (5,)))
    engine.abort(0)
    assert engine.idle
    engine.add(request(0, (5,)))
    assert len(finish(engine)) == 4


def test_a_request_id_may_come_back_while_its_aborted_tokens_are_in_flight():
    engine, _ = make_engine(scripted(1, 30, 31, 32), limits(max_slots=2, max_in_flight=4))
    engine.add(request(0, (5,), max_tokens=3))
    engine.step()
    engine.abort(0)
    engine.add(request(0, (5,), max_tokens=3))
    assert finish(engine)[-1].choices[0].token_ids == (30, 31, 32)


def test_the_engine_waits_for_steps_whose_rows_were_all_dropped():
    engine, backend = make_engine(scripted(1, 30, 7), limits(max_in_flight=4))
    engine.add(request(0, (5,)))
    events = engine.step() + engine.step()
    assert isinstance(events[-1], Completion)
    assert not engine.idle, "steps enqueued ahead are still in flight"
    assert finish(engine) == []
    assert not backend.in_flight


def test_a_length_known_ahead_costs_no_step():
    engine, backend = make_engine(hashed(), limits(max_in_flight=4))
    engine.add(request(0, (5,), max_tokens=3, ignore_eos=True))
    finish(engine)
    assert len(backend.steps) == engine.stats.steps == 3


# ---------------------------------------------------------------- times


def test_stats_on_a_virtual_clock():
    engine, _ = make_engine(scripted(4, 9), limits(max_slots=1, max_batch_tokens=3))
    engine.add(request(0, (5,) * 4, max_tokens=3))  # two steps of prompt, two of decoding
    engine.add(request(1, (6,) * 4, max_tokens=1))
    first, second = (e.stats for e in finish(engine) if isinstance(e, Completion))
    assert first == Stats(queue_s=0, ttft_s=2, decode_s=2, e2e_s=4, tokens_per_s=3 / 4)
    assert second == Stats(queue_s=4, ttft_s=6, decode_s=0, e2e_s=6, tokens_per_s=1 / 2)


def test_a_request_arrives_once_it_is_tokenized():
    engine, backend = make_engine(scripted(1, 9))
    engine.add(request(0, (5,), max_tokens=1))
    backend.clock.now = 5
    assert finish(engine)[-1].stats == Stats(queue_s=0, ttft_s=1, decode_s=0, e2e_s=1, tokens_per_s=1)


def test_a_token_s_time_is_that_of_its_step_not_of_its_neighbours_text():
    engine, _ = make_engine(scripted(1, 9), push_s=10)
    for i in range(3):
        engine.add(request(i, (5,), max_tokens=1))
    assert [e.stats.e2e_s for e in finish(engine) if isinstance(e, Completion)] == [1, 1, 1]


def test_a_clock_too_coarse_to_see_a_request_gives_no_infinity():
    engine, backend = make_engine(scripted(1, 9))
    backend.step_s = 0
    engine.add(request(0, (5,), max_tokens=3))
    assert finish(engine)[-1].stats.tokens_per_s == 0


def test_counts():
    engine, _ = make_engine(scripted(2, 9), limits(max_slots=2, block_size=4))
    for i, max_tokens in enumerate((1, 3, 2)):
        engine.add(request(i, (5, 6), max_tokens=max_tokens))
    finish(engine)
    stats = engine.stats
    assert (stats.steps, stats.prompt_tokens, stats.completion_tokens, stats.peak_blocks) == (3, 6, 6, 2)
    assert stats.mean_slots_busy == 2


@pytest.mark.parametrize("text_s", [0.25, 1.0])
def test_steps_ahead_hide_the_text_work_behind_the_device(text_s: float):
    def seconds(ahead: int) -> float:
        engine, backend = make_engine(hashed(), limits(max_in_flight=ahead), push_s=text_s)
        engine.add(request(0, (5,), max_tokens=20, ignore_eos=True))
        finish(engine)
        return backend.clock.now

    assert seconds(1) == 20 * (1 + text_s)
    assert seconds(2) == 20 + text_s, "only the last token's text comes after the device"
