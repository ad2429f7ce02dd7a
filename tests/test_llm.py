"""LLM on tiny models: its answers are those of the command, whatever else is asked for, and however that ends."""

import gc
import json
import multiprocessing
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields, replace
from inspect import signature
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import by_id, read_answers, run_here, write_lines
from tiny import CHAT_TEMPLATE, byte_ids, make_tiny_model

from tinyvllm_cli import LLM, Completion, Request, RequestError, SamplingParams, TinyvllmError, UsageError, types
from tinyvllm_cli.backends.cpu.backend import CpuBackend
from tinyvllm_cli.errors import DeviceError
from tinyvllm_cli.io.constraints import read_params
from tinyvllm_cli.io.fields import ANSWER_FIELDS, FIELDS, OTHER_NAMES, read_field

pytestmark = pytest.mark.usefixtures("own_cache")

HOT = SamplingParams(temperature=1.0, max_tokens=12, seed=3, ignore_eos=True)
SHORT = SamplingParams(max_tokens=6, ignore_eos=True)
PROMPTS = ["one", "two and more", "three", "", "five " * 30, "six", "seven"]
DATA = Path(__file__).parent / "data"
CONVERSATIONS: list[Any] = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be short."}, {"role": "user", "content": [{"type": "text", "text": "And?"}]}],
    "Just a text",
]


class Frame(list[str]):
    """As one of pandas, with the names of its columns."""

    ndim = 2
    columns = ("a",)

    def keys(self) -> tuple[str, ...]:
        return self.columns


class Column(list[Any]):
    """As a Series of pandas: its keys are those of the rows, and to go through it gives the values."""

    ndim = 1

    def keys(self) -> range:
        return range(len(self))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "chat", chat_template=CHAT_TEMPLATE)


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(model, slots=3, max_model_len=256) as llm:
        yield llm


def told(completions: list[Completion]) -> list[Any]:
    """All but the times."""
    return [(c.request_id, c.custom_id, c.choices, c.scores, c.usage, c.error) for c in completions]


def test_answers_are_those_of_the_command(llm: LLM, model: Path, tmp_path: Path):
    fields = {"temperature": 1.0, "max_tokens": 12, "seed": 3, "ignore_eos": True}
    prompts = [*({"prompt": p, "raw": True} for p in (*PROMPTS, "x" * 300)), {"prompt_token_ids": byte_ids("abc")}]
    chats = [*({"messages": c} for c in CONVERSATIONS[:2]), {"prompt": CONVERSATIONS[2]}]
    lines = [{"custom_id": i, **line, **fields} for i, line in enumerate([*prompts, *chats])]
    source = write_lines(tmp_path / "in.jsonl", lines)
    assert run_here("run", source, "-m", model, "-o", tmp_path / "out.jsonl", "--max-model-len", 256) == 3
    wanted = by_id(read_answers(tmp_path / "out.jsonl"))
    answers = [*llm.generate([*PROMPTS, "x" * 300, byte_ids("abc")], HOT), *llm.chat(CONVERSATIONS, HOT)]
    for i, answer in enumerate(answers):
        same = wanted[i]
        assert [choice.text for choice in answer.choices] == [choice["text"] for choice in same["choices"]]
        assert (answer.usage and asdict(answer.usage)) == same["usage"]
        assert (answer.error and answer.error.message) == (same["error"] and same["error"]["message"])
        assert same["fingerprint"] and answer.fingerprint is None, "which is for --resume alone"


def test_a_request_without_seed_gets_that_of_its_id_or_of_its_prompt(llm: LLM, model: Path, tmp_path: Path):
    params = replace(HOT, seed=None)
    source = write_lines(
        tmp_path / "in.jsonl",
        [{"custom_id": "own", "prompt": "x", "raw": True}, {"prompt": "x", "raw": True}],
    )
    options = ("--temperature", 1.0, "--max-tokens", 12, "--set", "ignore_eos=true")
    assert run_here("run", source, "-m", model, "-o", tmp_path / "out.jsonl", *options) == 0
    wanted = by_id(read_answers(tmp_path / "out.jsonl"))
    own, none, again = llm.generate([Request(prompt="x", custom_id="own"), "x", "x"], params)
    assert own.choices[0].text == wanted["own"]["choices"][0]["text"] != none.choices[0].text
    assert none.choices[0].text == wanted["line-2"]["choices"][0]["text"] == again.choices[0].text


