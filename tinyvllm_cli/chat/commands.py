"""What begins with a slash: the commands of a conversation."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from tinyvllm_cli.chat.session import Session
from tinyvllm_cli.chat.settings import UNFIT
from tinyvllm_cli.errors import UsageError
from tinyvllm_cli.io.conversations import write_conversation
from tinyvllm_cli.io.fields import ANSWER_FIELDS, FIELDS, PROMPT_FIELDS, nearest

Next: TypeAlias = Literal["prompt", "answer", "end"]  # what comes after a command
Say: TypeAlias = Callable[[str], None]

SHOWN_CHARS = 70  # of a text, on the line that says what became of it


@dataclass(frozen=True, slots=True)
class Command:
    """run: what it does with the session and the rest of its line; UsageError, and nothing is changed, where it cannot
    be done."""

    run: Callable[[Session, str, Say], Next]
    argument: str
    help: str


def run_command(line: str, session: Session, say: Say) -> Next:
    """Do what a line says that begins with a slash. UsageError, whatever goes wrong: it must not end a conversation."""
    name, rest = [*line.split(maxsplit=1), ""][:2]
    rest = rest.strip()
    command = _find(name, rest)
    if rest and not command.argument:
        raise UsageError(f"{name} stands alone, found {shorten(rest)!r} behind it")
    try:
        return command.run(session, rest, say)
    except UsageError:
        raise
    except (OSError, ValueError) as error:
        raise UsageError(f"{name}: {error}") from None


def _find(name: str, rest: str) -> Command:
    """The command of a name. UsageError where there is none."""
    lower = name.lower()
    command = COMMANDS.get(OTHER_NAMES.get(lower, lower))
    if command is not None:
        return command
    if lower == "/load":
        raise UsageError(
            f"a saved conversation goes on in a new chat: `tinyvllm chat --load {shorten(rest) or 'FILE'}`"
        )
    near = nearest(lower, COMMANDS)
    if near is not None:
        raise UsageError(f"unknown command {shorten(name)}, did you mean {near}?")
    other = "/help lists those that there are, and a turn that begins with / has a space before it"
    raise UsageError(f"unknown command {shorten(name)}: {other}")


def complete(line: str) -> list[str]:
    """What the last word of a line may be: a command, or a field of /set."""
    before, _, word = line.rpartition(" ")
    words = {"": [f"{name} " if command.argument else name for name, command in COMMANDS.items()]}
    words["/set"] = [f"{name} " for name in FIELDS if name in (ANSWER_FIELDS | PROMPT_FIELDS) - UNFIT.keys()]
    return [found for found in words.get(before, []) if (word or before) and found.startswith(word)]


def shorten(text: str, size: int = SHOWN_CHARS) -> str:
    """On one line."""
    text = " ".join(text[: 4 * size].split())
    return text if len(text) <= size else text[: size - 3] + "..."


def _help(session: Session, rest: str, say: Say) -> Next:  # noqa: ARG001
    for name, command in COMMANDS.items():
        say(f"{f'{name} {command.argument}':18}{command.help}")
    return "prompt"


def _new(session: Session, rest: str, say: Say) -> Next:  # noqa: ARG001
    session.clear()
    say("a new conversation" + (" with the same system message" if session.system is not None else ""))
    return "prompt"


def _system(session: Session, rest: str, say: Say) -> Next:
    if rest:
        session.system = None if rest == "-" else rest
    found = session.system
    say("no system message" if found is None else f"system message: {found}")
    return "prompt"


def _set(session: Session, rest: str, say: Say) -> Next:
    if rest:
        name, value = [*re.split(r"\s*[\s=]\s*", rest, maxsplit=1), ""][:2]
        if not value:
            raise UsageError(f"found /set {shorten(rest)}, wanted /set NAME VALUE, for example /set top_p 0.9")
        session.settings.assign(name, value)
    say(session.settings.describe())
    return "prompt"


def _undo(session: Session, rest: str, say: Say) -> Next:  # noqa: ARG001
    say(f"taken back: {shorten(session.undo())}")
    return "prompt"


def _retry(session: Session, rest: str, say: Say) -> Next:  # noqa: ARG001
    session.retry()
    return "answer"


def _save(session: Session, rest: str, say: Say) -> Next:
    try:
        path = Path(rest).expanduser().resolve() if rest else session.file
    except RuntimeError as error:  # no such home, a loop of links
        raise UsageError(f"cannot write {shorten(rest)}: {error}") from None
    if path is None:
        raise UsageError("found /save, wanted /save FILE: this conversation has no file yet")
    if not session.messages:
        raise UsageError("there is nothing yet that could be saved")
    session.keep_in(path, write_conversation(path, session.messages, session.files.get(path)))
    say(f"saved: `tinyvllm chat --load {shlex.quote(str(path))}` goes on with it")
    return "prompt"


def _quit(session: Session, rest: str, say: Say) -> Next:  # noqa: ARG001
    return "end"


COMMANDS = {
    "/help": Command(_help, "", "this list"),
    "/new": Command(_new, "", "start over, with the same system message"),
    "/system": Command(_system, "TEXT", "how the model is to answer; - is nothing; alone: what it is"),
    "/set": Command(_set, "NAME VALUE", "as --set; null takes it back; alone: what is in force"),
    "/undo": Command(_undo, "", "take back the last turn and its answer"),
    "/retry": Command(_retry, "", "another answer to the last turn, drawn with another seed"),
    "/save": Command(_save, "FILE", "keep the conversation; alone: where it was kept last"),
    "/quit": Command(_quit, "", "the end, as ^D"),
}
OTHER_NAMES = {"/exit": "/quit", "/q": "/quit", "/clear": "/new"}  # what other programs call them
