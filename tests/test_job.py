"""The loop of a run, over the real engine and a scripted backend: every line once, at once, in any company."""

import itertools
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from command import by_id, place_free, read_answers
from fake_backend import FakeBackend, FakeCodec, VirtualClock, hashed, limits
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs import BAD, GOOD, items, make_engine, make_job, run

from tinyvllm_cli.engine.engine import Engine
from tinyvllm_cli.errors import DeviceError, InputError
from tinyvllm_cli.io.feed import AHEAD, FileFeed, PipeFeed
from tinyvllm_cli.io.ordered import Order
from tinyvllm_cli.io.prompts import Defaults, Item, read_lines, read_requests
from tinyvllm_cli.io.record import RunRecord
from tinyvllm_cli.job import FILL_ITEMS, FILL_SIZE


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("job") / "out.jsonl"


@settings(max_examples=40)
@given(data=st.data(), slots=st.integers(1, 5))
def test_an_answer_is_the_same_in_any_order_and_company(out: Path, data: st.DataObject, slots: int):
    alone = {line["custom_id"]: place_free(run(out, [line])[0]) for line in GOOD + BAD}
    lines = data.draw(st.permutations(GOOD + BAD))
    garbage = data.draw(st.lists(st.sampled_from([b"{", b"[]", b"\xff", b"{}"]), max_size=4))
    answers = run(out, [*garbage, *lines], max_slots=slots)
    assert sorted(answer["index"] for answer in answers) == list(range(len(garbage) + len(lines)))
    found = by_id(answers)
    assert {name: place_free(found[name]) for name in alone} == alone


def test_no_tokens_wanted_is_an_answer_without_choices(out: Path):
    (answer,) = run(out, [{"prompt_token_ids": [9, 9], "max_tokens": 0}])
    assert (answer["choices"], answer["error"]) == ([], None)
    assert answer["usage"] == {"prompt_tokens": 2, "completion_tokens": 0}


def test_the_tally(out: Path):
    with out.open("wb") as file:
        ticks = itertools.count()  # no two readings are alike
        feed = FileFeed(items(GOOD + BAD))
        job = make_job(make_engine(), feed, file.fileno(), total=8, clock=lambda: float(next(ticks)))
        job.run()
    answers = read_answers(out)
    progress, summary = job.result(load_s=1.5, num_blocks=100)
    assert (summary.ok, summary.failed) == (5, 3)
    cut = [a for a in answers if a["choices"] and a["choices"][0]["finish_reason"] == "length"]
    assert summary.cut == len(cut) > 0
    used = [answer["usage"] for answer in answers if answer["usage"]]
    assert summary.completion_tokens == sum(usage["completion_tokens"] for usage in used) > 0
    assert summary.prompt_tokens == sum(usage["prompt_tokens"] for usage in used)
    e2e = sorted(a["stats"]["e2e_s"] for a in answers if a["stats"] and a["stats"]["ttft_s"] is not None)
    assert summary.e2e_p50_s == pytest.approx((e2e[1] + e2e[2]) / 2) and len(e2e) == 4
    assert (progress.done, progress.failed, progress.total, progress.seconds_left) == (8, 3, 8, 0)
    for name in ("prompt_tokens", "completion_tokens", "tokens_per_s"):
        assert getattr(progress, name) == getattr(summary, name), name


def test_an_input_is_read_no_further_ahead_than_the_engine_asks(out: Path):
    taken: list[int] = []
    lines = [{"prompt_token_ids": [9], "max_tokens": 50, "ignore_eos": True}] * 40

    def watched() -> Iterator[Item]:
        for item in items(lines):
            taken.append(item.request_id)
            yield item

    engine = make_engine(max_slots=2)
    steps: list[int] = []
    step = engine.step
    engine.step = lambda: steps.append(len(taken)) or step()  # type: ignore[method-assign]
    with out.open("wb") as file:
        make_job(engine, FileFeed(watched()), file.fileno()).run()
    assert len(read_answers(out)) == 40 and steps[0] <= 4


