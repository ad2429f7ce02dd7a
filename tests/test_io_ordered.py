"""Answers in the order of the input: whatever finishes first, few wait, none is lost, and nothing ever stands still."""

import json
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from command import by_id, place_free, read_answers, run_here, write_lines
from fake_backend import FakeBackend, FakeCodec, VirtualClock, hashed, limits
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs import BAD, GOOD, items, make_engine, make_job, run
from outputs import by_index

from tinyvllm_cli.engine.engine import Engine
from tinyvllm_cli.errors import DeviceError
from tinyvllm_cli.io import ordered
from tinyvllm_cli.io.feed import FileFeed
from tinyvllm_cli.io.ordered import Order
from tinyvllm_cli.types import Completion

# ---------------------------------------------------------------- the order alone


@given(st.data(), st.integers(1, 5))
def test_they_leave_as_they_came_and_few_wait(data: st.DataObject, most: int):
    """Requests join while there is room, and finish in any order."""
    order, unfinished, left, held, joined = Order(), [], [], set(), 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ordered, "MOST", most)
        while joined < 12 or unfinished:
            assert order.full is (joined - len(left) == most)
            if joined < 12 and not order.full and (not unfinished or data.draw(st.booleans())):
                order.join(joined)
                unfinished.append(joined)
                joined += 1
                continue
            done = unfinished.pop(data.draw(st.integers(0, len(unfinished) - 1)))
            held.add(done)
            leaving = [c.request_id for c in order.finish(Completion(request_id=done, custom_id=done))]
            left += leaving
            held -= set(leaving)
            assert len(held) < most, "what is waited for is not held"
            assert [completion.request_id for completion in order.rest()] == sorted(held)
            assert held.isdisjoint(range(min(unfinished, default=joined)))
    assert left == list(range(12))


def test_what_has_left_is_forgotten_at_once():
    """A line that cannot be written must not be written again."""
    order = Order()
    for i in range(3):
        order.join(i)
    assert not list(order.finish(Completion(request_id=1, custom_id=1)))
    leaving = order.finish(Completion(request_id=0, custom_id=0))
    assert next(leaving).request_id == 0
    assert [completion.request_id for completion in order.rest()] == [1]


# ---------------------------------------------------------------- a run


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ordered") / "out.jsonl"


def within(seconds: float, work: Callable[[], Any]) -> Any:
    """What it gives; a failure where it stands still."""
    found: deque[Any] = deque()
    thread = threading.Thread(target=lambda: found.append(work()), daemon=True)
    thread.start()
    thread.join(seconds)
    assert found, "it stands still, or has failed"
    return found[0]


LINES = [
    *GOOD,
    *BAD,
    b"{",
    {"custom_id": "two", "prompt_token_ids": [5, 6, 7], "n": 3, "temperature": 1, "max_tokens": 20},
]