def test_an_iterator_gives_what_a_list_gives_and_is_asked_as_slots_get_free(llm: LLM):
    listed = llm.generate(PROMPTS * 20, SHORT)
    assert [answer.request_id for answer in listed] == list(range(len(PROMPTS) * 20))
    asked = 0

    def prompts() -> Iterator[str]:
        nonlocal asked
        for prompt in PROMPTS * 20:
            asked += 1
            yield prompt

    answers, most_ahead = [], 0
    for answer in llm.generate(prompts(), SHORT):
        answers.append(answer)
        most_ahead = max(most_ahead, asked - len(answers))
    assert most_ahead <= 3 * 3
    assert told(sorted(answers, key=lambda answer: answer.request_id)) == told(listed)


def test_other_things_with_a_length_are_lists(llm: LLM):
    wanted = told(llm.generate(["a", "b"], SHORT))
    for prompts in (("a", "b"), np.array(["a", "b"]), Column(["a", "b"]), dict.fromkeys("ab").keys()):
        assert told(llm.generate(prompts, SHORT)) == wanted  # type: ignore[call-overload]
    assert told(llm.chat(Column(CONVERSATIONS), SHORT)) == told(llm.chat(CONVERSATIONS, SHORT))
    assert told(llm.score(Column(["a", "b"]))) == told(llm.score(["a", "b"]))
    ids = np.array([byte_ids("ab"), byte_ids("cd")])
    assert told(llm.generate(list(ids), SHORT)) == told(llm.generate(ids.tolist(), SHORT))


def test_what_is_under_way_at_once_does_not_change_an_answer(llm: LLM):
    alone = [told(llm.generate(PROMPTS, HOT)), told(llm.chat(CONVERSATIONS, HOT)), told(llm.score(PROMPTS[:3]))]
    [streamed] = llm.generate(["stream me"], HOT)
    first, second = llm.generate(iter(PROMPTS), HOT), llm.chat(iter(CONVERSATIONS), HOT)
    stream = llm.stream("stream me", HOT)
    got, pieces = [[next(first)], [next(second)]], [next(stream).text]
    scores = llm.score(PROMPTS[:3])  # which lets the others come to their ends first
    got[0] += first
    got[1] += second
    pieces += [delta.text for delta in stream]
    for mine, wanted in zip([*got, scores], alone, strict=True):
        assert told(sorted(mine, key=lambda answer: answer.request_id)) == wanted
    assert "".join(pieces) == streamed.choices[0].text
    assert stream.completion is not None and told([stream.completion]) == told([streamed])
    assert told(llm.generate(PROMPTS, HOT)) == alone[0]


