"""What it costs that the bits of a row depend on that row alone: workloads with and without the rule on split K.

    python benchmarks/row_invariance_cost.py --json cost.json
    python benchmarks/row_invariance_cost.py --model llama-3.1-8b --workloads latency mixed short

With the rule is what a run does: algorithms of cublasLt without split K and our own kernels, whose bits are the same,
the fastest of them for each shape. Without it cublasLt may sum parts of K apart, runs on as few rows as a step has, and
the fastest of all is taken whatever its bits; once beside our own kernels, once in their place. All three are open in
one process and take turns, trial by trial, on the same card and the same random weights.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from ctypes import addressof
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import figures_file
from figures_file import shown, spread
from run_main import run_main

from tinyvllm_cli.backends.gpu import algorithms, cublas, tuning
from tinyvllm_cli.backends.gpu import backend as gpu_backend
from tinyvllm_cli.backends.gpu.algorithms import Search
from tinyvllm_cli.backends.gpu.backend import GpuBackend
from tinyvllm_cli.backends.gpu.cublas import Blas
from tinyvllm_cli.backends.gpu.cublas_api import Heuristic
from tinyvllm_cli.backends.gpu.timing import GpuTiming
from tinyvllm_cli.bench.meter import Meter
from tinyvllm_cli.bench.runner import Trial, run_trial
from tinyvllm_cli.bench.subject import Subject, open_random
from tinyvllm_cli.bench.workloads import NAMED, named_requests
from tinyvllm_cli.config import EngineOptions
from tinyvllm_cli.errors import DeviceError

MARK = "tinyvllm_row_invariance"
RULE, FREE, FREE_CUBLAS = "with the rule", "free choice", "free choice, cublasLt alone"
ALL_SCHEMES = 7  # CUBLASLT_REDUCTION_SCHEME_MASK: every way to add up parts of K
MEMORY = 36 << 30  # bytes for each of the three


class FreeSearch(Search):
    """Finds the algorithms that split K, too, behind those that do not."""

    def algorithms(self) -> list[Heuristic]:
        in_order = super().algorithms()
        with (
            patch.object(algorithms, "REDUCTION_SCHEME_NONE", ALL_SCHEMES),
            patch.object(FreeSearch, "_splits_k", _never),
        ):
            found = super().algorithms()
        return in_order + [each for each in found if self._splits_k(each)]


class FreeBlas(Blas):
    """Offers what a free search finds."""

    own_kernels = True

    def _make_plan(self, *args: Any) -> Any:
        with patch.object(cublas, "Search", FreeSearch):
            return super()._make_plan(*args)

    def offers_own(self, *args: Any, **kwargs: Any) -> bool:
        return self.own_kernels and super().offers_own(*args, **kwargs)

    def splitting(self) -> dict[str, int]:
        """Of the shapes that were asked for: how many there are, and how many of them run with K split."""
        plans = [plan for key, plan in self._plans.items() if plan is not None and key not in self._own]
        chosen = [next(each for each in plan.found if addressof(each) == plan._algo.value) for plan in plans]
        search = Search(self._library, self._lt_handle, 0, (0, 0, 0, 0))  # for no product: it only looks at algorithms
        return {"shapes": len(plans), "split": sum(map(search._splits_k, chosen))}


class FreeCublas(FreeBlas):
    own_kernels = False


def _never(self: Search, found: Any) -> bool:  # noqa: ARG001
    return False


def fastest(
    device: Any,
    product: Any,
    rows: int,
    choices: Sequence[Callable[[], None]],
    wanted: Any,  # noqa: ARG001
    before: Callable[[], None] | None,
) -> int:
    """In the place of tuning's own: bits are not looked at."""
    times = []
    for choose in choices:
        choose()
        try:
            product.run(device.blas, rows)
            times.append(tuning._time(device, product, rows, before))
        except DeviceError:
            times.append(float("inf"))
    return times.index(min(times))