@settings(max_examples=60)
@given(
    order=st.permutations(LINES),
    most=st.integers(1, 6),
    slots=st.integers(1, 6),
    ahead=st.integers(1, 2),
    small=st.booleans(),
)
def test_every_line_in_order_whatever_is_slow(
    out: Path, order: list[Any], most: int, slots: int, ahead: int, small: bool
):
    """More slots than may wait, requests that fail at once, and memory for one long sequence: others are preempted."""
    sizes = {"max_slots": slots, "max_in_flight": ahead} | ({"num_blocks": 17} if small else {})
    wanted = by_id([place_free(answer) for answer in run(out, order, **sizes)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ordered, "MOST", most)
        answers = within(20, lambda: run(out, order, order=Order(), **sizes))
    assert [answer["index"] for answer in answers] == list(range(len(order)))
    assert by_id([place_free(answer) for answer in answers]) == wanted


def test_a_slow_request_holds_back_no_more_than_may_wait(out: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ordered, "MOST", 7)
    lines: list[Any] = [{"prompt_token_ids": [9], "max_tokens": 50, "ignore_eos": True}]
    lines += [{"prompt_token_ids": [9], "max_tokens": 1}] * 30
    taken: list[int] = []
    engine = make_engine(max_slots=4)

    def feed() -> Iterator[Any]:
        for item in items(lines):
            taken.append(item.request_id)
            yield item

    most = []
    step = engine.step

    def watched_step() -> Any:
        if not out.stat().st_size:
            most.append(len(taken))
        return step()

    engine.step = watched_step  # type: ignore[method-assign]
    with out.open("wb") as file:
        make_job(engine, FileFeed(feed()), file.fileno(), order=Order()).run()
    assert max(most) == 7 and len(read_answers(out)) == 31


@pytest.mark.parametrize("text", [False, True])
@pytest.mark.parametrize("fault", ["signal", "device"])
@pytest.mark.parametrize("at", range(9, 15))
def test_what_was_finished_when_a_run_ends_early_is_written_in_order(out: Path, fault: str, text: bool, at: int):
    """A line of text, which says not whom it answers, never stands in the place of another."""

    class Signal(BaseException):
        pass

    count = [0]

    @contextmanager
    def hold() -> Iterator[None]:
        count[0] += 1
        yield
        if fault == "signal" and count[0] == at + 10:
            raise Signal

    clock = VirtualClock()
    breaks = {"failing_step": at} if fault == "device" else {}
    backend = FakeBackend(limits(max_slots=3), hashed(), clock, **breaks)
    engine = Engine(backend, FakeCodec(clock), eos_token_ids=(2, 7), clock=clock)
    lines: list[Any] = [
        {"custom_id": i, "prompt_token_ids": [9], "max_tokens": 60 if i in {2, 5} else 2, "ignore_eos": True}
        for i in range(20)
    ]
    lines[3::4] = [b"{"] * 5  # some of them behind requests that wait
    finished, step = set(), engine.step

    def feed() -> Iterator[Any]:
        for item in items(lines):
            if isinstance(item, Completion):
                finished.add(item.request_id)
            yield item

    def watched_step() -> Any:
        events = step()
        finished.update(event.custom_id for event in events if isinstance(event, Completion))
        return events

    engine.step = watched_step  # type: ignore[method-assign]
    with out.open("wb") as file:
        job = make_job(engine, FileFeed(feed()), file.fileno(), hold=hold, order=Order(), tell_failures=text)
        with pytest.raises(Signal if fault == "signal" else DeviceError):
            job.run()
        if fault == "signal":
            job.write_rest()
    answers = read_answers(out)
    found = [answer["index"] for answer in answers]
    assert found == sorted(set(found)) and len(finished) > 3 and job.tally.done == len(found)
    if text:
        assert found == list(range(len(found))) != []
    else:
        lost = {answer["index"] for answer in answers if answer["error"] and "GPU" in answer["error"]["message"]}
        assert set(found) - lost == finished


# ---------------------------------------------------------------- the command


@pytest.mark.usefixtures("own_cache")
def test_text_is_one_line_a_request_and_what_failed_is_told(
    tiny: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    lines: list[Any] = [{"prompt": f"Number {i}", "max_tokens": 1 + 7 * i % 11, "ignore_eos": True} for i in range(12)]
    lines[3], lines[8] = {"prompt": 1}, {"prompt": "x" * 5000}
    source, out, text = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl", tmp_path / "out.txt"
    assert run_here("run", source, "-m", tiny, "-o", out, "--slots", "5", "--ordered") == 3
    capfd.readouterr()
    assert run_here("run", source, "-m", tiny, "-o", text, "--slots", "5", "--format", "text") == 3
    said = capfd.readouterr().err
    answers = read_answers(out)
    assert [answer["index"] for answer in answers] == list(range(12))
    shown = text.read_text().split("\n")
    assert shown.pop() == "" and len(shown) == 12
    for answer, line in zip(answers, shown, strict=True):
        if answer["error"]:
            assert line == "" and f"line {answer['index'] + 1}: {answer['error']['type']}: " in said
        else:
            wanted = answer["choices"][0]["text"]
            assert json.loads('"' + line.replace('"', r"\"") + '"', strict=False) == wanted
    assert said.count(": invalid_value: ") == said.count(": prompt_too_long: ") == 1


@pytest.mark.usefixtures("own_cache")
def test_a_run_that_is_stopped_keeps_what_waited_for_its_turn(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    class Stop(BaseException):
        pass

    lines = [{"prompt": f"{i}", "max_tokens": 2 if i % 4 else 200, "ignore_eos": True} for i in range(9)]
    source, out, whole = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    command = ["run", source, "-m", tiny, "--slots", "3", "--ordered", "-q"]
    assert run_here(*command, "-o", whole) == 0
    step, finished = Engine.step, []

    def watched_step(self: Engine) -> Any:
        if len(finished) == 3:
            raise Stop
        events = step(self)
        finished.extend(event.request_id for event in events if isinstance(event, Completion))
        return events

    monkeypatch.setattr(Engine, "step", watched_step)
    with pytest.raises(Stop):
        run_here(*command, "-o", out)
    monkeypatch.undo()
    assert [answer["index"] for answer in read_answers(out)] == sorted(finished) == [1, 2, 3]
    assert run_here(*command, "-o", out, "--resume") == 0
    assert [answer["index"] for answer in read_answers(out)] == [1, 2, 3, 0, 4, 5, 6, 7, 8]
    assert by_index(out) == by_index(whole)