def test_threads_share_a_model(llm: LLM):
    wanted = told(llm.generate(PROMPTS, HOT))
    found: list[list[Any]] = []
    threads = [threading.Thread(target=lambda: found.append(told(llm.generate(PROMPTS, HOT)))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [wanted] * 4


class Sized:
    """What has a length and can be gone through once, as a bar of progress around a generator."""

    def __init__(self, items: list[str]) -> None:
        self.items = iter(items)
        self.count = len(items)

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[str]:
        yield from self.items


def test_what_can_be_gone_through_once_is_not_looked_at_before(llm: LLM):
    assert told(llm.generate(Sized(PROMPTS), SHORT)) == told(llm.generate(PROMPTS, SHORT))  # type: ignore[call-overload]


def test_items_that_ask_the_model_themselves(llm: LLM):
    def ids() -> Iterator[int]:
        llm.score(["z"])
        yield from byte_ids("one")

    wanted = told(llm.generate([byte_ids("one")], SHORT))
    assert told(llm.generate([ids()], SHORT)) == wanted  # type: ignore[list-item]


def test_a_slow_iterator_holds_no_answer_up(llm: LLM):
    told_before: list[int] = []

    def slow() -> Iterator[str]:
        for number in range(4):
            told_before.append(len(answers))
            time.sleep(0.1)
            yield f"{number}"

    answers: list[Completion] = []
    for answer in llm.generate(slow(), SHORT):
        answers.append(answer)
    assert len(answers) == 4 and sum(told_before) > 0


def test_another_process_is_told_to_make_its_own(llm: LLM):
    with multiprocessing.get_context("fork").Pool(1) as pool:
        said = pool.apply_async(what_it_says, (id(llm),)).get(30)
    assert said == "UsageError: this LLM was made in another process: make one in this process"
    assert told(llm.generate(["x"], SHORT))[0][2]


def what_it_says(of: int) -> str:
    [llm] = [each for each in gc.get_objects() if id(each) == of]
    try:
        llm.generate(["x"])
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_what_is_no_prompt_is_an_error_in_its_place(llm: LLM):
    wrong: list[Any] = [
        None,
        5.0,
        b"bytes",
        {"prompt": "x"},
        Request(),
        Request(prompt="x", prompt_token_ids=[1]),
        Request(messages=[{"role": "tool", "content": "x"}], custom_id="mine"),
        Request(prompt="x", params={"max_tokens": 1}),  # type: ignore[arg-type]
        "half \ud800",
        [1, 10**9],
        [1.5],
        "x" * 300,
    ]
    good = told(llm.generate(["a", "b"], SHORT))
    answers = llm.generate(["a", *wrong, "b"], SHORT)
    assert [bool(answer.error) for answer in answers] == [False, *[True] * len(wrong), False]
    assert told([answers[0], replace(answers[-1], request_id=1, custom_id=1)]) == good
    types_ = [answer.error.type for answer in answers if answer.error]
    assert types_ == [*["invalid_value"] * 6, "unsupported", "invalid_value", "invalid_encoding",
                      "invalid_token_id", "invalid_value", "prompt_too_long"]  # fmt: skip
    assert answers[7].custom_id == "mine" and all(a.error.detail is None for a in answers if a.error)
    for bad in (None, 5, ([1], ["text"]), ("text", [[1]]), ("a", "b"), ("a", []), ("a", [""]), {"text": "x"}, [10**9]):
        _, score = llm.score(["good", bad])  # type: ignore[call-overload]
        assert score.error is not None and score.error.type in {"invalid_value", "invalid_token_id"}, bad


@pytest.mark.parametrize(
    ("method", "one"),
    [
        *[("generate", one) for one in ("text", b"x", [1, 2], np.array([1, 2]), {"prompt": "x"}, Request(prompt="x"))],
        *[("chat", one) for one in ("text", [{"role": "user", "content": "x"}], {"role": "user"})],
        *[("score", one) for one in ("text", [1, 2], 5, None, ("before", [" one", " two"]))],
        *[(method, Frame(["a"])) for method in ("generate", "chat", "score")],
        *[(method, Column([{"role": "user", "content": "x"}])) for method in ("chat",)],
        *[("generate", one) for one in (bytearray(b"x"), memoryview(b"x"))],
    ],
)
def test_one_in_the_place_of_a_list_is_refused(llm: LLM, method: str, one: object):
    with pytest.raises(TypeError, match=r"wanted a list or an iterator"):
        getattr(llm, method)(one)


def test_params_of_another_kind_are_refused(llm: LLM):
    with pytest.raises(TypeError, match="params is a dict, wanted SamplingParams"):
        llm.generate(["x"], {"max_tokens": 3})  # type: ignore[call-overload]


def test_a_stream_is_its_answer_in_pieces(llm: LLM):
    for params in (HOT, replace(HOT, n=3), replace(SHORT, max_tokens=0), replace(HOT, constraint=None, logprobs=1)):
        [answer] = llm.generate(["stream"], params)
        with llm.stream("stream", params) as stream:
            deltas = list(stream)
        assert stream.completion is not None and told([stream.completion]) == told([answer])
        for choice in answer.choices:
            mine = [delta for delta in deltas if delta.index == choice.index]
            assert "".join(delta.text for delta in mine) == choice.text
            assert sum((delta.token_ids for delta in mine), ()) == choice.token_ids


def test_a_stream_without_an_answer_raises_why(llm: LLM):
    stream = llm.stream("x" * 300)
    with pytest.raises(RequestError, match="found 301 tokens, wanted at most 255"):
        next(stream)
    assert stream.completion is not None and stream.completion.error is not None
    assert list(stream) == []


def test_what_is_dropped_leaves_nothing_behind(llm: LLM):
    wanted = told(llm.generate(PROMPTS, HOT))
    long = replace(HOT, max_tokens=200)
    stream = llm.stream("x", long)
    next(stream)
    stream.close()
    assert list(stream) == []
    answers = llm.generate(iter(PROMPTS * 3), long)
    next(answers)
    del answers, stream
    scores = llm.score(iter(PROMPTS * 3))
    next(scores)
    del scores
    gc.collect()
    assert told(llm.generate(PROMPTS, HOT)) == wanted
    assert not llm._calls._owners and llm._calls._engine.idle
    llm._calls._engine.check()


def test_an_iterator_that_fails_is_the_callers_and_the_rest_goes_on(llm: LLM):
    def prompts() -> Iterator[str]:
        yield "one"
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        list(llm.generate(prompts(), SHORT))
    assert told(llm.generate(["one"], SHORT))[0][2]


def in_step(monkeypatch: pytest.MonkeyPatch, number: int, act: Callable[[], None]) -> None:
    """Let something happen in the `number`th step from now, counted from 1."""
    step, count = CpuBackend.step, 0

    def stepped(self: CpuBackend, batch: types.Batch) -> Any:
        nonlocal count
        count += 1
        if count == number:
            act()
        return step(self, batch)

    monkeypatch.setattr(CpuBackend, "step", stepped)


class Deadline(BaseException):
    """What a handler of the caller's raises."""


@pytest.mark.parametrize("handler", ["^C", "a deadline"])
@pytest.mark.parametrize("step", [1, 2, 7, 15])
def test_what_a_signal_raises_ends_a_call_and_not_the_model(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, handler: str, step: int
):
    def late(*_: object) -> None:
        raise Deadline

    wanted = told(llm.generate(PROMPTS, HOT))
    kind, raised = (signal.SIGINT, KeyboardInterrupt) if handler == "^C" else (signal.SIGUSR1, Deadline)
    before = signal.signal(kind, signal.default_int_handler if handler == "^C" else late)
    try:
        with monkeypatch.context() as patch:
            in_step(patch, step, lambda: os.kill(os.getpid(), kind))
            with pytest.raises(raised):
                llm.generate(PROMPTS, HOT)
    finally:
        signal.signal(kind, before)
    assert told(llm.generate(PROMPTS, HOT)) == wanted
    llm._calls._engine.check()


def said_by(script: str, model: Path) -> str:
    """What a process says that runs this on a model M; it has to end."""
    begin = "import atexit, random, signal, threading, time\nfrom tinyvllm_cli import LLM, SamplingParams\n"
    code = f"{begin}M = LLM({str(model)!r}, slots=2)\nP = SamplingParams(max_tokens=2, ignore_eos=True)\n{script}"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def test_interrupts_at_any_moment_leave_a_sound_model(model: Path):
    script = """
class Stop(BaseException): pass
def stop(*_): raise Stop
signal.signal(signal.SIGALRM, stop)
wanted = [a.text for a in M.generate(["one", "two"], P)]
interrupted = 0
for _ in range(1500):
    try:
        signal.setitimer(signal.ITIMER_REAL, random.uniform(5e-6, 7e-4))
        M.generate(["one"], P)
        signal.setitimer(signal.ITIMER_REAL, 0)
    except Stop:
        interrupted += 1
signal.setitimer(signal.ITIMER_REAL, 0)
assert [a.text for a in M.generate(["one", "two"], P)] == wanted and not M._calls._owners
M._calls._engine.check()
print(interrupted > 100)
M.close()
"""
    assert said_by(script, model) == "True"


def test_a_handler_may_ask_and_close(model: Path):
    script = """
said = []
def ask(*_): said.append(M.generate(["one"], P)[0].text)
signal.signal(signal.SIGALRM, ask)
wanted = M.generate(["one"], P)[0].text
for _ in range(100):
    signal.setitimer(signal.ITIMER_REAL, random.uniform(5e-6, 2e-3))
    assert M.generate(["one"], P)[0].text == wanted
    signal.setitimer(signal.ITIMER_REAL, 0)
assert set(said) == {wanted}
signal.signal(signal.SIGALRM, lambda *_: M.close())
signal.setitimer(signal.ITIMER_REAL, 1e-2)
try:
    while True: M.generate(["one"], P)
except ValueError as error:
    print(error)
"""
    assert said_by(script, model) == "this LLM is closed: make another one"


def test_a_model_is_there_until_its_process_ends(model: Path):
    script = """
def late():
    time.sleep(0.3)
    print([answer.text for answer in M.generate(["one", "two"] * 3, P)] == wanted * 3)
wanted = [answer.text for answer in M.generate(["one", "two"], P)]
atexit.register(M.close)
atexit.register(lambda: print([answer.text for answer in M.generate(["one", "two"] * 5, P)] == wanted * 5))
threading.Thread(target=late).start()
"""
    assert said_by(script, model) == "True\nTrue"


@pytest.mark.parametrize("error", [DeviceError("it fell off the bus"), RuntimeError("a bug")])
def test_a_device_that_fails_loses_no_answer(model: Path, monkeypatch: pytest.MonkeyPatch, error: Exception):
    def fail() -> None:
        raise error

    prompts, raised = PROMPTS * 9, DeviceError if isinstance(error, DeviceError) else TinyvllmError
    with LLM(model, slots=2, backend="cpu") as llm:
        wanted = told(llm.generate(prompts, SHORT))
        in_step(monkeypatch, 40, fail)
        answers = llm.generate(prompts, SHORT)
        failed = [answer for answer in answers if answer.error and answer.error.type == "internal"]
        assert 0 < len(failed) < len(prompts) - 1 and all(str(error) in str(answer.error) for answer in failed)
        assert [a for a in told(answers) if not a[5]] == [
            w for w, a in zip(wanted, answers, strict=True) if not a.error
        ]
        depths = []
        for _ in range(3):
            with pytest.raises(raised, match=f"{error}; make another LLM") as caught:
                llm.generate(["x"])
            depths.append(len(traceback.extract_tb(caught.value.__traceback__)))
        assert len(set(depths)) == 1, "it is a new one each time"


def test_an_iterator_of_a_device_that_fails_tells_what_it_can_and_then_why(
    model: Path, monkeypatch: pytest.MonkeyPatch
):
    def fail() -> None:
        raise DeviceError("it fell off the bus")

    answers: list[Completion] = []
    with LLM(model, slots=2, backend="cpu") as llm:
        in_step(monkeypatch, 40, fail)
        with pytest.raises(DeviceError, match="fell off the bus"):
            answers.extend(llm.generate(iter(PROMPTS * 9), SHORT))  # what comes before the error is taken
    assert any(answer.error is None for answer in answers) and answers[-1].error is not None


def test_two_models_one_after_the_other_give_the_memory_back(model: Path):
    def opened() -> tuple[LLM, list[weakref.ref[Any]]]:
        llm = LLM(model, slots=2)
        llm.generate(["x"], SHORT)
        llm.score(["x"])
        backend = llm._loaded.backend
        return llm, [weakref.ref(backend), weakref.ref(llm._calls._engine)]

    llm, held = opened()
    other, held_too = opened()
    llm.close()
    llm.close()
    assert told(other.generate(["x"], SHORT))[0][2]
    del llm, other  # the second was never closed
    gc.collect()
    assert [ref() for ref in (*held, *held_too)] == [None] * 4


def test_an_iterator_keeps_its_model(model: Path):
    def answers() -> Iterator[Completion]:
        return LLM(model, slots=2).generate(iter(PROMPTS), SHORT)

    running, stream = answers(), LLM(model, slots=2).stream("x", SHORT)
    gc.collect()
    assert len(list(running)) == len(PROMPTS)
    text = "".join(delta.text for delta in stream)
    assert stream.completion is not None and text == stream.completion.text


def test_a_closed_model_says_so(model: Path):
    llm = LLM(model, slots=2)
    running, stream = llm.generate(iter(PROMPTS * 9), SHORT), llm.stream("x", HOT)
    next(running)
    next(stream)
    llm.close()
    assert repr(llm).endswith(", closed)")
    for ask in (lambda: llm.generate(["x"]), lambda: list(running), lambda: list(stream), lambda: llm.score(["x"])):
        with pytest.raises(UsageError, match="this LLM is closed"):
            ask()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"backend": "cuda"}, "backend is 'cuda', wanted one of auto, gpu, cpu"),
        ({"dtype": "fp16"}, "dtype is 'fp16', wanted one of auto, float32"),
        ({"kv_dtype": "int8"}, "kv_dtype is 'int8', wanted one of auto, fp8"),
        ({"slots": 0}, "slots is 0, wanted an integer from 1 to"),
        ({"slots": "4"}, "slots is '4', wanted an integer"),
        ({"threads": 1.5}, "threads is 1.5, wanted an integer"),
        ({"gpu_memory": "lots"}, "found 'lots', wanted a share"),
        ({"gpu_memory": None}, "gpu_memory is None, wanted a share"),
        ({"seed": -1}, "seed is -1, wanted an integer from 0"),
        ({"seed": "5"}, 'seed is "5", wanted an integer from 0'),
        ({"slots": True}, "slots is True, wanted an integer"),
        ({"gpu_memory": True}, "gpu_memory is True, wanted a share"),
        ({"prefix_cache": "no"}, "prefix_cache is 'no', wanted one of True, False"),
        ({"system": 5}, r"system is 5 \(int\), wanted a text"),
        ({"system": "half \ud800"}, "system holds half of a surrogate pair"),
        ({"model": b"x"}, "model is b'x', wanted a text or a path"),
    ],
)
def test_arguments_that_cannot_be(model: Path, arguments: dict[str, Any], words: str):
    with pytest.raises(ValueError, match=words):
        LLM(**{"model": model} | arguments)


