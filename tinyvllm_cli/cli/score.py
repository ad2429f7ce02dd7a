"""`tinyvllm score`: log-likelihood and perplexity of given texts."""

from __future__ import annotations

import sys
from typing import Any

import click

from tinyvllm_cli.backends.gpu.wake import wake_gpu
from tinyvllm_cli.cli.completion import files
from tinyvllm_cli.cli.options import (
    GroupedCommand,
    machine_options,
    model_options,
    origins,
    output_options,
    score_options,
    work_options,
)

EPILOG = """\b
Examples:
  tinyvllm score texts.jsonl -o scores.jsonl
  tinyvllm score sentences.txt -m ./my-model --tokens -o scores.jsonl
  cat pairs.jsonl | tinyvllm score - -q | jq '.scores[].logprob'
  tinyvllm score texts.jsonl --dry-run
"""


@click.command(cls=GroupedCommand, epilog=EPILOG)
@click.argument("input", metavar="INPUT", required=False, shell_complete=files)
@model_options
@score_options
@output_options
@work_options
@machine_options
@click.pass_context
def score(context: click.Context, /, **options: Any) -> None:
    """Log-likelihood and perplexity of given texts.

    INPUT is a .jsonl file (one JSON object a line, with "text", or with "context" and a list of "continuations"), a
    .txt file (one text a line), or - for JSON lines on standard input. Texts are given to the model as they are. A line
    that cannot be scored gets an error; the others go on.
    """
    if options["input"] is None:
        raise click.UsageError(
            "Missing argument 'INPUT': give a .jsonl or .txt file, or - for JSON lines on standard input", context
        )
    if not options["dry_run"]:
        wake_gpu(options["backend"])
    from tinyvllm_cli.score_file import ScoreOptions, score_file

    context.exit(score_file(ScoreOptions(**options), origins=origins(context), command=sys.argv, hold=context.obj.hold))
