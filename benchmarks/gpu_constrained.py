"""What options of answers cost on a GPU: tokens/s and TPOT of whole answers, setting by setting, beside greedy ones.

    python benchmarks/gpu_constrained.py
    python benchmarks/gpu_constrained.py --rows 64 --rounds 7

Random weights, a prompt and an answer of the same length for every row, all rows at once, through the engine. Words are
those of GPT-2 and pairs of them, as many as the model has ids. Constraints let no answer end before its last token;
where only some rows have one, these go on for as long as there are plain ones.

Tokens/s are those of all rows, prompts and the compiling of constraints included. A step's time is that between two
ends of steps, TPOT the mean over an answer, of plain rows where there are some. Each round has all settings, one
after another; figures are medians (least - most). The second table is from a last round, in which the host's work is
timed call by call, which costs something itself.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from host_clock import Clock, parts_table
from run_main import run_main

from tinyvllm_cli.backends.base import Backend
from tinyvllm_cli.backends.machine import available_cpus
from tinyvllm_cli.bench.subject import open_random
from tinyvllm_cli.config import EngineOptions
from tinyvllm_cli.engine.engine import Engine
from tinyvllm_cli.io.constraints import read_constraint
from tinyvllm_cli.load import MASK_THREADS
from tinyvllm_cli.steady import steady
from tinyvllm_cli.text.codec import TextCodec
from tinyvllm_cli.text.tokenizer import Tokenizer, load_tokenizer
from tinyvllm_cli.types import Completion, Request, SamplingParams

DATA = Path(__file__).parent.parent / "tests" / "data"
WORDS = DATA / "vocab" / "ggml-vocab-gpt-2.gguf"
END = "<|end|>"
ENDLESS = 1000  # items of an array: more than an answer has tokens

FREE: dict[str, Any] = {
    "type": "object",
    "properties": {"title": {"type": "string"}, "text": {"type": "string"}},
    "required": ["title", "text"],
    "additionalProperties": False,
}
# What is mostly asked for: an extraction.
RECORD: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "mood": {"enum": ["good", "bad", "mixed", "unknown"]},
        "topics": {"type": "array", "items": {"type": "string"}, "maxItems": 8},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "city": {"type": "string"}, "zip": {"type": "string"}},
            "required": ["street", "city"],
            "additionalProperties": False,
        },
        "is_member": {"type": "boolean"},
        "score": {"type": "number"},
    },
    "required": ["name", "age", "mood", "topics", "address", "is_member", "score"],
    "additionalProperties": False,
}
# Patterns, formats, texts that may not be long: what masks are hardest to find for.
ORDER: dict[str, Any] = json.loads((DATA / "schemas" / "order.json").read_text("utf-8"))


@dataclass(frozen=True)
class Setting:
    """params: of all rows. schema: of the items of an endless array, for this share of the rows; own: for each row in
    words of its own, so that nothing of it is compiled, or known, already.
    """

    name: str
    params: SamplingParams
    schema: dict[str, Any] | None = None
    share: float = 1.0
    own: bool = False


GREEDY = SamplingParams(ignore_eos=True)
DRAWN = replace(GREEDY, temperature=1.0)
PENALTIES = {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.1}
SETTINGS = (
    Setting("greedy", GREEDY),
    Setting("temperature 1", DRAWN),
    Setting("top_k 50, top_p 0.9", replace(DRAWN, top_k=50, top_p=0.9)),
    Setting("penalties", replace(GREEDY, **PENALTIES)),
    Setting("penalties, temperature 1", replace(DRAWN, **PENALTIES)),
    Setting("free strings", GREEDY, FREE),
    Setting("records", GREEDY, RECORD),
    Setting("records, temperature 1", DRAWN, RECORD),
    Setting("orders", GREEDY, ORDER),
    Setting("orders, a schema for each row", GREEDY, ORDER, own=True),
    Setting("25 % free strings", GREEDY, FREE, 0.25),
    Setting("25 % records", GREEDY, RECORD, 0.25),
    Setting("25 % orders", GREEDY, ORDER, 0.25),
)


# ---------------------------------------------------------------- what is answered


def make_tokenizer(size: int) -> Tokenizer:
    """So many ids of bytes, of GPT-2's words and of pairs of its words in its own order; the last one is the end."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Core

    model = json.loads(load_tokenizer(WORDS).core.to_str())["model"]
    single = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = dict.fromkeys(single)
    merges: list[tuple[str, str]] = []
    for first, second in _merges(model):
        if len(pieces) == size - 1:
            break
        if first + second not in pieces:
            pieces[first + second] = None
            merges.append((first, second))
    vocab = {piece: id for id, piece in enumerate([*pieces, END])}
    core = Core(models.BPE(vocab=vocab, merges=merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(END, special=True, normalized=False)])
    return Tokenizer(core, bos_token=None, eos_token=END)