def test_scores_of_ids_are_those_of_their_texts(llm: LLM):
    bos = [1]
    texts, ids = ["a text", ("before", [" one", " two"])], [bos + byte_ids("a text")]
    pair = (bos + byte_ids("before"), [byte_ids(" one"), byte_ids(" two")])
    assert [answer.scores for answer in llm.score(texts)] == [answer.scores for answer in llm.score([*ids, pair])]  # type: ignore[call-overload]


def test_ids_behind_a_context_may_be_one_more_than_the_model_holds(llm: LLM):
    """The last one is told about and never fed; it has the score that it has behind less."""
    ids = byte_ids("ab" * 200)
    full, longer = llm.score([(ids[:200], [ids[200 : 200 + count]]) for count in (56, 57)])
    assert full.error is None and longer.error is None
    assert longer.scores[0].token_logprobs[:56] == pytest.approx(full.scores[0].token_logprobs, abs=1e-4)
    [too_long] = llm.score([(ids[:200], [ids[200:258]])])
    assert too_long.error is not None and too_long.error.type == "prompt_too_long"


# ---------------------------------------------------------------- SamplingParams


BAD_VALUES: list[tuple[str, Any]] = [
    ("max_tokens", -1), ("max_tokens", 1.5), ("temperature", "0.7"), ("temperature", -0.1), ("top_p", 0), ("top_k", -1),
    ("min_p", 2), ("n", 0), ("seed", 2**64), ("stop", [""]), ("stop_token_ids", ["x"]), ("ignore_eos", 1),
    ("presence_penalty", 3), ("repetition_penalty", 0), ("logit_bias", {"1": 101}), ("logprobs", 21), ("choice", "x"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), BAD_VALUES)
