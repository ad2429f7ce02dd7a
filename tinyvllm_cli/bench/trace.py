"""A trial as a trace that perfetto (ui.perfetto.dev) and chrome://tracing show: steps, slots and the queue.

The Trace Event Format: complete events ("X") on the tracks of steps and slots, nestable asynchronous ones ("b", "e")
where spans overlap, which is in the queue; times in microseconds from the start of the trial.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from tinyvllm_cli.bench.runner import TimedRequest, TimedStep, Trial

STEPS, SLOTS, QUEUE = 1, 2, 3  # processes, as the format calls groups of tracks
DEVICE, HOST = 1, 2  # tracks of the first

Event = dict[str, Any]


def trace(trial: Trial) -> dict[str, Any]:
    """The whole file, ready for JSON."""
    events = [*_names(trial), *_steps(trial.steps)]
    left = _left(trial.requests)
    for timed in trial.requests:
        events += _request(timed, left.get(timed.completion.request_id, math.inf))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _names(trial: Trial) -> Iterator[Event]:
    for process, name in ((STEPS, "steps"), (SLOTS, "slots"), (QUEUE, "queue")):
        yield {"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}}
        yield {"ph": "M", "pid": process, "name": "process_sort_index", "args": {"sort_index": process}}
    tracks = {(STEPS, DEVICE): "device", (STEPS, HOST): "enqueued"}
    tracks |= {(SLOTS, timed.slot): f"slot {timed.slot}" for timed in trial.requests if timed.slot is not None}
    for (process, track), name in tracks.items():
        yield {"ph": "M", "pid": process, "tid": track, "name": "thread_name", "args": {"name": name}}


def _steps(steps: list[TimedStep]) -> Iterator[Event]:
    """Each on the device for as long as it took, and on the host where it was asked for."""
    for number, step in enumerate(steps):
        metered = step.metered
        args = {
            "step": number,
            "rows": metered.prompt_rows + metered.decode_rows,
            "prompt_rows": metered.prompt_rows,
            "decode_rows": metered.decode_rows,
            "device_ms": 1e3 * (step.end - step.begin),
        }
        yield _span(metered.kind, STEPS, DEVICE, step.begin, step.end, args)
        at = {"ph": "i", "s": "t", "pid": STEPS, "tid": HOST, "ts": 1e6 * metered.enqueued}
        yield {"name": metered.kind, **at, "args": {"step": number}}


def _left(requests: Sequence[TimedRequest]) -> dict[int, float]:
    """By request, when its slot went to the next one: with its last tokens still under way, which are read later."""
    entered = sorted(
        (timed.slot, timed.arrival + timed.completion.stats.queue_s, timed.completion.request_id)
        for timed in requests
        if timed.slot is not None and timed.completion.stats is not None
    )
    return {mine[2]: after[1] for mine, after in pairwise(entered) if mine[0] == after[0]}


def _request(timed: TimedRequest, left: float) -> Iterator[Event]:
    """The queue, then the slot: inside of its span one up to the first token, and one from there to the last, or to
    when it `left` the slot."""
    done = timed.completion
    stats, usage = done.stats, done.usage
    if timed.slot is None or stats is None or usage is None or stats.ttft_s is None:
        return
    name, start = f"request {done.custom_id}", timed.arrival
    queued, first, last = start + stats.queue_s, start + stats.ttft_s, start + stats.e2e_s
    first, last = min(first, left), min(last, left)
    args = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "queue_s": stats.queue_s,
        "ttft_s": stats.ttft_s,
        "e2e_s": stats.e2e_s,
    }
    for phase, at in (("b", start), ("e", queued)):
        yield {"ph": phase, "cat": "queue", "id": done.request_id, "name": name, "pid": QUEUE, "tid": 1, "ts": 1e6 * at}
    yield _span(name, SLOTS, timed.slot, queued, last, args)
    yield _span("first token", SLOTS, timed.slot, queued, first, {})
    yield _span("decode", SLOTS, timed.slot, first, last, {})


def _span(name: str, process: int, track: int, begin: float, end: float, args: dict[str, Any]) -> Event:
    place = {"ph": "X", "pid": process, "tid": track, "ts": 1e6 * begin, "dur": 1e6 * (end - begin)}
    return {"name": name, **place, "args": args}