def _merges(model: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield from map(tuple, model["merges"])
    words = sorted((piece for piece in model["vocab"] if piece.lstrip("Ġ").isalpha()), key=model["vocab"].__getitem__)
    starts = [word for word in words if word.startswith("Ġ")]
    ends = [word for word in words if not word.startswith("Ġ") and len(word) > 1]
    yield from ((start, end) for start, end in zip(np.repeat(starts[:400], 400), ends[:400] * 400, strict=True))


@dataclass(frozen=True)
class Work:
    """Rows are answered at once, each of so many tokens."""

    rows: int
    prompt_tokens: int
    max_tokens: int

    @property
    def longest(self) -> int:
        """Tokens of rows that are to last until plain ones beside them end, however many of them are forced."""
        return 3 * self.max_tokens

    def requests(self, setting: Setting, round_number: int, num_ids: int) -> list[Request]:
        """Prompts are the same in each setting and round."""
        prompts = np.random.default_rng(0).integers(0, num_ids, (self.rows, self.prompt_tokens))
        requests = []
        for i, prompt in enumerate(prompts.tolist()):
            params = replace(setting.params, max_tokens=self.max_tokens, seed=i)
            if setting.schema is not None and int((i + 1) * setting.share) > int(i * setting.share):
                items = setting.schema
                if setting.own:
                    properties = {f"row {round_number} {i}": {"type": "integer"}, **items["properties"]}
                    items = {**items, "properties": properties}
                schema = {"$defs": items.get("$defs", {}), "type": "array", "items": items, "minItems": ENDLESS}
                tokens = self.max_tokens if setting.share == 1 else self.longest
                params = replace(params, max_tokens=tokens, constraint=read_constraint({"json_schema": schema}))
            requests.append(Request(request_id=i, custom_id=i, prompt_token_ids=tuple(prompt), params=params))
        return requests


@dataclass
class Trial:
    """One run over all rows; times in seconds."""

    seconds: float = 0.0
    tokens: int = 0  # of all rows
    steps: int = 0
    ended: int = 0  # answers that did not come to their last token
    step_times: list[float] = field(default_factory=list)  # between the ends of steps
    tpots: list[float] = field(default_factory=list)  # of those that are watched


def answer_all(backend: Backend, codec: TextCodec, requests: Sequence[Request], eos: tuple[int, ...]) -> Trial:
    """Ends with the last of those that are watched."""
    plain = {request.request_id for request in requests if request.params.constraint is None}
    watched = plain or {request.request_id for request in requests}
    under_way = watched.copy()
    engine, trial, last = Engine(backend, codec, eos_token_ids=eos, deltas=False), Trial(), None
    started = time.perf_counter()
    for request in requests:
        engine.add(request)
    while under_way:
        events = engine.step()
        now = time.perf_counter()
        for event in events:
            assert isinstance(event, Completion)
            assert event.error is None and event.usage and event.stats, event.error
            trial.ended += event.choices[0].finish_reason != "length"
            if event.request_id in under_way:
                under_way.remove(event.request_id)
                if event.stats.decode_s:
                    trial.tpots.append(event.stats.decode_s / (event.usage.completion_tokens - 1))
        if last is not None:
            trial.step_times.append(now - last)
        last = now
    trial.seconds = time.perf_counter() - started
    trial.tokens, trial.steps = engine.stats.completion_tokens, engine.stats.steps
    for request in requests:
        engine.abort(request.request_id)
    while not engine.idle:
        engine.step()
    return trial


# ---------------------------------------------------------------- what is told


def spread(values: Sequence[float], digits: int) -> str:
    """Median (least - most)."""
    median, low, high = (f"{value:,.{digits}f}" for value in (np.median(values), min(values), max(values)))
    return f"{median} ({low} - {high})"


def figures(trials: dict[str, list[Trial]]) -> Iterator[str]:
    """A table in Markdown; changes are to the first setting."""
    yield "| answers | tokens/s | | step p50, ms | | step mean, ms | | TPOT p50, ms | | steps | ended |"
    yield f"|{' --- |' * 11}"
    columns: list[tuple[Callable[[Trial], float], int]] = [
        (lambda trial: trial.tokens / trial.seconds, 0),
        (lambda trial: 1e3 * float(np.median(trial.step_times)), 3),
        (lambda trial: 1e3 * float(np.mean(trial.step_times)), 3),
        (lambda trial: 1e3 * float(np.median(trial.tpots)), 3),
    ]
    first = next(iter(trials.values()))
    for name, found in trials.items():
        cells = [name]
        for figure, digits in columns:
            values, base = [figure(trial) for trial in found], np.median([figure(trial) for trial in first])
            cells += [spread(values, digits), f"{np.median(values) / base - 1:+.1%}"]
        cells += [f"{getattr(found[-1], count):,}" for count in ("steps", "ended")]
        yield f"| {' | '.join(cells)} |"


# ---------------------------------------------------------------- all of it


def measure(
    backend: Backend, codec: TextCodec, eos: tuple[int, ...], work: Work, rounds: int
) -> tuple[dict[str, list[Trial]], dict[str, Clock]]:
    """The trials of each setting, and one more in which the host is watched; before them one in which graphs come to
    be."""
    trials: dict[str, list[Trial]] = defaultdict(list)
    clocks = {}
    started = time.perf_counter()
    for number in range(1 + rounds):
        for setting in SETTINGS:
            trial = answer_all(backend, codec, work.requests(setting, number, codec.size - 1), eos)
            if number:
                trials[setting.name].append(trial)
        print(f"round {number} of {rounds}: {time.perf_counter() - started:.0f} s", flush=True)
    for setting in SETTINGS:
        clock = Clock()
        with clock.watching(backend):
            answer_all(backend, codec, work.requests(setting, 1 + rounds, codec.size - 1), eos)
        clocks[setting.name] = clock
    return trials, clocks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.2-1b", help="a shape: the name of random weights in `bench`")
    parser.add_argument("--backend", choices=["gpu", "cpu"], default="gpu")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    work = Work(options.rows, options.prompt_tokens, options.max_tokens)
    engine = EngineOptions(slots=work.rows, max_model_len=work.prompt_tokens + work.longest)
    with closing(open_random(options.model, backend=options.backend, options=engine, write=None)) as subject:
        backend, size = subject.backend, subject.config.vocab_size
        threads = min(MASK_THREADS, available_cpus())
        eos = (size - 1,)
        codec = TextCodec(make_tokenizer(size), None, None, size, eos, threads=threads)
        facts = backend.facts
        print(f"{subject.name}, {facts.dtype}, {facts.device}: {dict(facts.details)}")
        print(f"{work}, {size:,} ids; masks by {threads} threads", flush=True)
        with steady():  # as in a run
            trials, clocks = measure(backend, codec, eos, work, options.rounds)
    print("", *figures(trials), "", *parts_table(clocks), sep="\n")


if __name__ == "__main__":
    run_main(main)
