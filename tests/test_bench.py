"""`tinyvllm bench` on a tiny model: its table, its files, and what it refuses before anything is measured."""

from __future__ import annotations

import io
import json
import math
import os
import re
from contextlib import closing, nullcontext
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from command import read_answers, run_here, strict_json, write_lines

from tinyvllm_cli.backends.timing import open_timing
from tinyvllm_cli.bench import bench
from tinyvllm_cli.bench.figures import median_trial
from tinyvllm_cli.bench.measure import Measured, measure
from tinyvllm_cli.bench.meter import Meter
from tinyvllm_cli.bench.runner import TimedRequest, run_trial
from tinyvllm_cli.bench.table import HEAD, about, print_result, table_rows
from tinyvllm_cli.bench.trace import trace
from tinyvllm_cli.bench.workloads import random_requests
from tinyvllm_cli.config import EngineOptions
from tinyvllm_cli.load import open_engine
from tinyvllm_cli.types import Completion, Request, Stats, Usage

pytestmark = pytest.mark.usefixtures("own_cache")

LINES = [{"custom_id": i, "prompt": "Count! " * (1 + i % 3), "max_tokens": 3 + 4 * (i % 3)} for i in range(7)]
CPU = ("--backend", "cpu", "--threads", "1")


@pytest.fixture(scope="module")
def result(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a run of a file of prompts leaves: the result, the trace, and what it printed."""
    folder = tmp_path_factory.mktemp("bench")
    source = write_lines(folder / "in.jsonl", LINES)
    files = ("--json", folder / "out.json", "--trace", folder / "trace.json")
    with pytest.MonkeyPatch.context() as patch:
        shown: list[str] = []
        patch.setattr("builtins.print", lambda *values, **options: shown.append(" ".join(map(str, values))))
        assert run_here("bench", "--workload", source, "-m", tiny, *files, "--slots", "3", *CPU) == 0
    found = {name: strict_json((folder / f"{name}.json").read_bytes()) for name in ("out", "trace")}
    return {**found, "shown": shown, "source": source}


def test_the_table_has_the_figures_of_the_file(result):
    rows = {figure: (value, beside) for figure, value, beside in table_rows(result["out"])}
    printed = {columns[0]: columns[1:] for line in result["shown"] if len(columns := re.split(r"\s{2,}", line)) > 1}
    for figure, (value, beside) in rows.items():
        assert printed[figure] == [text for text in (value, beside) if text], figure
    figures, limit = result["out"]["figures"], result["out"]["limit"]
    median = float(rows["output tokens/s"][0].split()[0].replace(",", ""))
    assert median == pytest.approx(figures["tokens_per_s"]["median"], rel=1e-3, abs=0.06)
    assert float(rows["output tokens/s"][1].split()[-1].replace(",", "")) == pytest.approx(
        limit["tokens_per_s"], rel=1e-3, abs=0.06
    )
    first, again = (rows[f"start to first token, {when}"][0] for when in ("first time", "again"))
    assert [float(first.split()[0]), float(again.split()[0])] == [
        pytest.approx(result["out"]["start"][name], abs=6e-4) for name in ("first_s", "again_s")
    ]


def test_one_is_no_plural(result):
    found = {**result["out"], "trials": result["out"]["trials"][:1]}
    found["workload"] = {**found["workload"], "requests": 1, "prompt_tokens": 1}
    (line,) = [line for line in about(found) if line.startswith("workload ")]
    assert ": 1 request, 1 token in, " in line and "; 1 trial, after" in line
    (line,) = [line for line in about(result["out"]) if line.startswith("workload ")]
    assert ": 7 requests, " in line and "; 3 trials, after" in line


def test_the_tokens_of_the_figure_are_those_of_a_run(result, tiny: Path, tmp_path: Path):
    assert run_here("run", result["source"], "-m", tiny, "-o", tmp_path / "out.jsonl", *CPU) == 0
    usages = [answer["usage"] for answer in read_answers(tmp_path / "out.jsonl")]
    prompt, output = (sum(usage[f"{side}_tokens"] for usage in usages) for side in ("prompt", "completion"))
    found = result["out"]
    assert (found["workload"]["prompt_tokens"], found["workload"]["output_tokens"]) == (prompt, output)
    for trial in found["trials"]:
        assert (trial["prompt_tokens"], trial["output_tokens"]) == (prompt, output)
        assert trial["tokens_per_s"] == pytest.approx(output / trial["seconds"])


def test_figures_are_medians_of_the_trials_beside_the_limit(result):
    found = result["out"]
    trials, limit, rates = found["trials"], found["limit"], found["rates"]
    assert len(trials) == 3
    for name, spread in found["figures"].items():
        values = sorted(trial[name] for trial in trials)
        assert [spread[each] for each in ("least", "median", "most")] == values, name
    for trial in trials:
        assert trial["of_limit"] == pytest.approx(limit["seconds"] / trial["seconds"])
        assert trial["of_read_rate"] == pytest.approx(limit["bytes"] / trial["seconds"] / rates["read"])
        assert trial["of_product_rate"] == pytest.approx(limit["flops"] / trial["seconds"] / rates["product"])
        assert sum(trial[f"{kind}_steps"] for kind in ("prompt", "mixed", "decode")) == trial["steps"]
        assert 0 < trial["host_ms"] < trial["step_ms"] and 0 < trial["busy"] <= 1
    assert limit["steps"] <= min(trial["steps"] for trial in trials)
    assert found["backend"]["threads"] == 1 and found["machine"]["available_cpus"] >= 1
    assert found["limits"]["max_slots"] == 3 and found["memory"]["used_bytes"] > 0
    assert found["start"]["first_s"] > 0 and found["start"]["again_s"] > 0


def test_the_trace_is_of_the_trial_in_the_middle_and_its_spans_nest(result):
    found, events = result["out"], result["trace"]["traceEvents"]
    middle = sorted(found["trials"], key=lambda trial: trial["seconds"])[1]
    steps = [event for event in events if event["ph"] == "X" and "step" in event["args"]]
    assert len(steps) == middle["steps"]
    assert sum(event["args"]["prompt_rows"] for event in steps) == middle["prompt_tokens"] - middle["cached_tokens"]
    computed = middle["output_tokens"] - len(LINES)  # the last token of an answer is not fed back
    assert sum(event["args"]["decode_rows"] for event in steps) == computed
    assert all(event["args"]["device_ms"] == pytest.approx(event["dur"] / 1e3) for event in steps)
    _follow_each_other(steps)

    requests = [event for event in events if event["ph"] == "X" and "e2e_s" in event["args"]]
    assert sum(event["args"]["completion_tokens"] for event in requests) == middle["output_tokens"]
    assert {event["tid"] for event in requests} == {0, 1, 2}
    for slot in range(3):
        _follow_each_other([event for event in requests if event["tid"] == slot])
    queue = {event["name"]: {} for event in events if event["ph"] == "b"}
    for event in events:
        if event["ph"] in ("b", "e"):
            queue[event["name"]][event["ph"]] = event["ts"]
    for event in requests:
        _is_made_of_its_stats(event, queue[event["name"]], events)


def test_the_spans_of_a_slot_follow_each_other_where_last_tokens_are_read_when_the_next_one_has_it():
    """The first leaves slot 0 at 2, a second before its last token is read; the third has another slot."""
    requests = [
        TimedRequest(
            Completion(request_id=i, custom_id=i, usage=Usage(1, 2), stats=Stats(queued, first, 1.0, 3.0 + i, 1.0)),
            arrival=0.0,
            slot=slot,
        )
        for i, (queued, first, slot) in enumerate([(0.0, 1.0, 0), (2.0, 2.5, 0), (1.0, 2.0, 1)])
    ]
    events = trace(SimpleNamespace(steps=[], requests=requests))["traceEvents"]
    spans = [event for event in events if event["ph"] == "X" and event["tid"] == 0]
    for names in (["request 0", "request 1"], ["first token", "decode"] * 2):
        _follow_each_other([event for event in spans if event["name"] in names])
    ends = {event["name"]: (event["ts"] + event["dur"]) / 1e6 for event in events if "e2e_s" in event.get("args", ())}
    assert ends == {"request 0": 2.0, "request 1": 4.0, "request 2": 5.0}


@pytest.mark.usefixtures("no_start")
def test_names_that_are_no_text_are_in_the_file_as_strict_json(said, tiny: Path, tmp_path: Path, monkeypatch):
    out = tmp_path / os.fsdecode(b"\xff.json")
    monkeypatch.setattr("sys.argv", ["tinyvllm", str(out)])
    assert said("bench", "-m", tiny, "--trials", "1", "--json", out, *CPU)[0] == 0
    assert strict_json(out.read_bytes())["command"] == ["tinyvllm", f"{tmp_path}/?.json"]
    assert b"\\ud" not in out.read_bytes()


@pytest.mark.parametrize("columns", [20, 80, 110])
def test_no_figure_is_cut_on_a_terminal_however_narrow(result, columns: int, monkeypatch: pytest.MonkeyPatch):
    shown = on_terminal(monkeypatch, result["out"], columns)
    rows = [*table_rows(result["out"]), HEAD]
    assert all(word in shown for row in rows for text in row for word in text.split()) and "…" not in shown
    assert ("│" in shown) == (columns > 20), "a frame where there is room for it"


def test_what_the_encoding_of_standard_output_lacks_is_escaped(result, monkeypatch: pytest.MonkeyPatch):
    found = {**result["out"], "model": {"name": "é", "path": None}}
    for terminal in (False, True):
        shown = on_terminal(monkeypatch, found, 110, encoding="ascii", terminal=terminal)
        assert shown.startswith("\\xe9, float32 on the CPU")


def on_terminal(
    monkeypatch: pytest.MonkeyPatch,
    result: dict[str, Any],
    columns: int,
    *,
    encoding: str = "utf-8",
    terminal: bool = True,
) -> str:
    """What is printed of a result."""
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(out, "isatty", lambda: terminal, raising=False)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr("sys.stdout", out)
    print_result(result)
    monkeypatch.undo()
    out.seek(0)
    return out.read()


def test_the_trial_in_the_middle_is_the_one_of_the_median_or_the_quicker_of_two():
    trials = [SimpleNamespace(seconds=seconds) for seconds in (3.0, 1.0, 2.5, 9.0)]
    assert [median_trial(trials[:count]).seconds for count in (1, 2, 3, 4)] == [3.0, 1.0, 2.5, 2.5]


@pytest.mark.usefixtures("no_start")
@pytest.mark.parametrize("traced", [False, True])
def test_answers_and_steps_are_kept_for_a_trace_only(said, tiny: Path, tmp_path: Path, monkeypatch, traced: bool):
    """A thousand trials must not hold a thousand times that."""
    measured: list[Measured] = []
    monkeypatch.setattr(bench, "measure", lambda *a, **options: measured.append(measure(*a, **options)) or measured[0])
    trace = ("--trace", tmp_path / "trace.json") if traced else ()
    assert said("bench", "-m", tiny, "--trials", "2", *trace, *CPU)[0] == 0
    assert [kept.whole is not None for kept in measured[0].trials] == [traced] * 2


def _follow_each_other(events: list[dict[str, Any]]) -> None:
    ordered = sorted(events, key=lambda event: event["ts"])
    for before, after in pairwise(ordered):
        assert before["ts"] + before["dur"] <= after["ts"] + 1e-3


def _is_made_of_its_stats(event: dict[str, Any], queue: dict[str, float], events: list[dict[str, Any]]) -> None:
    """Queue, then the slot's span, in which that of the first token and that of the others lie end to end. The slot may
    be the next one's before the last tokens are read."""
    stats, begin, end = event["args"], event["ts"], event["ts"] + event["dur"]
    of_slot = [other for other in events if "e2e_s" in other.get("args", ()) and other["tid"] == event["tid"]]
    left = min((other["ts"] for other in of_slot if other["ts"] > begin), default=math.inf)
    assert queue["e"] - queue["b"] == pytest.approx(1e6 * stats["queue_s"], abs=0.1)
    assert queue["e"] == pytest.approx(begin)
    assert end == pytest.approx(min(queue["b"] + 1e6 * stats["e2e_s"], left), abs=0.1)
    inside = [
        other
        for other in events
        if other["ph"] == "X" and (other["pid"], other["tid"]) == (event["pid"], event["tid"]) and other is not event
        if begin - 1e-3 <= other["ts"] and other["ts"] + other["dur"] <= end + 1e-3
    ]
    assert [other["name"] for other in inside] == ["first token", "decode"]
    first = inside[0]["ts"] + inside[0]["dur"]
    assert first == pytest.approx(min(queue["b"] + 1e6 * stats["ttft_s"], left), abs=0.1)
    assert sum(other["dur"] for other in inside) == pytest.approx(event["dur"], abs=0.1)


def test_answers_are_those_without_a_clock_around_the_backend(tiny: Path):
    options = EngineOptions(slots=3, threads=1)
    with closing(open_engine(str(tiny), backend="cpu", config=options, report=print)) as loaded:
        requests = random_requests([5, 40, 3, 17, 9], [4, 1, 12, 7, 3], num_ids=200)
        for request in requests:
            loaded.engine.add(request)
        plain: dict[int, Completion] = {}
        while not loaded.engine.idle:
            plain |= {event.request_id: event for event in loaded.engine.step() if isinstance(event, Completion)}
        timing = open_timing(loaded.backend, 1)
        meter = Meter(loaded.backend, timing)
        trial = run_trial(meter, timing, loaded.codec, requests, eos_token_ids=(), prefix_cache=True, hold=nullcontext)
    assert [timed.completion.choices for timed in trial.requests] == [plain[i].choices for i in range(len(requests))]
    assert trial.output_tokens == 27 and trial.counts == {}


@pytest.mark.usefixtures("no_start")
def test_prompts_of_the_prefix_workload_share_what_the_result_says(said, tiny: Path, tmp_path: Path, monkeypatch):
    def few(name: str, num_ids: int) -> list[Request]:
        return random_requests([20, 22, 21], [2, 3, 2], num_ids=num_ids, shared_prefix_tokens=16)

    monkeypatch.setattr(bench, "named_requests", few)
    out = tmp_path / "out.json"
    assert said("bench", "--workload", "prefix", "-m", tiny, "--json", out, *CPU)[0] == 0
    workload = json.loads(out.read_bytes())["workload"]
    assert (workload["prompt_tokens"], workload["output_tokens"], workload["shared_tokens"]) == (63, 7, 16)
