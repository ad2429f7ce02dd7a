"""Jobs for tests: the loop of a run over the real engine and a scripted backend, its output read back."""

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from command import read_answers
from fake_backend import FakeBackend, FakeCodec, VirtualClock, hashed, limits

from tinyvllm_cli.engine.engine import Engine
from tinyvllm_cli.io.feed import Feed, FileFeed
from tinyvllm_cli.io.ordered import Order
from tinyvllm_cli.io.progress import Silent
from tinyvllm_cli.io.prompts import Defaults, Item, read_lines, read_requests
from tinyvllm_cli.io.record import RunRecord
from tinyvllm_cli.io.results import ResultWriter
from tinyvllm_cli.job import Job

GOOD = [
    {"custom_id": "a", "prompt_token_ids": [5, 6], "max_tokens": 9},
    {"custom_id": "b", "prompt_token_ids": [5, 6], "max_tokens": 4, "ignore_eos": True, "metadata": {"k": 1}},
    {"custom_id": "c", "prompt_token_ids": list(range(8, 40)), "temperature": 1, "max_tokens": 12},
    {"custom_id": "d", "prompt_token_ids": [9], "max_tokens": 0},
    {"custom_id": "e", "prompt_token_ids": [9], "max_tokens": 200, "ignore_eos": True},
]
BAD = [
    {"custom_id": "too long", "prompt_token_ids": [8] * 64},
    {"custom_id": "no ids", "prompt": "the fake text side refuses this"},
    {"custom_id": "typo", "prompt_token_ids": [9], "max_token": 1},
]


def items(lines: list[Any]) -> Iterator[Item]:
    return read_requests(read_lines(io.BytesIO(encoded(lines))), Defaults())


def encoded(lines: list[Any]) -> bytes:
    return b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines)


def make_engine(**changes: int) -> Engine:
    clock = VirtualClock()
    return Engine(FakeBackend(limits(**changes), hashed(), clock), FakeCodec(clock), eos_token_ids=(2, 7), clock=clock)


def make_job(engine: Engine, feed: Feed, fd: int, **options: Any) -> Job:
    record = options.pop("record", RunRecord(None, {}, warn=print))
    return Job(engine, feed, ResultWriter(fd, "out"), display=Silent(), record=record, **options)


def run(
    path: Path, lines: list[Any], feed: Feed | None = None, order: Order | None = None, **changes: int
) -> list[dict[str, Any]]:
    """changes: of the backend's limits."""
    with path.open("wb") as out:
        make_job(make_engine(**changes), feed or FileFeed(items(lines)), out.fileno(), order=order).run()
    return read_answers(path)
