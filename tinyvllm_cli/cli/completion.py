"""Completion for bash, zsh and fish: click's own, with a function for bash that takes words as the other two do."""

from __future__ import annotations

import os

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    add_completion_class,
    shell_complete,
    split_arg_string,
)

VARIABLE = "_TINYVLLM_COMPLETE"  # the name that click gives it
INSTRUCTIONS = [f"{shell}_{what}" for shell in ("bash", "zsh", "fish") for what in ("source", "complete")]

# Unlike click's: files beside other answers, no blank behind NAME=, and the line as it was typed instead of bash's own
# words, which end at "=" and "@" too. `filenames` has readline escape names and close folders with a slash.
BASH = """\
%(complete_func)s() {
    local kind value
    COMPREPLY=()
    while IFS=, read -r kind value; do
        if [[ -z $kind ]]; then
            continue
        elif [[ $kind == file ]]; then
            compopt -o filenames
            mapfile -t -O ${#COMPREPLY[@]} COMPREPLY < <(compgen -f -- "$value")
        else
            [[ $value == *= ]] && compopt -o nospace
            COMPREPLY+=("$value")
        fi
    done < <(COMP_WORDS="${COMP_LINE:0:COMP_POINT}" %(complete_var)s=bash_complete "$1")
}
complete -o nosort -F %(complete_func)s %(prog_name)s
"""


@add_completion_class
class Bash(BashComplete):
    source_template = BASH

    def get_completion_args(self) -> tuple[list[str], str]:
        words = split_arg_string(os.environ["COMP_WORDS"] + "x")  # the last word is there, also where it is empty
        return words[1:-1], words[-1][:-1]


def complete(command: click.Command, instruction: str) -> int:
    """Answer a shell's question, or give it its function (bash_source); the exit code. UsageError for another one."""
    if instruction not in INSTRUCTIONS:
        raise click.UsageError(f"{VARIABLE} is {instruction!r}, wanted one of {', '.join(INSTRUCTIONS)}")
    try:
        return shell_complete(command, {}, "tinyvllm", VARIABLE, instruction)
    except (KeyError, ValueError):  # words that are missing, no number or no text: there is nothing to offer
        return 0


def files(context: click.Context, parameter: click.Parameter, typed: str) -> list[CompletionItem]:  # noqa: ARG001
    return [CompletionItem(typed, type="file")]


def models(context: click.Context, parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    """Names of the catalogue, and files."""
    from tinyvllm_cli.model.catalogue import CATALOGUE

    names = [CompletionItem(name) for name in CATALOGUE if name.startswith(typed)]
    return [*names, *files(context, parameter, typed)]


def settings(context: click.Context, parameter: click.Parameter, typed: str) -> list[CompletionItem]:  # noqa: ARG001
    """NAME= of each field that --set takes."""
    from tinyvllm_cli.io.fields import ANSWER_FIELDS, FIELDS, PROMPT_FIELDS

    settable = ANSWER_FIELDS | PROMPT_FIELDS
    return [CompletionItem(f"{name}=") for name in FIELDS if name in settable and name.startswith(typed)]


def workloads(context: click.Context, parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    """Names of benchmarks, and files."""
    from tinyvllm_cli.bench.workloads import NAMED

    return [*(CompletionItem(name) for name in NAMED if name.startswith(typed)), *files(context, parameter, typed)]


# By what the help calls the value of an option.
COMPLETIONS = {"FILE": files, "FOLDER": files, "MODEL": models, "NAME=VALUE": settings, "NAME|FILE": workloads}
