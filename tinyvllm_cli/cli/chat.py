"""`tinyvllm chat`: talk to a model, or ask it one thing."""

from __future__ import annotations

from typing import Any

import click

from tinyvllm_cli.backends.gpu.wake import wake_gpu
from tinyvllm_cli.cli.options import (
    MACHINE,
    MAX_TOKENS,
    STOP_AND_FORMS,
    GroupedCommand,
    group,
    model_options,
    option,
    text,
)

EPILOG = """\b
Examples:
  tinyvllm chat
  tinyvllm chat "Name three rivers of Africa."
  git diff | tinyvllm chat "What does this change?" -
  tinyvllm chat -s "You are a pirate." --temperature 0.9 --set top_p=0.95
  tinyvllm chat --load talk.jsonl
  tinyvllm chat --load talk.jsonl "And in one sentence?"
  tinyvllm chat "Is the sky green?" --choice yes --choice no
  tinyvllm chat --plain < turns.txt
"""

chat_options = group(
    "Conversation",
    option("-s", "--system", type=text, metavar="TEXT|@FILE", help="How the model is to answer: the system message."),
    option("--load", metavar="FILE", help='Go on with a saved conversation: one line {"messages": [...]}.'),
)

answer_options = group(
    "Answers",
    MAX_TOKENS,
    option(
        "--temperature",
        type=float,
        metavar="X",
        help="0 takes the likeliest token each time.  [default: that of the model's generation_config.json, else 0.7]",
    ),
    *STOP_AND_FORMS,
    option(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        show_default=True,
        help="With it the same conversation gets the same answers.",
    ),
    option(
        "--set",
        type=text,
        multiple=True,
        metavar="NAME=VALUE",
        help="Any other field of an answer, such as top_p=0.9: top_k, min_p, regex, grammar, response_format, "
        "stop_token_ids, min_tokens, logit_bias, repetition_penalty, presence_penalty, frequency_penalty, "
        "chat_template_kwargs, ... (docs/lines.md). VALUE is JSON, else a string. May be repeated.",
    ),
)

display_options = group(
    "Output",
    option("--plain", is_flag=True, help="The answers as they are, also on a terminal: no Markdown, no colours."),
)


@click.command(cls=GroupedCommand, epilog=EPILOG)
@click.argument("words", metavar="[PROMPT [-]]", nargs=-1, type=text)
@model_options
@chat_options
@answer_options
@display_options
@group("Machine", *(each for each in MACHINE if "--slots" not in each[0]))
@click.pass_context
def chat(context: click.Context, /, **options: Any) -> None:
    """Talk to a model, or ask it one thing.

    Without PROMPT a conversation at the terminal; /help there lists its commands. With PROMPT one answer on standard
    output; a - behind it puts standard input after the prompt, and a - alone makes standard input the prompt. Where
    standard input is no terminal, and there is no PROMPT, each of its lines is a turn.
    """
    wake_gpu(options["backend"])
    from tinyvllm_cli.chat.options import ChatOptions
    from tinyvllm_cli.chat.start import run_chat

    context.exit(run_chat(ChatOptions(**options), context.obj))
