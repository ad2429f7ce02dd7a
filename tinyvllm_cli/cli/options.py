"""Options in groups, shared by the commands that run a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, get_args

import click

from tinyvllm_cli.backends.choose import BackendName, engine_defaults
from tinyvllm_cli.cli.completion import COMPLETIONS
from tinyvllm_cli.config import DEFAULT_MODEL, GPU_MEMORY, MOST, AskedDtype, KVDtypeName, read_memory
from tinyvllm_cli.errors import UsageError

F = TypeVar("F", bound=Callable[..., Any])

RANDOM_WEIGHTS = ("llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b", "smollm2-135m")  # the names of model/presets.py


def text(value: str) -> str:
    """A text and no name of a file: UTF-8, which arguments need not be."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise click.BadParameter(f"{value} is not UTF-8 text") from None
    return value


def some_text(value: str) -> str:
    if not value:
        raise click.BadParameter("the text is empty")
    return text(value)


def _output(value: str) -> str:
    """One name for standard output: a file behind it is the shell's, not to be opened anew and cut."""
    return "-" if value in {"/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"} else value


def _share_or_size(value: str) -> float | int:
    try:
        return read_memory(value)
    except UsageError as error:
        raise click.BadParameter(str(error)) from None


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


def origins(context: click.Context) -> dict[str, str]:
    """Where the value of each option came from, for a run record."""
    found = {name: context.get_parameter_source(name) for name in context.params}
    return {
        name: "default" if source is None else source.name.lower().replace("commandline", "command line")
        for name, source in found.items()
    }


def group(heading: str, *options: tuple[tuple[str, ...], dict[str, Any]]) -> Callable[[F], F]:
    """One decorator for the options of a heading, in the order in which they are given."""

    def decorate(function: F) -> F:
        for names, settings in reversed(options):
            function = click.option(*names, cls=GroupedOption, heading=heading, **settings)(function)
        return function

    return decorate


