"""Whether answers depend on their company, on the machine at hand: one set of requests, answered in several.

    python benchmarks/same_answers.py
    python benchmarks/same_answers.py --model llama-3.1-8b --dtype fp8

Random weights. Of 256 requests five of each eight begin with the same 1,536 ids; all give 40 greedy tokens and their
log-probabilities, of which every bit counts. They are answered all at once, then some of them 30 and 4 at a time and
without the prefix cache: so through shared and through own attention, products of many rows and of few, captured steps
and others.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import closing
from typing import TypeAlias

import numpy as np
from run_main import run_main

from tinyvllm_cli.bench.subject import Subject, open_random
from tinyvllm_cli.bench.workloads import failed
from tinyvllm_cli.config import EngineOptions
from tinyvllm_cli.engine.engine import Engine
from tinyvllm_cli.types import Completion, Request, SamplingParams

COUNT, PREFIX, OUTPUT = 256, 1536, 40  # requests, ids that some begin with, tokens of each answer
SHARED, OF = 5, 8
OWN, LONE = (16, 64), (100, 1000)  # ids of a prompt behind the prefix, and of one without it
COMPANIES = (("30 at once", 60, 30, True), ("4 at once", 16, 4, True), ("without the prefix cache", 100, 100, False))

Answers: TypeAlias = dict[int, tuple[tuple[int, float], ...]]  # token ids and log-probabilities of each request


def make_requests(num_ids: int) -> list[Request]:
    random = np.random.default_rng(1)
    prefix = random.integers(0, num_ids, PREFIX).tolist()
    params = SamplingParams(max_tokens=OUTPUT, ignore_eos=True, logprobs=0)
    requests = []
    for i in range(COUNT):
        shares = i % OF < SHARED
        own = random.integers(0, num_ids, int(random.integers(*(OWN if shares else LONE)))).tolist()
        prompt = tuple((prefix if shares else []) + own)
        requests.append(Request(request_id=i, custom_id=i, prompt_token_ids=prompt, params=params))
    return requests


def answer(subject: Subject, requests: Sequence[Request], at_once: int, *, prefix_cache: bool = True) -> Answers:
    """So many at a time, the next ones when all of these are done."""
    found: Answers = {}
    for start in range(0, len(requests), at_once):
        engine = Engine(subject.backend, subject.codec, eos_token_ids=(), prefix_cache=prefix_cache, deltas=False)
        for request in requests[start : start + at_once]:
            engine.add(request)
        while not engine.idle:
            for event in engine.step():
                if isinstance(event, Completion):
                    if event.error is not None:
                        raise failed(event)
                    choice = event.choices[0]
                    logprobs = [token.logprob for token in choice.logprobs or ()]
                    found[event.request_id] = tuple(zip(choice.token_ids, logprobs, strict=True))
    return found


def differing(whole: Answers, some: Answers) -> int:
    """How many of some answers are not those of the whole."""
    return sum(whole[key] != answer for key, answer in some.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.2-1b")
    parser.add_argument("--backend", default="gpu")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--kv-dtype", default="auto")
    given = parser.parse_args()
    options = EngineOptions(slots=COUNT, max_model_len=2304, dtype=given.dtype, kv_dtype=given.kv_dtype)
    with closing(open_random(given.model, backend=given.backend, options=options, write=None)) as subject:
        requests = make_requests(subject.num_ids)
        whole = answer(subject, requests, COUNT)
        print(f"{subject.name}, {subject.backend.facts.dtype}, {subject.backend.facts.device}: {COUNT} at once, beside")
        for name, count, at_once, prefix_cache in COMPANIES:
            some = answer(subject, requests[:count], at_once, prefix_cache=prefix_cache)
            print(f"{name}: {differing(whole, some)} of {count} differ", flush=True)


if __name__ == "__main__":
    run_main(main)
