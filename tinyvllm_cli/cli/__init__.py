"""The command `tinyvllm`: finds the subcommand, and turns every way it can end into an exit code and one line."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import NoReturn

import click

from tinyvllm_cli import __version__
from tinyvllm_cli.cli.completion import VARIABLE, complete
from tinyvllm_cli.cli.signals import Interrupted, Interrupts
from tinyvllm_cli.errors import EXIT_FAILED, EXIT_OK, EXIT_PIPE, OutputClosedError, TinyvllmError
from tinyvllm_cli.said import warn
from tinyvllm_cli.stdout import name_stdout

# Each name is also that of a module here and of the command in it, which is imported only when it is needed.
COMMANDS = {
    "run": "Answer every line of a file, one JSON line each.",
    "chat": "Talk to a model, or ask it one thing.",
    "score": "Log-likelihood and perplexity of given texts.",
    "models": "List, download and inspect models.",
    "bench": "Measure this machine, beside its computed limit.",
    "doctor": "Check this machine, and a known answer.",
}

EPILOG = """\b
Examples:
  tinyvllm run prompts.jsonl -o answers.jsonl
  tinyvllm chat
  tinyvllm models list
  tinyvllm run --help

\b
Completion in bash, in ~/.bashrc (zsh and fish: docs/cli.md):
  eval "$(_TINYVLLM_COMPLETE=bash_source tinyvllm)"
"""


class LazyGroup(click.Group):
    """A group whose help needs none of its commands."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in COMMANDS:
            return None
        command = getattr(import_module(f"tinyvllm_cli.cli.{cmd_name}"), cmd_name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=EPILOG,
)
@click.version_option(__version__, prog_name="tinyvllm")
def tinyvllm() -> None:
    """Batch inference for Llama-family language models: a file of prompts in, a file of answers out."""


def main() -> NoReturn:
    """Run the command line of this process and end it."""
    _open_standard_streams()
    interrupts = Interrupts()
    interrupts.install()
    try:
        code = exit_code(partial(_command, interrupts))
    except Interrupted as error:
        code = error.exit_code
    sys.exit(code)


def _command(interrupts: Interrupts) -> object:
    """What the user asks for, or the shell on its way to the command line."""
    if instruction := os.environ.get(VARIABLE):
        return complete(tinyvllm, instruction)
    return tinyvllm.main(prog_name="tinyvllm", standalone_mode=False, obj=interrupts)


def exit_code(command: Callable[[], object]) -> int:
    """Run `command`; its exit code, after one line on standard error where it did not end well."""
    try:
        result = command()
    except (OutputClosedError, BrokenPipeError, SystemExit):  # click exits where its own output finds no reader
        return EXIT_PIPE
    except click.ClickException as error:
        return _not_understood(error)
    except Exception as error:
        return _failed(error)
    return result if isinstance(result, int) else EXIT_OK


def _not_understood(error: click.ClickException) -> int:
    if isinstance(error, getattr(click.exceptions, "NoArgsIsHelpError", ())):  # its message is the whole help page
        with suppress(OSError):
            error.show()
        return error.exit_code
    context = error.ctx if isinstance(error, click.UsageError) else None
    hint = f"; see `{context.command_path} --help`" if context else ""
    if isinstance(error, click.NoSuchOption) and context:
        instead = _instead(error.option_name, context.command)
        return _say(f"No such option '{error.option_name}'{instead}{hint}", error.exit_code)
    return _say(error.format_message().rstrip(".") + hint, error.exit_code)


def _instead(option: str, command: click.Command) -> str:
    """What could be written in the place of an option that there is not, as the rest of a sentence."""
    from tinyvllm_cli.io.fields import ANSWER_FIELDS, PROMPT_FIELDS, nearest

    name = option.lstrip("-").replace("-", "_")
    if name in ANSWER_FIELDS | PROMPT_FIELDS and "set" in {each.name for each in command.params}:
        return f": write --set {name}=VALUE"
    near = nearest(option, [each for parameter in command.params for each in parameter.opts])
    return f" (did you mean {near}?)" if near else ""


def _failed(error: Exception) -> int:
    if isinstance(error, TinyvllmError):
        return _say(str(error), error.exit_code)
    # A library that cannot be mapped is an ImportError.
    if isinstance(error, MemoryError) or (isinstance(error, ImportError) and "map segment" in str(error)):
        return _say(
            "out of memory: try a smaller model, fewer --slots or a smaller --max-model-len, or free some memory or "
            "raise its limit (of the container, or `ulimit -v`)"
        )
    if isinstance(error, RuntimeError) and "start new thread" in str(error):
        return _say(
            "this process may not start more threads: end others, or raise the limit of the container or `ulimit -u`"
        )
    if isinstance(error, OSError):  # the machine's fault: a full disk, a device that fails, a file that went away
        return _say(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}")
    return _internal_error(error)


def _say(message: str, code: int = EXIT_FAILED) -> int:
    warn("error: " + " ".join(message.split()))
    return code


def _internal_error(error: Exception) -> int:
    """A bug: the traceback goes to a file, so that it is there to be reported and in nobody's way."""
    where = ""
    with suppress(Exception):  # whatever is broken, the line below is said
        import tempfile
        import traceback

        with tempfile.NamedTemporaryFile("w", prefix="tinyvllm-", suffix=".txt", delete=False) as file:
            file.write(f"tinyvllm {__version__}: {sys.argv}\n" + "".join(traceback.format_exception(error)))
        where = f"; please report it with {file.name}"
    return _say(f"internal error: {type(error).__name__}: {error} (this is a bug{where})")


def _open_standard_streams() -> None:
    """Where one of them was closed, the first file that is opened would take its place, and its text."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            # It gets the lowest number that is free. To read from 0 or to write to the others fails: nothing is lost.
            os.open(os.devnull, os.O_RDONLY if fd else os.O_WRONLY)
    name_stdout()
    if sys.stderr is None:
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115  nobody listens, and no code need ask
