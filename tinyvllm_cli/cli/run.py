"""`tinyvllm run`: answer every line of a file."""

from __future__ import annotations

import sys
from typing import Any

import click

from tinyvllm_cli.backends.gpu.wake import wake_gpu
from tinyvllm_cli.cli.completion import files
from tinyvllm_cli.cli.options import (
    GroupedCommand,
    answer_options,
    format_options,
    machine_options,
    model_options,
    origins,
    output_options,
    prompt_options,
    work_options,
)

EPILOG = """\b
Examples:
  tinyvllm run prompts.jsonl -o answers.jsonl
  tinyvllm run questions.txt -m ./my-model -s "Answer in one word." --max-tokens 8
  cat prompts.jsonl | tinyvllm run - -q | jq -r '.choices[0].text'
  tinyvllm run prompts.jsonl -o warm.jsonl --temperature 0.7 --set top_p=0.9 --seed 1
  tinyvllm run prompts.jsonl -o votes.jsonl -n 8 --temperature 0.7
  tinyvllm run reviews.csv -t "What is this review about? {{ review }}" --keep '*' -o about.jsonl
  tinyvllm run reviews.csv -t "Is this review kind? {{ review }}" --choice yes --choice no -o kind.jsonl
  tinyvllm run prompts.jsonl --dry-run
"""


@click.command(cls=GroupedCommand, epilog=EPILOG)
@click.argument("input", metavar="INPUT", required=False, shell_complete=files)
@model_options
@prompt_options
@answer_options
@output_options
@format_options
@work_options
@machine_options
@click.pass_context
def run(context: click.Context, /, **options: Any) -> None:
    """Answer every line of a file, one JSON line each.

    INPUT is a .jsonl file (one JSON object a line, with "prompt", "messages" or "prompt_token_ids"), a .txt file (one
    prompt a line), a .csv file (rows for --template), or - for JSON lines on standard input. A line that cannot be
    answered gets an error; the others go on.
    """
    if options["input"] is None:  # never read from standard input unasked: a run would wait for a terminal in silence
        raise click.UsageError(
            "Missing argument 'INPUT': give a .jsonl, .csv or .txt file, or - for JSON lines on standard input",
            context,
        )
    if not options["dry_run"]:
        wake_gpu(options["backend"])
    from tinyvllm_cli.run_file import run_file
    from tinyvllm_cli.run_options import RunOptions

    context.exit(run_file(RunOptions(**options), origins=origins(context), command=sys.argv, hold=context.obj.hold))