@contextmanager
def choosing(blas: type[Blas]) -> Iterator[None]:
    """While a backend is opened, and while it runs: what is asked of cublasLt, and what is taken. Nothing is
    remembered, for the algorithms have other numbers."""

    def tune(device: Any, parameters: Any, max_rows: int, cache: Any) -> None:  # noqa: ARG001
        tuning.tune(device, parameters, max_rows, None)

    def is_tuned(*args: Any) -> bool:  # noqa: ARG001
        return False

    patches = [patch.object(gpu_backend, "tune", tune), patch.object(gpu_backend, "is_tuned", is_tuned)]
    patches += [patch.object(gpu_backend, "Blas", blas)]
    if issubclass(blas, FreeBlas):
        # Products that add run on many rows only because algorithms that do not split K are slow for fewer.
        patches += [patch.object(tuning, "_fastest", fastest), patch.object(cublas, "ADD_ROWS", 1)]
    with ExitStack() as stack:
        for each in patches:
            stack.enter_context(each)
        cublas.padded_rows.cache_clear()
        stack.callback(cublas.padded_rows.cache_clear)
        yield


CHOICES: dict[str, type[Blas]] = {RULE: Blas, FREE: FreeBlas, FREE_CUBLAS: FreeCublas}


@dataclass
class Side:
    """An open model, and what its trials took."""

    blas: type[Blas]
    subject: Subject
    timing: GpuTiming
    seconds: dict[str, list[float]] = field(default_factory=dict)  # by workload

    def trial(self, workload: str) -> Trial:
        subject = self.subject
        meter = Meter(subject.backend, self.timing)
        requests = named_requests(workload, subject.num_ids)
        with choosing(self.blas):
            return run_trial(
                meter, self.timing, subject.codec, requests, eos_token_ids=(), prefix_cache=True, hold=nullcontext
            )


def open_side(model: str, blas: type[Blas], stack: ExitStack) -> Side:
    options = EngineOptions(max_model_len=2304, gpu_memory=MEMORY)
    with choosing(blas):
        subject = stack.enter_context(closing(open_random(model, backend="gpu", options=options, write=None)))
    assert isinstance(subject.backend, GpuBackend)
    return Side(blas, subject, stack.enter_context(closing(GpuTiming(subject.backend))))


def measure(sides: dict[str, Side], workload: str, trials: int) -> dict[str, Any]:
    """By side: tokens/s of the trials, after one that does not count, and the ratio to the rule."""
    for number in range(1 + trials):
        for side in sides.values():
            trial = side.trial(workload)
            if number:
                side.seconds.setdefault(workload, []).append(trial.seconds)
    rates = {
        name: spread([trial.output_tokens / each for each in side.seconds[workload]]) for name, side in sides.items()
    }
    rule = rates[RULE]["median"]
    return {name: {"tokens_per_s": rate, "of_the_rule": rate["median"] / rule} for name, rate in rates.items()}


def lines(workload: str, found: dict[str, Any]) -> Iterator[str]:
    for name, each in found.items():
        yield f"| {workload} | {name} | {shown(each['tokens_per_s'], ',.1f')} | {each['of_the_rule'] - 1:+.1%} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.2-1b")
    parser.add_argument("--workloads", nargs="+", choices=NAMED, default=["latency", "mixed"])
    parser.add_argument("--trials", type=int, default=3)
    figures_file.add_options(parser)
    options = parser.parse_args()
    with ExitStack() as stack:
        sides = {name: open_side(options.model, blas, stack) for name, blas in CHOICES.items()}
        facts = figures_file.describe(MARK, sides[RULE].subject, options.commit)
        print(f"{sides[RULE].subject.name}, {facts['backend']}\n")
        print("| workload | algorithms | output tokens/s | |\n| --- | --- | --- | --- |")
        found = {}
        for workload in options.workloads:
            found[workload] = measure(sides, workload, options.trials)
            print(*lines(workload, found[workload]), sep="\n", flush=True)
        split = {}
        for name in (FREE, FREE_CUBLAS):
            blas = sides[name].subject.backend._device.blas
            split[name] = blas.splitting()
            print(f"{name}: {split[name]['split']} of {split[name]['shapes']} shapes of cublasLt's products split K")
        figures_file.write(options.json, {**facts, "trials": options.trials, "workloads": found, "split": split})


if __name__ == "__main__":
    run_main(main)
