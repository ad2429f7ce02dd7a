"""Where the time of whole workloads goes on a GPU: kinds of steps, kinds of kernels in them, gaps, and the host.

    python benchmarks/gpu_workload_time.py
    python benchmarks/gpu_workload_time.py --model llama-3.1-8b --workloads latency mixed --json time.json

Random weights; each workload of `tinyvllm bench` runs once for practice and once for its steps: what each took on the
card's clock, the time between them, in which the card waits, and the engine's own time on the host, hidden but for that
wait. Then two mean steps are timed kernel by kernel as gpu_timeline.py does, over K and V of random numbers: as many
rows as a step that only decodes has on the average, behind as many tokens; and a step with prompts, likewise. The
shares of a mean step stand for those of all steps of its kind.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import figures_file
import numpy as np
from gpu_timeline import Shares, equal_rows, facts_of, fill_pool, sum_ms, time_kernels, time_step
from run_main import run_main

from tinyvllm_cli.backends.gpu.backend import GpuBackend
from tinyvllm_cli.backends.gpu.timing import GpuTiming
from tinyvllm_cli.backends.timing import Rates
from tinyvllm_cli.bench.limit import Costs, Limit
from tinyvllm_cli.bench.measure import ELEM_BYTES
from tinyvllm_cli.bench.meter import Meter
from tinyvllm_cli.bench.runner import TimedStep, Trial, run_trial
from tinyvllm_cli.bench.subject import Subject, open_random
from tinyvllm_cli.bench.workloads import NAMED, named_requests, shared_tokens
from tinyvllm_cli.config import BLOCK_SIZE, EngineOptions
from tinyvllm_cli.types import Batch, Limits, Request, SlotOptions

MARK = "tinyvllm_workload_time"
KINDS = {  # what the names of kernels begin with
    "products": ("product", "normed", "skinny", "medium"),
    "attention": ("attend",),
    "drawing": ("scan_rows", "sample_rows"),
}
OTHERS = "other kernels"


@dataclass(frozen=True, slots=True)
class MeanStep:
    """Of one kind of a workload's steps: sequences that decode, and prompts or parts of them."""

    decoding: int
    context: int  # tokens before a decoding row
    prompts: int
    prompt_rows: int  # of each
    computed: int  # tokens before those
    shared: int  # tokens that all sequences begin with

    def batch(self, num_ids: int) -> Batch:
        """Each sequence in a slot and in blocks of its own, but for what all share."""
        room = max(self.context + 1, self.computed + self.prompt_rows)
        slots = np.arange(self.decoding + self.prompts, dtype=np.int32)
        parts = [
            equal_rows(chosen, rows_each, before, num_ids, room=room)
            for chosen, rows_each, before in (
                (slots[: self.decoding], 1, self.context),
                (slots[self.decoding :], self.prompt_rows, self.computed),
            )
            if len(chosen)
        ]
        batch = parts[0] if len(parts) == 1 else joined(*parts)
        batch.block_tables[:, : self.shared // BLOCK_SIZE] = batch.block_tables[0, : self.shared // BLOCK_SIZE]
        return batch

    def limit(self, costs: Costs, rates: Rates) -> Limit:
        """As that of a workload counts a step: what all share is read once for the rows that decode."""
        whole = self.computed + self.prompt_rows
        return costs.step(
            rates,
            rows=self.decoding + self.prompts * self.prompt_rows,
            sampled=self.decoding + self.prompts,
            attended=self.decoding * (self.context + 1) - self.shared * max(0, self.decoding - 1),
            pairs=self.prompts * self.prompt_rows * (2 * whole - self.prompt_rows + 1) // 2,
        )


def joined(a: Batch, b: Batch) -> Batch:
    """One step of both."""
    width = max(a.block_tables.shape[1], b.block_tables.shape[1])
    tables = [np.pad(each.block_tables, ((0, 0), (0, width - each.block_tables.shape[1]))) for each in (a, b)]
    rows = np.int32(len(a.token_ids))
    return Batch(
        query_start_loc=np.concatenate([a.query_start_loc, b.query_start_loc[1:] + rows]),
        slots=np.concatenate([a.slots, b.slots]),
        block_tables=np.concatenate(tables),
        num_computed=np.concatenate([a.num_computed, b.num_computed]),
        token_ids=np.concatenate([a.token_ids, b.token_ids]),
        logits_indices=np.concatenate([a.logits_indices, b.logits_indices + rows]),
        sample_slots=np.concatenate([a.sample_slots, b.sample_slots]),
    )


def mean_context(requests: Sequence[Request]) -> float:
    """Tokens before a row that decodes: the first token comes with the prompt."""
    prompts = np.array([len(request.prompt_token_ids or ()) for request in requests], float)
    steps = np.array([request.params.max_tokens - 1 for request in requests], float)
    return float((steps * prompts + steps * (steps - 1) / 2).sum() / max(1.0, steps.sum()))


def mean_steps(trial: Trial, requests: Sequence[Request], limits: Limits) -> dict[str, MeanStep]:
    """By kind, of those that there are: "decode", and "prompts" for steps with any row of a prompt."""
    shared = shared_tokens([request.prompt_token_ids or () for request in requests])
    context, found = round(mean_context(requests)), {}
    kinds = split_steps(trial.steps)
    for kind, steps in kinds.items():
        decoding = round(np.mean([step.metered.decode_rows for step in steps]))
        rows = np.mean([step.metered.prompt_rows for step in steps])
        prompts = each = 0
        if kind == "prompts":
            prompts = min(max(1, round(len(requests) / len(steps))), limits.max_slots - decoding)
            each = min(max(1, round(rows / prompts)), (limits.max_batch_tokens - decoding) // prompts)
        computed = round(trial.cached_tokens / len(requests))
        found[kind] = MeanStep(max(decoding, 0 if prompts else 1), context, prompts, each, computed, shared)
    return found


def split_steps(steps: Sequence[TimedStep]) -> dict[str, list[TimedStep]]:
    found: dict[str, list[TimedStep]] = {}
    for step in steps:
        found.setdefault("prompts" if step.metered.prompt_rows else "decode", []).append(step)
    return found


def kind_of(kernel: str) -> str:
    return next((kind for kind, starts in KINDS.items() if kernel.startswith(starts)), OTHERS)


def by_kind(shares: Shares) -> dict[str, float]:
    """Milliseconds of the kernels of a step."""
    found: Counter[str] = Counter()
    for name, share in shares.items():
        found[kind_of(name)] += share.ms
    return dict(found)


def measure(subject: Subject, timing: GpuTiming, rates: Rates, workload: str) -> dict[str, Any]:
    backend, requests = subject.backend, named_requests(workload, subject.num_ids)
    assert isinstance(backend, GpuBackend)
    meter = Meter(backend, timing)
    for _ in range(2):
        trial = run_trial(meter, timing, subject.codec, requests, eos_token_ids=(), prefix_cache=True, hold=nullcontext)
    on_card = sum(step.end - step.begin for step in trial.steps)
    found: dict[str, Any] = {
        "workload": workload,
        "seconds": trial.seconds,
        "tokens_per_s": trial.output_tokens / trial.seconds,
        "steps": len(trial.steps),
        "card_waits_s": trial.seconds - on_card,
        "host_s": trial.engine_s - trial.waited_s,
        "host_waits_s": trial.waited_s,
        "kinds": {},
    }
    fill_pool(backend)
    for slot in range(backend.limits.max_slots):
        backend.bind(slot, [1], SlotOptions())
    steps, costs = (
        split_steps(trial.steps),
        Costs.of(subject.config, ELEM_BYTES["gpu"], backend.facts.kv_bytes_per_token),
    )
    for kind, mean in mean_steps(trial, requests, backend.limits).items():
        batch = mean.batch(subject.num_ids)
        shares, whole = time_kernels(backend, timing, batch), time_step(backend, timing, batch)
        found["kinds"][kind] = {
            "steps": len(steps[kind]),
            "seconds": sum(step.end - step.begin for step in steps[kind]),
            "mean_step": asdict(mean),
            "limit": asdict(mean.limit(costs, rates)),
            **facts_of(shares, whole),
            "shares": {name: ms / sum_ms(shares) for name, ms in by_kind(shares).items()},
        }
    return found | {"shares": workload_shares(found)}


def workload_shares(found: dict[str, Any]) -> dict[str, float]:
    """Of a workload's seconds: by kind of kernel, and the card's waiting."""
    total: Counter[str] = Counter()
    for kind in found["kinds"].values():
        for name, share in kind["shares"].items():
            total[name] += share * kind["seconds"] / found["seconds"]
    return {**total, "card waits": found["card_waits_s"] / found["seconds"]}


COLUMNS = ("products", "attention", "drawing", OTHERS, "card waits")
HEAD = (
    f"| workload | seconds | steps, with prompts | of the time | {' | '.join(COLUMNS)} | host, ms a step | hidden |",
    f"| --- | --- | --- | --- |{' --- |' * (len(COLUMNS) + 2)}",
)


def line(found: dict[str, Any]) -> str:
    """Of Markdown. What the host does is hidden as far as the card does not wait."""
    prompts = found["kinds"].get("prompts", {"steps": 0, "seconds": 0.0})
    shares = [f"{100 * found['shares'].get(name, 0.0):.1f} %" for name in COLUMNS]
    hidden = max(0.0, 1 - found["card_waits_s"] / found["host_s"])
    cells = (
        found["workload"],
        f"{found['seconds']:.3f}",
        f"{found['steps']}, {prompts['steps']}",
        f"{100 * prompts['seconds'] / found['seconds']:.0f} %",
        *shares,
        f"{1e3 * found['host_s'] / found['steps']:.2f}",
        f"{100 * hidden:.0f} %",
    )
    return f"| {' | '.join(cells)} |"


def step_lines(found: dict[str, Any]) -> Iterator[str]:
    """The mean steps, of whose kernels the shares are."""
    for kind, step in found["kinds"].items():
        mean = step["mean_step"]
        rows = f"{mean['decoding']} rows after {mean['context']}"
        if mean["prompts"]:
            rows += f", {mean['prompts']} x {mean['prompt_rows']} of prompts after {mean['computed']}"
        ran = 1e3 * step["seconds"] / step["steps"]
        limit = 1e3 * step["limit"]["seconds"]
        times = f"{limit:.3f} | {step['sum_ms']:.3f} | {step['step_ms']:.3f} | {ran:.3f}"
        yield f"| {found['workload']}, {kind} | {step['steps']} | {rows} | {times} |"


STEP_COLUMNS = (
    "how many",
    "the mean one",
    "its limit, ms",
    "kernels one by one",
    "as a run makes it",
    "in the workload, mean",
)
STEP_HEAD = (f"| steps | {' | '.join(STEP_COLUMNS)} |", f"| --- |{' --- |' * len(STEP_COLUMNS)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.2-1b")
    parser.add_argument("--workloads", nargs="+", choices=NAMED, default=list(NAMED))
    figures_file.add_options(parser)
    options = parser.parse_args()
    engine = EngineOptions(max_model_len=2304)
    with closing(open_random(options.model, backend="gpu", options=engine, write=None)) as subject:
        assert isinstance(subject.backend, GpuBackend)
        facts = figures_file.describe(MARK, subject, options.commit)
        print(f"{subject.name}, {facts['backend']}\n")
        with closing(GpuTiming(subject.backend)) as timing:
            rates = timing.rates()
            found = [measure(subject, timing, rates, workload) for workload in options.workloads]
    print(*HEAD, *map(line, found), "", *STEP_HEAD, *[row for each in found for row in step_lines(each)], sep="\n")
    figures_file.write(options.json, {**facts, "rates": asdict(rates), "workloads": found})


if __name__ == "__main__":
    run_main(main)
