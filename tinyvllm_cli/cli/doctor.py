"""`tinyvllm doctor`: check this machine, and a known answer; or compare the GPU with the CPU, op by op."""

from __future__ import annotations

import click
from click.core import ParameterSource

from tinyvllm_cli.cli.completion import models
from tinyvllm_cli.config import DEFAULT_MODEL


@click.command()
@click.option(
    "--compare",
    type=click.Choice(["cpu"]),
    help="Instead, answer one prompt on the GPU and the CPU, and name the first op that differs beyond its tolerance.",
)
@click.option(
    "-m",
    "--model",
    metavar="MODEL",
    default=DEFAULT_MODEL,
    envvar="TINYVLLM_MODEL",
    show_default=True,
    show_envvar=True,
    shell_complete=models,
    help="The model of --compare; the checks are made with the default one.",
)
@click.pass_context
def doctor(context: click.Context, compare: str | None, model: str) -> None:
    """Check this machine, and a known answer.

    The default model is fetched where it is not here yet (93 MB, once). Exit code 1 if a check fails.

    \b
    Examples:
      tinyvllm doctor
      tinyvllm doctor --compare cpu
    """
    if compare is None and context.get_parameter_source("model") is ParameterSource.COMMANDLINE:
        raise click.UsageError("--model is for --compare cpu, without it the default model answers")
    from tinyvllm_cli.doctor import compare_backends, run_checks

    def report(line: str) -> None:
        click.echo(line, err=True)

    all_ok = True
    for check in run_checks(report) if compare is None else compare_backends(model, report):
        all_ok &= check.ok
        click.echo(f"{'ok' if check.ok else 'no':3} {check.name}: {check.found}")
        if check.mend and not check.ok:
            click.echo(f"    to mend: {check.mend}")
    context.exit(0 if all_ok else 1)
