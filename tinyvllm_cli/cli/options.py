"""Options in groups, shared by the commands that run a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from tinyvllm_cli.config import DEFAULT_MODEL

F = TypeVar("F", bound=Callable[..., Any])


def _text(value: str) -> str:
    """A text and no name of a file: UTF-8, which arguments need not be."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise click.BadParameter(f"{value} is not UTF-8 text") from None
    return value


def _some_text(value: str) -> str:
    if not value:
        raise click.BadParameter("the text is empty")
    return _text(value)


class GroupedOption(click.Option):
    """An option that stands under a heading of the help page."""

    def __init__(self, *args: Any, heading: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.heading = heading


class GroupedCommand(click.Command):
    """A command whose help page shows its options under their headings."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None and isinstance(parameter, click.Option):
                sections.setdefault(getattr(parameter, "heading", "Help"), []).append(record)
        for heading, records in sections.items():
            with formatter.section(heading):
                formatter.write_dl(records)


def _group(heading: str, *options: tuple[tuple[str, ...], dict[str, Any]]) -> Callable[[F], F]:
    """One decorator for the options of a heading, in the order in which they are given."""

    def decorate(function: F) -> F:
        for names, settings in reversed(options):
            function = click.option(*names, cls=GroupedOption, heading=heading, **settings)(function)
        return function

    return decorate


def _option(*names: str, **settings: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    return names, settings


model_options = _group(
    "Model",
    _option(
        "-m",
        "--model",
        metavar="MODEL",
        default=DEFAULT_MODEL,
        envvar="TINYVLLM_MODEL",
        show_default=True,
        show_envvar=True,
        help="Folder, .gguf file, Hub id, Hub repo/file.gguf, or a name from `tinyvllm models list`.",
    ),
    _option("--revision", type=_text, metavar="REV", help="Branch, tag or commit of a Hub model."),
    _option(
        "--dtype",
        type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
        default="auto",
        show_default=True,
        help="On the CPU auto is float32; the others round the weights, arithmetic stays float32.",
    ),
)

prompt_options = _group(
    "Prompts",
    _option(
        "-s",
        "--system",
        type=_text,
        metavar="TEXT|@FILE",
        help="System message for prompts and conversations that have none.",
    ),
    _option("--raw", is_flag=True, help="Give prompts as they are, without chat template."),
)

answer_options = _group(
    "Answers (a line's own fields win)",
    _option("--max-tokens", type=int, metavar="N", help="Tokens of an answer at most.  [default: 512]"),
    _option("--temperature", type=float, metavar="X", help="0 takes the likeliest token each time.  [default: 0]"),
    _option(
        "--stop",
        type=_some_text,
        multiple=True,
        metavar="TEXT",
        help="End the answer before this text. May be repeated.",
    ),
    _option(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        show_default=True,
        help="Seed of the run: with it the same file gives the same answers.",
    ),
    _option(
        "--set",
        type=_text,
        multiple=True,
        metavar="NAME=VALUE",
        help="Any other field of a line, such as top_p=0.9; VALUE is JSON, else a string. May be repeated.",
    ),
    _option("--model-sampling", is_flag=True, help="Start from the sampling in the model's generation_config.json."),
)

output_options = _group(
    "Output",
    _option(
        "-o", "--output", metavar="FILE", default="-", show_default=True, help="Where answers go; - is standard output."
    ),
    _option("--overwrite", is_flag=True, help="Replace an output that exists."),
    _option("--record", metavar="FILE", help="Run record: what was run and how far it is.  [default: OUTPUT.run.json]"),
    _option("-q", "--quiet", is_flag=True, help="Say nothing but errors on standard error."),
)

work_options = _group(
    "Work",
    _option("--limit", type=click.IntRange(min=0), metavar="N", help="Only the first N requests."),
)

machine_options = _group(
    "Machine",
    _option(
        "--backend",
        type=click.Choice(["auto", "cpu"]),
        default="auto",
        show_default=True,
        help="What computes. In this version auto is the CPU.",
    ),
    _option(
        "--slots",
        type=click.IntRange(1, 2**16),
        default=32,
        metavar="N",
        show_default=True,
        help="Requests answered at once.",
    ),
    _option(
        "--max-model-len",
        type=click.IntRange(1, 2**31 - 1),
        metavar="N",
        help="Tokens of prompt and answer together at most.  [default: the model's, or what fits]",
    ),
    _option("--threads", type=click.IntRange(1, 4096), metavar="N", help="[default: the CPUs this process may use]"),
)