def test_a_value_out_of_range_is_refused_in_the_words_of_a_line(name: str, value: Any):
    with pytest.raises(UsageError) as refused:
        SamplingParams(**{name: value})
    with pytest.raises(RequestError) as of_a_line:
        read_params({name: read_field(name, json.dumps(value).encode())})
    assert str(refused.value) == of_a_line.value.message


WRONG_FORMS: list[dict[str, Any]] = [
    {"regex": "("}, {"regex": "a\\"}, {"regex": "a$b"}, {"grammar": "start: thing"}, {"grammar": 'start: "a'},
    {"grammar": 'start: %json {"uniqueItems": true}'}, {"json_schema": {"type": "text"}},
    {"json_schema": {"type": "string", "pattern": "(a"}}, {"json_schema": False},
    {"json_schema": {"oneOf": [{"minimum": 1}, {"maximum": 2}]}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}},
]  # fmt: skip


@pytest.mark.parametrize("form", WRONG_FORMS)
def test_a_wrong_form_is_refused_at_once_in_the_words_that_an_answer_would_have(llm: LLM, form: dict[str, Any]):
    with pytest.raises(UsageError) as refused:
        SamplingParams(**form)
    unchecked = SamplingParams(constraint=read_params(form)["constraint"])
    [answer] = llm.generate(["x"], unchecked)
    assert answer.error is not None and answer.error.type == "invalid_schema"
    assert str(refused.value) == answer.error.message


