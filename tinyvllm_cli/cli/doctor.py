"""`tinyvllm doctor`: check this machine, and a known answer."""

from __future__ import annotations

import click


@click.command()
@click.pass_context
def doctor(context: click.Context) -> None:
    """Check this machine, and a known answer.

    The default model is fetched where it is not here yet (93 MB, once). Exit code 1 if a check fails.

    \b
    Example:
      tinyvllm doctor
    """
    from tinyvllm_cli.doctor import run_checks

    all_ok = True
    for check in run_checks(report=lambda line: click.echo(line, err=True)):
        all_ok &= check.ok
        click.echo(f"{'ok' if check.ok else 'no':3} {check.name}: {check.found}")
        if check.mend and not check.ok:
            click.echo(f"    to mend: {check.mend}")
    context.exit(0 if all_ok else 1)