def option(*names: str, **settings: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    return names, {"shell_complete": COMPLETIONS.get(settings.get("metavar", "")), **settings}


model_options = group(
    "Model",
    option(
        "-m",
        "--model",
        metavar="MODEL",
        default=DEFAULT_MODEL,
        envvar="TINYVLLM_MODEL",
        show_default=True,
        show_envvar=True,
        help="Folder, .gguf file, Hub id, Hub repo/file.gguf, or a name from `tinyvllm models list`.",
    ),
    option("--revision", type=text, metavar="REV", help="Branch, tag or commit of a Hub model."),
    option(
        "--dtype",
        type=click.Choice(get_args(AskedDtype)),
        default="auto",
        show_default=True,
        help="How weights are held. On a GPU auto is the model's own, bfloat16 for GGUF files and float32 models; "
        "float32 is for the CPU; fp8 multiplies the layers' weights in 8 bits, on Hopper, and changes results. On "
        "the CPU auto is float32; the others round in the same way, arithmetic stays float32.",
    ),
)

prompt_options = group(
    "Prompts",
    option(
        "-t",
        "--template",
        type=some_text,
        metavar="TEXT|@FILE",
        help="Prompt of a row: Jinja over its columns; @FILE.json is a list of messages (few-shot). A .csv file needs "
        "it, of a .jsonl file it makes rows.",
    ),
    option(
        "-s",
        "--system",
        type=text,
        metavar="TEXT|@FILE",
        help="System message for prompts and conversations that have none.",
    ),
    option("--raw", is_flag=True, help="Give prompts as they are, without chat template."),
    option(
        "--truncate",
        type=click.Choice(["left"]),
        help="Cut the start of raw prompts and ids that are too long, BOS kept; without it they are errors.",
    ),
    option("--id", type=some_text, metavar="COLUMN", help="Column with the id of a row.  [default: custom_id]"),
    option(
        "--keep",
        type=some_text,
        multiple=True,
        metavar="COLUMN",
        help="Copy this column of a row to the metadata of its answer; '*' is all of them. May be repeated.",
    ),
)

MAX_TOKENS = option("--max-tokens", type=int, metavar="N", help="Tokens of an answer at most.  [default: 512]")
STOP_AND_FORMS = (
    option(
        "--stop",
        type=some_text,
        multiple=True,
        metavar="TEXT",
        help="End the answer before this text; a line end is $'\\n' in most shells. May be repeated.",
    ),
    option(
        "--choice",
        type=text,
        multiple=True,
        metavar="TEXT",
        help="The answer is one of these texts, each with its own --choice: --choice yes --choice no.",
    ),
    option("--json-schema", metavar="FILE", help="The answer is JSON, as the JSON Schema in this file describes it."),
)

answer_options = group(
    "Answers (a line's own fields win)",
    option(
        "-n",
        "n",
        type=int,
        metavar="N",
        help="Answers to each prompt, which those that run at once share; more than 1 needs a temperature.  "
        "[default: 1]",
    ),
    MAX_TOKENS,
    option("--temperature", type=float, metavar="X", help="0 takes the likeliest token each time.  [default: 0]"),
    *STOP_AND_FORMS,
    option(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        show_default=True,
        help="Seed of the run: with it the same file gives the same answers.",
    ),
    option(
        "--set",
        type=text,
        multiple=True,
        metavar="NAME=VALUE",
        help="Any other field of a line, such as top_p=0.9: top_k, min_p, logprobs, regex, grammar, response_format, "
        "stop_token_ids, min_tokens, logit_bias, repetition_penalty, presence_penalty, frequency_penalty, "
        "chat_template_kwargs, ... (docs/lines.md). VALUE is JSON, else a string. May be repeated.",
    ),
    option("--model-sampling", is_flag=True, help="Start from the sampling in the model's generation_config.json."),
)

score_options = group(
    "Scores",
    option("--tokens", is_flag=True, help="Write the logprob of each token, too."),
)

output_options = group(
    "Output",
    option(
        "-o",
        "--output",
        type=_output,
        metavar="FILE",
        default="-",
        show_default=True,
        help="Where the lines go; - is standard output.",
    ),
    option("--resume", is_flag=True, help="Keep what the output holds, and do the rest."),
    option("--overwrite", is_flag=True, help="Replace an output that exists."),
    option(
        "--ordered",
        is_flag=True,
        help="Write in the order of the input, not in that of finishing; a resumed run orders only what it adds.",
    ),
    option("--record", metavar="FILE", help="Run record: what was run and how far it is.  [default: OUTPUT.run.json]"),
    option("-q", "--quiet", is_flag=True, help="Say nothing but errors on standard error."),
)

format_options = group(
    "Output",
    option(
        "--format",
        type=click.Choice(["jsonl", "text"]),
        default="jsonl",
        show_default=True,
        help="text: only the answer, one line for each request in the order of the input. Line ends in it stand as "
        "\\n, backslashes as \\\\, and tabs between the answers of -n.",
    ),
)

work_options = group(
    "Work",
    option(
        "--limit",
        type=click.IntRange(min=0),
        metavar="N",
        help="Only the first N requests; of these --shard takes its part.",
    ),
    option(
        "--shard",
        metavar="I/N",
        help="Only the requests whose index mod N is I, counted from 0: one part of N, each with its own output.",
    ),
    option(
        "--dry-run",
        is_flag=True,
        help="Only check every line, count its tokens, and say which would fail. No weights are read.",
    ),
)

bench_options = group(
    "Workload",
    option(
        "--workload",
        metavar="NAME|FILE",
        default="latency",
        show_default=True,
        help="latency (one request), mixed (256), short (2,000) or prefix (512 behind one prefix), of random token ids "
        "and EOS ignored; or a .jsonl or .txt file as `tinyvllm run` takes it, without n.",
    ),
    option(
        "--trials", type=click.IntRange(1, 1000), default=3, metavar="N", show_default=True, help="Runs that count."
    ),
    option(
        "--random-weights",
        type=click.Choice(RANDOM_WEIGHTS),
        help="In the place of --model: the shape of this model, with random weights made where they are used.",
    ),
    option("--write", metavar="FOLDER", help="Write the random weights as a model folder, which is then timed too."),
)

result_options = group(
    "Output",
    option("--json", metavar="FILE", help="Everything that was measured, each trial, and on what."),
    option("--trace", metavar="FILE", help="Steps, slots and queue of the middle trial, for ui.perfetto.dev."),
)

MACHINE = (
    option(
        "--backend",
        type=click.Choice(get_args(BackendName)),
        default="auto",
        show_default=True,
        help="What computes. auto is the GPU where an NVIDIA device is visible, and the CPU only where none is.",
    ),
    option(
        "--gpu-memory",
        type=_share_or_size,
        default=str(GPU_MEMORY),
        metavar="SHARE|SIZE",
        show_default=True,
        help="Memory of a GPU to take: a share of what is free, or a size such as 20GiB. Of no effect on a CPU.",
    ),
    option(
        "--slots",
        type=click.IntRange(1, MOST["slots"]),
        metavar="N",
        help=f"Requests at once.  [default: {engine_defaults('gpu').slots} on a GPU, "
        f"{engine_defaults('cpu').slots} on a CPU]",
    ),
    option(
        "--max-model-len",
        type=click.IntRange(1, MOST["max_model_len"]),
        metavar="N",
        help="Tokens of a text at most, prompt and answer together.  [default: the model's, or what fits]",
    ),
    option(
        "--kv-dtype",
        type=click.Choice(get_args(KVDtypeName)),
        default="auto",
        show_default=True,
        help="How K and V are held. auto is as they are computed; fp8 takes about half of that on a GPU, and changes "
        "results a little. The CPU rounds them in the same way and holds float32.",
    ),
    option("--no-prefix-cache", is_flag=True, help="Compute each prompt anew, also where others begin alike."),
    option(
        "--threads",
        type=click.IntRange(1, MOST["threads"]),
        metavar="N",
        help="Of the CPU backend.  [default: the CPUs this process may use]",
    ),
)
machine_options = group("Machine", *MACHINE)
