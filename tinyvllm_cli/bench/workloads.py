"""What a benchmark has answered: the project's own workloads, by their lengths, and files of prompts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import numpy as np

from tinyvllm_cli.errors import TinyvllmError, UsageError
from tinyvllm_cli.io.prompts import Defaults, read_lines, read_requests
from tinyvllm_cli.io.source import open_source
from tinyvllm_cli.types import Completion, Request, SamplingParams

NAMED = ("latency", "mixed", "short", "prefix")  # the keys of workloads.json
SUFFIXES = (".jsonl", ".txt")


def check_workload(name: str) -> None:
    """UsageError unless it is one of ours, or the name of a file that `run` reads."""
    if name not in NAMED and Path(name).suffix.lower() not in SUFFIXES:
        raise UsageError(f"--workload {name}: wanted {', '.join(NAMED)}, or a {' or '.join(SUFFIXES)} file of prompts")


def named_requests(name: str, num_ids: int) -> list[Request]:
    """The requests of one of our workloads: random ids below num_ids, greedy, each to its last token."""
    text = (files("tinyvllm_cli.bench") / "workloads.json").read_text(encoding="utf-8")
    return random_requests(**json.loads(text)[name], num_ids=num_ids)


def random_requests(
    prompt_tokens: Sequence[int], max_tokens: Sequence[int], *, num_ids: int, shared_prefix_tokens: int = 0
) -> list[Request]:
    """Greedy requests of these lengths, EOS ignored; the same arguments give the same ids, of which all prompts share
    the first shared_prefix_tokens.
    """
    rng = np.random.default_rng(0)
    shared = rng.integers(0, num_ids, shared_prefix_tokens).tolist()
    requests = []
    for i, (length, limit) in enumerate(zip(prompt_tokens, max_tokens, strict=True)):
        own = rng.integers(0, num_ids, length - len(shared)).tolist()
        params = SamplingParams(max_tokens=limit, ignore_eos=True)
        requests.append(Request(request_id=i, custom_id=i, prompt_token_ids=(*shared, *own), params=params))
    return requests


def file_requests(name: str, *, ids_only: bool) -> list[Request]:
    """The lines of a .jsonl or .txt file as `run` takes them. ids_only: for a model without a tokenizer.

    UsageError where it cannot be read, holds none, asks for several answers to one prompt, or holds text where ids are
    wanted; TinyvllmError for a line that is no request.
    """
    source = open_source(name)
    if source.suffix == ".csv":
        raise UsageError(f"{name} is a .csv file, wanted a .jsonl or .txt file")
    with closing(source.stream):
        items = list(read_requests(read_lines(source.stream), Defaults(), text_lines=source.text_lines, check_ids=True))
    for item in items:
        if isinstance(item, Completion):
            raise failed(item)
    if not items:
        raise UsageError(f"{name} holds no requests: there is nothing to measure")
    requests = [item for item in items if isinstance(item, Request)]
    several = next((request for request in requests if request.params.n > 1), None)
    if several is not None:
        raise UsageError(f"{name}, line {several.line}: n is {several.params.n}, wanted 1 where time is measured")
    if ids_only:
        _refuse_text(name, requests)
    return requests


def _refuse_text(name: str, requests: Iterable[Request]) -> None:
    for request in requests:
        field = request.prompt_field if request.prompt_token_ids is None else "stop" if request.params.stop else None
        if field is not None:
            raise UsageError(
                f"{name}, line {request.line} holds text ({field}), and random weights have no tokenizer: give "
                f"{'stop_token_ids' if field == 'stop' else 'prompt_token_ids'}, or a model with -m"
            )


def failed(completion: Completion) -> TinyvllmError:
    """A request that could not be answered: no figure would be that of the workload."""
    assert completion.error is not None
    line = f", line {completion.line}" if completion.line is not None else ""
    return TinyvllmError(f"request {completion.custom_id}{line} failed: {completion.error.message}")


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of a workload's requests, in their order."""

    prompts: tuple[int, ...]
    outputs: tuple[int, ...]
    shared: int  # tokens that all prompts begin with; 0 of a single one

    @property
    def sha256(self) -> str:
        """Of all there is to them; not of the ids."""
        return hashlib.sha256(json.dumps([self.prompts, self.outputs, self.shared]).encode()).hexdigest()


def shared_tokens(prompts: Iterable[Sequence[int]]) -> int:
    """How many ids all prompts begin with; 0 where there is only one."""
    found = sorted(map(tuple, prompts))
    first, last = found[0], found[-1]  # what these two share, all between them do
    differs = (i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b)
    return next(differs, min(len(first), len(last))) if len(found) > 1 else 0
