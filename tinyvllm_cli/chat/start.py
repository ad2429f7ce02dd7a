"""`tinyvllm chat`, from its options to its exit code: cheap checks, then the model, then the conversation."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from tinyvllm_cli.chat.display import make_answer_display
from tinyvllm_cli.chat.notes import note
from tinyvllm_cli.chat.options import ChatOptions
from tinyvllm_cli.chat.session import Session
from tinyvllm_cli.chat.settings import Settings
from tinyvllm_cli.errors import EXIT_OK, ModelError, UsageError
from tinyvllm_cli.io.conversations import Stamp, read_conversation
from tinyvllm_cli.io.prompts import read_lines
from tinyvllm_cli.io.settings import read_text_option
from tinyvllm_cli.io.source import STDIN, open_stdin
from tinyvllm_cli.said import warn
from tinyvllm_cli.types import Message

if TYPE_CHECKING:
    from tinyvllm_cli.cli.signals import Interrupts
    from tinyvllm_cli.load import LoadedModel, Prepared
    from tinyvllm_cli.text.codec import TextCodec

# What is done with a session and its model, once they are there; the exit code.
Conversation: TypeAlias = "Callable[[Session, LoadedModel], int]"


def run_chat(options: ChatOptions, interrupts: Interrupts) -> int:
    """Talk, or ask one thing; the exit code. TinyvllmError where that cannot be."""
    options.check()
    schema = None if options.json_schema is None else f"@{options.json_schema}"
    settings = options.settings(read_text_option("--json-schema", schema, takes_input=options.takes_input))
    messages, stamp = _first_messages(options)
    with ExitStack() as stack:
        conversation = _conversation(options, messages, interrupts, stack)
        if conversation is None:
            return EXIT_OK
        prepared = stack.enter_context(closing(_prepare(options)))
        codec, sampling = prepared.text.codec, prepared.text.checkpoint.generation.sampling
        _check_template(codec, options)
        options.check_form(settings, codec)
        in_force = Settings(settings, sampling, codec)
        session = Session(in_force, run_seed=options.seed, messages=messages)
        if options.load is not None and stamp is not None:
            session.keep_in(Path(options.load).resolve(), stamp)
        from tinyvllm_cli.load import load

        with closing(load(prepared)) as loaded:
            return conversation(session, loaded)


def _prepare(options: ChatOptions) -> Prepared:
    from tinyvllm_cli.load import prepare

    return prepare(
        options.model,
        revision=options.revision,
        backend=options.backend,
        config=options.engine_options(),
        report=warn,
    )


def _conversation(
    options: ChatOptions, messages: tuple[Message, ...], interrupts: Interrupts, stack: ExitStack
) -> Conversation | None:
    """Which of the three it is: one prompt, at a terminal, or turns on standard input. None: nothing is asked.

    stack: is closed when it is over.
    """
    prompt = options.prompt()
    open_display = partial(make_answer_display, plain=options.plain)
    if prompt is not None:
        from tinyvllm_cli.chat.once import answer_once

        return partial(answer_once, open_display=open_display, prompt=prompt, took_input=options.takes_input)
    if os.isatty(STDIN) and (sys.stdout.isatty() or sys.stderr.isatty()):
        from tinyvllm_cli.chat.keys import Keys

        keys = Keys(interrupts)
        stack.enter_context(keys.quiet())  # before all that takes a while: what is typed meanwhile is for the prompt
        note(f"loading {options.model}")
        from tinyvllm_cli.chat.repl import talk_at_terminal

        return partial(talk_at_terminal, open_display=open_display, interrupts=interrupts, keys=keys)
    from tinyvllm_cli.chat.turns import talk_through

    lines = read_lines(open_stdin("turns, one a line").stream)
    first = next(lines, None)
    waits = bool(messages) and messages[-1].role == "user"
    return partial(talk_through, lines=chain([first] if first else [], lines)) if first or waits else None


def _first_messages(options: ChatOptions) -> tuple[tuple[Message, ...], Stamp | None]:
    """What the conversation starts with, and the stamp of the file that it stands in. UsageError."""
    messages: tuple[Message, ...] = ()
    stamp = None
    if options.load is not None:
        try:
            messages, stamp = read_conversation(Path(options.load))
        except UsageError as error:
            raise UsageError(f"--load: {error}") from None
        if options.words and messages[-1].role == "user":
            raise UsageError(
                f"the last turn of {options.load} has no answer yet: leave out the prompt, then it gets one"
            )
    system = read_text_option("--system", options.system, takes_input=options.takes_input)
    if system is None:
        return messages, stamp
    if any(message.role == "system" for message in messages):
        raise UsageError(f"{options.load} has a system message of its own: leave out --system, or change it by /system")
    return (Message("system", system.text), *messages), stamp


def _check_template(codec: TextCodec, options: ChatOptions) -> None:
    """ModelError where what is asked needs a chat template and the model has none."""
    if codec.template is not None:
        return
    if not options.words or options.load is not None:
        raise ModelError(
            "a conversation needs a chat template, and the model has none: take a chat model, or give it one prompt as "
            'it is with `tinyvllm chat "PROMPT"`'
        )
    if options.system is not None:
        raise ModelError("a system message needs a chat template, and the model has none")
