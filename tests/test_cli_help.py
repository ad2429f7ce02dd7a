"""The help pages: each has examples, and every example is a command that there is."""

import re
import shlex
from collections.abc import Iterator

import click
import pytest

from tinyvllm_cli.cli import tinyvllm
from tinyvllm_cli.cli.run import run
from tinyvllm_cli.io.fields import ANSWER_FIELDS, PROMPT_FIELDS
from tinyvllm_cli.run_options import RunOptions


def pages(command: click.Command, parent: click.Context | None = None) -> Iterator[tuple[click.Command, str]]:
    """Every command that does something, with its help page; lines are not broken."""
    context = command.make_context("", [], parent, resilient_parsing=True)
    context.terminal_width = 500
    if not isinstance(command, click.Group):
        yield command, command.get_help(context)
        return
    for name in command.list_commands(context):
        child = command.get_command(context, name)
        assert child is not None
        yield from pages(child, context)


def examples(page: str) -> list[list[str]]:
    """The words behind each `tinyvllm` of a page's examples, up to the next pipe."""
    found = []
    for line in re.split(r"Examples?:\n", page)[1].splitlines():
        words = list(shlex.shlex(line, posix=True, punctuation_chars="|"))
        for i in [i for i, word in enumerate(words) if word == "tinyvllm"]:
            found.append([*words[i + 1 :], "|"][: [*words[i + 1 :], "|"].index("|")])
    return found


def parse(words: list[str]) -> click.Context:
    """The command that these words ask for, with its options; click.UsageError where there is none."""
    command, context = tinyvllm, tinyvllm.make_context("", [], resilient_parsing=True)
    while isinstance(command, click.Group):
        name, *words = words
        inner = command.get_command(context, name)
        assert inner is not None, name
        command = inner
    return command.make_context(name, words, parent=context)


def test_every_page_has_examples_that_are_its_command():
    for command, page in pages(tinyvllm):
        found = examples(page)
        assert found, page
        for words in found:
            context = parse(words)
            assert context.command is command, words
            if command.name == "run":
                options = RunOptions(**context.params)
                options.check()
                options.settings(None)


def test_the_first_page_has_examples_that_are_commands():
    context = tinyvllm.make_context("", [], resilient_parsing=True)
    context.terminal_width = 500
    *found, last = examples(tinyvllm.get_help(context))
    assert found
    for words in found:
        parse(words)
    with pytest.raises(click.exceptions.Exit):  # what --help does
        parse(last)


OPTIONS = {parameter.name for parameter in run.params}


@pytest.mark.parametrize("name", sorted((ANSWER_FIELDS | PROMPT_FIELDS) - OPTIONS))
def test_a_field_that_is_no_option_is_told_as_one_of_set(said, name: str):
    option = f"--{name.replace('_', '-')}"
    for words in [option, "1"], [f"{option}=1"]:
        code, _, err = said("run", "in.jsonl", *words)
        wanted = f"error: No such option '{option}': write --set {name}=VALUE; see `tinyvllm run --help`\n"
        assert (code, err) == (2, wanted)
    assert "--set" not in said("score", "in.jsonl", option)[2], "which has none"


def test_the_page_of_scores_speaks_of_no_answers():
    page = {command.name: page for command, page in pages(tinyvllm)}["score"]
    assert "answers" not in page and "answered" not in page