@pytest.mark.parametrize("path", sorted((DATA / "schemas").glob("*.json")), ids=lambda path: path.stem)
def test_a_schema_that_has_answers_is_taken(path: Path):
    schema = json.loads(path.read_text("utf-8"))
    assert SamplingParams(json_schema=schema) == SamplingParams(
        constraint=read_params({"json_schema": schema})["constraint"]
    )


@pytest.mark.parametrize("kind", [LLM, Request, SamplingParams])
def test_an_argument_with_one_letter_less_is_told_its_name(kind: type):
    names = signature(kind).parameters
    assert names
    for name in names:
        if len(name) > 5 and name[:-1] not in OTHER_NAMES:
            with pytest.raises(
                TypeError, match=rf"^{kind.__name__} has no argument {name[:-1]}, did you mean {name}\?$"
            ):
                kind(**{name[:-1]: 1})


@pytest.mark.parametrize(
    ("kind", "name", "near"),
    [
        (SamplingParams, "guided_json", ", did you mean json_schema?"),
        (Request, "id", ", did you mean custom_id?"),
        (Request, "model", ""),  # a line is told of an option of the command
        (LLM, "gpu_memory_utilization", ", did you mean gpu_memory?"),
        (LLM, "xyzzy", ""),
    ],
)
def test_what_other_tools_call_an_argument_is_told_ours_where_there_is_one(kind: type, name: str, near: str):
    with pytest.raises(TypeError, match=f"^{re.escape(f'{kind.__name__} has no argument {name}{near}')}$"):
        kind(**{name: 1})


