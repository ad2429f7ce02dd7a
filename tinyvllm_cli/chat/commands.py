"""What begins with a slash: the commands of a conversation."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from tinyvllm_cli.chat.session import Session
from tinyvllm_cli.chat.settings import UNFIT
from tinyvllm_cli.errors import UsageError
from tinyvllm_cli.io.conversations import write_conversation
from tinyvllm_cli.io.fields import ANSWER_FIELDS, FIELDS, PROMPT_FIELDS

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
    """Do what a line says that begins with a slash. UsageError."""
    name, rest = [*line.split(maxsplit=1), ""][:2]
    command = COMMANDS.get(name)
    if command is None:
        near = difflib.get_close_matches(name, COMMANDS, 1)
        if near:
            raise UsageError(f"unknown command {shorten(name)}, did you mean {near[0]}?")
        other = "/help lists those that there are, and a turn that begins with / has a space before it"
        raise UsageError(f"unknown command {shorten(name)}: {other}")
    rest = rest.strip()
    if rest and not command.argument:
        raise UsageError(f"{name} stands alone, found {shorten(rest)!r} behind it")
    return command.run(session, rest, say)


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
        say(f"{f'{name} {command.argument}':24}{command.help}")
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
    except (OSError, RuntimeError, ValueError) as error:  # no such home, a loop of links, no name of a file
        raise UsageError(f"cannot write {shorten(rest)}: {error}") from None
    if path is None:
        raise UsageError("found /save, wanted /save FILE")
    if not session.messages:
        raise UsageError("there is nothing yet that could be saved")
    if path.exists() and path not in session.files:
        raise UsageError(f"{path} exists, and is not of this session: give another name")
    write_conversation(path, session.messages)
    session.keep_in(path)
    say(f"saved: {path}; `tinyvllm chat --load FILE` goes on with it")
    return "prompt"


def _quit(session: Session, rest: str, say: Say) -> Next:  # noqa: ARG001
    return "end"


COMMANDS = {
    "/help": Command(_help, "", "this list"),
    "/new": Command(_new, "", "start over, with the same system message"),
    "/system": Command(_system, "TEXT", "how the model is to answer; - is nothing; without TEXT: what it is"),
    "/set": Command(_set, "NAME VALUE", "as --set: /set top_p 0.9; null takes it back; without NAME: what is in force"),
    "/undo": Command(_undo, "", "take back the last turn and its answer"),
    "/retry": Command(_retry, "", "another answer to the last turn, drawn with another seed"),
    "/save": Command(_save, "FILE", "keep the conversation; without FILE where it was kept last"),
    "/quit": Command(_quit, "", "the end, as ^D"),
}
