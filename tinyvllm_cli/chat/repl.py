"""A conversation at a terminal: prompt, answer, prompt."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from tinyvllm_cli.chat.answering import OpenDisplay
from tinyvllm_cli.chat.commands import complete, shorten
from tinyvllm_cli.chat.editor import Editor
from tinyvllm_cli.chat.keys import Keys
from tinyvllm_cli.chat.notes import complain, note
from tinyvllm_cli.chat.session import Session
from tinyvllm_cli.chat.state import keep
from tinyvllm_cli.chat.talk import Talk
from tinyvllm_cli.errors import EXIT_OK, OutputClosedError, RequestError, UsageError
from tinyvllm_cli.io.source import STDIN
from tinyvllm_cli.stdout import OutputError

if TYPE_CHECKING:
    from tinyvllm_cli.cli.signals import Interrupts
    from tinyvllm_cli.load import LoadedModel

HINTS = "Enter sends, Alt-Enter makes a new line, ^C stops an answer, ^D ends; /help"
SHOWN_MESSAGES = 4  # of a conversation that goes on


def talk_at_terminal(
    session: Session, loaded: LoadedModel, open_display: OpenDisplay, interrupts: Interrupts, keys: Keys
) -> int:
    """Until ^D; the exit code. keys: quiet already."""
    editor, tell = Editor(keys, note, complete, interrupts), interrupts.tell
    talk = Talk(session, loaded, open_display, tell=tell, confirm=editor.confirm, more_tokens="/set max_tokens")
    facts = loaded.backend.facts
    note(f"{loaded.files.name} on the {facts.device} in {facts.dtype}, context {loaded.backend.limits.max_seq_len}")
    note(HINTS)
    _show_end(session)
    try:
        with tell(lambda: None):  # ^C that comes when an answer has just ended must not end the conversation
            if session.waits:
                _guarded(talk.answer)
            while (text := editor.read()) is not None:
                if not _guarded(partial(talk.take, text)):
                    break
    except OutputClosedError:
        raise
    except Exception:  # the device failed, memory is short, or it is a bug: what was said need not go with it
        _keep(session)
        raise
    return EXIT_OK


def _guarded(do: Callable[[], bool | None]) -> bool:
    """False where it says that it was the last. What goes wrong with a turn is said, and the conversation goes on."""
    try:
        return do() is not False
    except (RequestError, UsageError, OutputError) as error:
        if isinstance(error, OutputError) and not os.isatty(STDIN):  # the terminal is gone
            raise
        complain(str(error))
        return True


def _keep(session: Session) -> None:
    if not session.messages:
        return
    try:
        path = keep(session.messages)
        note(f"the conversation is kept: `tinyvllm chat --load {shlex.quote(str(path))}` goes on with it")
    except (OSError, UsageError) as error:
        complain(f"the conversation cannot be kept: {error}")


def _show_end(session: Session) -> None:
    """The system message and the last others of a conversation that was loaded, one line each."""
    if session.system is not None:
        note(f"system: {shorten(session.system)}")
    spoken = [message for message in session.messages if message.role != "system"]
    if len(spoken) > SHOWN_MESSAGES:
        note(f"... {len(spoken) - SHOWN_MESSAGES} messages before")
    for message in spoken[-SHOWN_MESSAGES:]:
        note(f"{message.role}: {shorten(message.content)}")