def test_it_has_the_fields_of_a_line_and_their_defaults():
    assert set(signature(SamplingParams).parameters) == ANSWER_FIELDS | {"constraint"} and set(FIELDS) >= ANSWER_FIELDS
    given, internal = SamplingParams(), types.SamplingParams()
    assert all(getattr(given, field.name) == getattr(internal, field.name) for field in fields(internal))


def test_none_is_not_given_and_numpy_is_taken():
    assert SamplingParams(temperature=None, stop=None, max_tokens=None) == SamplingParams()
    numpy = SamplingParams(temperature=np.float32(0.5), max_tokens=np.int64(3), stop_token_ids=np.array([1, 2]))  # type: ignore[arg-type]
    assert numpy == SamplingParams(temperature=0.5, max_tokens=3, stop_token_ids=(1, 2))
    assert SamplingParams(logit_bias={np.int64(5): np.float32(1)}) == SamplingParams(logit_bias=[(5, 1.0)])  # type: ignore[dict-item]


def test_copies_are_equal_and_checked():
    params = SamplingParams(
        temperature=0.5, logit_bias={5: 1.0}, stop="x", json_schema={"type": "object"}, logprobs=2, seed=1
    )
    assert replace(params) == params == pickle.loads(pickle.dumps(params))
    assert replace(params, temperature=0.25).temperature == 0.25 and replace(params, constraint=None).constraint is None
    with pytest.raises(ValueError, match="temperature is -1"):
        replace(params, temperature=-1)
    with pytest.raises(ValueError, match="n is 3 at temperature 0"):
        SamplingParams(n=3)