@pytest.mark.parametrize(
    ("line", "at_once"),
    [
        (b"{", FILL_ITEMS),
        (b'{"prompt_token_ids": [9, 9], "max_tokens": 0}', FILL_ITEMS),
        (b'{"prompt": "%s"}' % (b"x" * (FILL_SIZE // 2)), 3),
    ],
)
def test_answers_under_way_go_on_beside_bad_lines_and_long_prompts(out: Path, line: bytes, at_once: int):
    """Nothing is read between two steps but what a step could use."""
    taken, between = [0], []

    class Watched(FileFeed):
        def pull(self, wait_s: float) -> Item | None:
            taken[0] += 1
            return super().pull(wait_s)

    engine = make_engine(max_slots=300)
    step = engine.step

    def watched_step() -> Any:
        between.append(taken[0])
        taken[0] = 0
        return step()

    engine.step = watched_step  # type: ignore[method-assign]
    lines = [{"custom_id": "good", "prompt_token_ids": [9], "max_tokens": 4, "ignore_eos": True}, *[line] * 1200]
    with out.open("wb") as file:
        make_job(engine, Watched(items(lines)), file.fileno()).run()
    answers = read_answers(out)
    assert len(answers) == 1201 and max(between) == at_once
    assert [answer["custom_id"] for answer in answers].index("good") < 4 * at_once


def test_only_an_idle_engine_waits_for_a_line(out: Path):
    engine, waits = make_engine(max_slots=1), []

    class Watched(FileFeed):
        def pull(self, wait_s: float) -> Item | None:
            waits.append((engine.idle, wait_s > 0))
            return None if len(waits) % 2 else super().pull(wait_s)

    with out.open("wb") as file:
        make_job(engine, Watched(items(GOOD)), file.fileno()).run()
    assert len(read_answers(out)) == len(GOOD)
    assert set(waits) == {(True, True), (False, False)}


def test_a_slow_pipe_keeps_no_answer_back():
    """The second line is written only after the first one's answer has arrived."""
    in_read, in_write = os.pipe()
    out_read, out_write = os.pipe()
    feed = PipeFeed(read_requests(read_lines(os.fdopen(in_read, "rb")), Defaults()))
    job = make_job(make_engine(), feed, out_write)
    thread = threading.Thread(target=job.run, daemon=True)
    thread.start()
    with os.fdopen(out_read, "rb") as answers:
        for i in range(3):
            os.write(in_write, json.dumps({"custom_id": i, "prompt_token_ids": [9], "max_tokens": 3}).encode() + b"\n")
            assert json.loads(answers.readline())["custom_id"] == i
        os.close(in_write)
        thread.join(10)
        assert not thread.is_alive()
        os.close(out_write)
        assert answers.read() == b""


def test_a_pipe_gives_what_a_file_gives_and_a_fault_in_reading_is_not_lost(out: Path):
    lines = [{**line, "custom_id": f"{line['custom_id']}-{i}"} for i in range(AHEAD) for line in GOOD + BAD]
    wanted = by_id(run(out, lines))
    found = by_id(run(out, lines, PipeFeed(items(lines))))
    assert {name: place_free(found[name]) for name in wanted} == {n: place_free(a) for n, a in wanted.items()}

    def broken() -> Iterator[Item]:
        yield from items(GOOD)
        raise OSError(5, "Input/output error")

    with pytest.raises(OSError, match="Input/output error"):
        run(out, [], PipeFeed(broken()))


@pytest.mark.parametrize("order", [None, Order()])
def test_what_was_read_of_an_input_that_is_cut_has_its_answers(out: Path, order: Order | None):
    """The last one is much the longest, so that it has only begun when the end is found."""

    def cut() -> Iterator[Item]:
        yield from items(GOOD)
        raise InputError("in.jsonl was cut")

    with pytest.raises(InputError, match="was cut"):
        run(out, [], FileFeed(cut()), order)
    wanted = by_id(run(out.with_name("whole"), GOOD))
    found = by_id(read_answers(out))
    assert {name: place_free(found[name]) for name in found} == {n: place_free(a) for n, a in wanted.items()}


def test_internal_errors_are_recorded_and_the_run_goes_on(tmp_path: Path):
    clock = VirtualClock()
    engine = Engine(
        FakeBackend(limits(), hashed(), clock), FakeCodec(clock, broken_token=9), eos_token_ids=(2,), clock=clock
    )
    record = RunRecord(tmp_path / "r.json", {}, warn=print)
    lines = [
        {"custom_id": i, "prompt_token_ids": [30 + i], "logit_bias": {}, "max_tokens": 200, "temperature": 1}
        for i in range(6)
    ]
    with (tmp_path / "out").open("wb") as file:
        job = make_job(engine, FileFeed(items(lines)), file.fileno(), record=record)
        job.run()
    answers = read_answers(tmp_path / "out")
    assert len(answers) == 6
    bugs = [answer["error"] for answer in answers if answer["error"]]
    assert {error["type"] for error in bugs} == {"internal"} and job.tally.failed == len(bugs) > 0
    record.write("finished", {})
    assert "LookupError" in json.loads((tmp_path / "r.json").read_text())["tracebacks"][0]
    assert all("Traceback" not in error["message"] for error in bugs)


@pytest.mark.parametrize("fault", ["failing_step", "failing_result"])
@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize("at", [0, 1, 7])
def test_a_device_that_fails_costs_what_it_was_answering_and_nothing_else(
    tmp_path: Path, fault: str, ahead: int, at: int
):
    lines = [
        {"custom_id": i, "prompt_token_ids": [9 + i], "max_tokens": 2 + 3 * (i % 2), "ignore_eos": True}
        for i in range(9)
    ]
    lines[2] = b"{"  # wrong before the model is asked
    whole = by_id(run(tmp_path / "whole", lines))
    clock = VirtualClock()
    backend = FakeBackend(limits(max_slots=2, max_in_flight=ahead), hashed(), clock, **{fault: at})
    engine = Engine(backend, FakeCodec(clock), eos_token_ids=(2, 7), clock=clock)
    record = RunRecord(tmp_path / "r.json", {}, warn=print)
    with (tmp_path / "out").open("wb") as file:
        job = make_job(engine, FileFeed(items(lines)), file.fileno(), record=record)
        with pytest.raises(DeviceError, match="device lost"):
            job.run()
    found = by_id(read_answers(tmp_path / "out"))
    lost = {name: answer["error"] for name, answer in found.items() if answer["error"] and name != "line-3"}
    # Those of two slots, and whoever has drawn its last token but is not read yet.
    assert 0 < len(lost) <= 4 and (at == 7) == bool(found.keys() - lost.keys() - {"line-3"})
    for error in lost.values():
        assert (error["type"], error["message"]) == ("internal", "the GPU failed under way: device lost")
    assert all(place_free(found[name]) == place_free(whole[name]) for name in found.keys() - lost.keys())
    waiting = set(range(9)) - {2} - found.keys()
    assert max(lost) < min(waiting), "those that wait have no line"
    assert job.tally.done == len(found)
    record.write("failed", {})
    assert json.loads((tmp_path / "r.json").read_text())["tracebacks"] == []


def test_a_signal_waits_for_the_answers_of_a_step(out: Path):
    """What a step finished is written before the run ends."""

    class Signal(BaseException):
        pass

    came: list[bool] = []

    @contextmanager
    def hold() -> Iterator[None]:
        yield
        if came:
            raise Signal

    engine = make_engine()
    step, finished = engine.step, []

    def interrupted_step() -> list[Any]:
        events = step()
        done = [event for event in events if hasattr(event, "custom_id")]
        if done:
            came.append(True)
            finished.extend(done)
        return events

    engine.step = interrupted_step  # type: ignore[method-assign]
    lines = [{"custom_id": i, "prompt_token_ids": [9], "max_tokens": 3, "ignore_eos": True} for i in range(4)]
    lines[0] = {"custom_id": "long", "prompt_token_ids": [9], "max_tokens": 50, "ignore_eos": True}
    with out.open("wb") as file:
        job = make_job(engine, FileFeed(items(lines)), file.fileno(), hold=hold)
        with pytest.raises(Signal):
            job.run()
    progress, summary = job.result(load_s=0, num_blocks=2)
    assert job.progress().made_tokens > progress.made_tokens == summary.completion_tokens > 0
    assert [a["custom_id"] for a in read_answers(out)] == [done.custom_id for done in finished] != []
