"""`tinyvllm bench`: measure this machine, beside its computed limit."""

from __future__ import annotations

import sys
from typing import Any

import click
from click.core import ParameterSource

from tinyvllm_cli.cli.options import GroupedCommand, bench_options, machine_options, model_options, result_options
from tinyvllm_cli.cli.signals import Interrupted

EPILOG = """\b
Examples:
  tinyvllm bench
  tinyvllm bench --workload mixed --random-weights llama-3.2-1b --json mixed.json --trace mixed.trace.json
  tinyvllm bench --workload latency --random-weights llama-3.2-1b --write ./random-1b
  tinyvllm bench --workload prompts.jsonl -m ./my-model --trials 5
"""


@click.command(cls=GroupedCommand, epilog=EPILOG)
@bench_options
@model_options
@result_options
@machine_options
@click.pass_context
def bench(context: click.Context, /, **options: Any) -> None:
    """Measure this machine, beside its computed limit.

    A workload runs through the same engine as `tinyvllm run`, once to warm up and then a number of times. The table has
    medians, with the least and the most; the limit is the time in which the machine, at the rates that are measured
    first, could read the weights and multiply them with every token.
    """
    if options["random_weights"] is not None:
        if context.get_parameter_source("model") is ParameterSource.COMMANDLINE:
            raise click.UsageError("--model and --random-weights are two models: give one of them")
        options["model"] = None
    from tinyvllm_cli.bench.bench import BenchOptions, run_bench
    from tinyvllm_cli.bench.subject import model_option
    from tinyvllm_cli.said import warn

    try:
        run_bench(BenchOptions(**options), command=sys.argv, hold=context.obj.hold)
    except Interrupted:
        model = options["write"] and model_option(options["write"])
        written = f"; the model in {options['write']} is whole: {model} uses it" if model else ""
        warn(f"stopped before the end: no figures are kept{written}")
        raise