@pytest.mark.parametrize("value", [object(), {1, 2}, float("nan"), [float("inf")]])
def test_what_is_no_json_is_refused(value: Any):
    for name in ("stop", "temperature", "json_schema", "logit_bias"):
        with pytest.raises(ValueError, match=f"{name} is "):
            SamplingParams(**{name: value})
    circle: list[Any] = []
    circle.append(circle)
    with pytest.raises(ValueError, match="json_schema is "):
        SamplingParams(json_schema={"enum": circle})


def test_what_shows_itself_badly_is_refused_too():
    class Shy:
        def __repr__(self) -> str:
            raise RuntimeError("not me")

    deep: Any = "x"
    for _ in range(5000):
        deep = [deep]
    for value in (Shy(), deep, {"enum": deep}, 10**5000):
        with pytest.raises(ValueError, match="is "):
            SamplingParams(json_schema=value)
    with pytest.raises(ValueError, match=r"stop is \{'a'\}, wanted a text or a list of texts"):
        SamplingParams(stop={"a"})  # type: ignore[arg-type]


def test_errors_params_and_answers_go_to_other_processes(llm: LLM):
    with pytest.raises(RequestError, match="wanted at most") as caught:
        _ = llm.generate(["x" * 300])[0].text
    for one in (caught.value, UsageError("x"), *llm.generate(["a", None], SHORT), HOT, Request(prompt="x", params=HOT)):  # type: ignore[list-item]
        again = pickle.loads(pickle.dumps(one))
        assert type(again) is type(one) and (again == one or str(again) == str(one))
    with pytest.raises(TypeError, match="an LLM is neither copied nor pickled"):
        pickle.dumps(llm)


def test_answers_have_their_form(llm: LLM):
    [choice, schema] = llm.chat(
        ["Which?", Request(prompt="What?", params=SamplingParams(json_schema={"type": "boolean"}))],
        SamplingParams(choice=["left", "right"]),
    )
    assert choice.choices[0].text in {"left", "right"} and schema.choices[0].text in {"true", "false"}
    refused = next(iter(llm.generate(iter(["x"]), SamplingParams(grammar="start: start"))))
    assert refused.error is not None and refused.error.type == "invalid_schema"


def test_a_few_of_an_endless_iterator(llm: LLM):
    answers = list(islice(llm.generate((f"{i}" for i in iter(int, 1)), SHORT), 5))
    assert len({answer.request_id for answer in answers}) == 5
