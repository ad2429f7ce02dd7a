"""`tinyvllm models`: list, download and inspect models."""

from __future__ import annotations

from collections.abc import Sequence

import click

from tinyvllm_cli.cli import completion


@click.group()
def models() -> None:
    """List, download and inspect models."""


_name = click.argument("name", shell_complete=completion.models)
_revision = click.option("--revision", metavar="REV", help="Branch, tag or commit of a Hub model.")


@models.command("list")
def list_models() -> None:
    """Models with a name of their own, and what the Hub cache holds.

    \b
    Example:
      tinyvllm models list
    """
    from tinyvllm_cli.model.inventory import known_models

    _echo_table([("NAME", "SIZE", "LICENCE", "HERE", "WHAT"), *known_models()])


@models.command()
@_name
@_revision
def pull(name: str, revision: str | None) -> None:
    """Fetch the model NAME (catalogue name, Hub id or Hub repo/file.gguf) and print where it is.

    A catalogue file that is here already is read once more, and fetched again where it is damaged.

    \b
    Examples:
      tinyvllm models pull smollm2-135m-instruct
      tinyvllm models pull HuggingFaceTB/SmolLM2-360M-Instruct
    """
    from tinyvllm_cli.model.catalogue import CATALOGUE, discard_damaged
    from tinyvllm_cli.model.hub import find_model

    if name in CATALOGUE:
        discard_damaged(CATALOGUE[name], report=lambda line: click.echo(line, err=True))
    click.echo(find_model(name, revision=revision).path)


@models.command()
@_name
@_revision
def show(name: str, revision: str | None) -> None:
    """Say what the model NAME is. Nothing is fetched.

    \b
    Examples:
      tinyvllm models show smollm2-135m-instruct
      tinyvllm models show ./my-model
    """
    from tinyvllm_cli.describe import describe
    from tinyvllm_cli.model.hub import find_model

    _echo_table(describe(find_model(name, revision=revision, fetch=False)))


def _echo_table(rows: Sequence[tuple[str, ...]]) -> None:
    """Rows as plain text in columns; the last column is as long as it is."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        click.echo("  ".join([*cells, row[-1]]))
