"""A conversation at a terminal: prompt, answer, prompt."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from tinyvllm_cli.chat.answering import OpenDisplay
from tinyvllm_cli.chat.commands import complete, shorten
from tinyvllm_cli.chat.editor import Editor, Keys
from tinyvllm_cli.chat.notes import note
from tinyvllm_cli.chat.session import Session
from tinyvllm_cli.chat.talk import Talk
from tinyvllm_cli.errors import EXIT_OK, RequestError, UsageError
from tinyvllm_cli.said import warn

if TYPE_CHECKING:
    from tinyvllm_cli.chat.answering import Tell
    from tinyvllm_cli.load import LoadedModel

HINTS = "Enter sends, Alt-Enter makes a new line, ^C stops an answer, ^D ends; /help"
SHOWN_MESSAGES = 4  # of a conversation that goes on


def talk_at_terminal(session: Session, loaded: LoadedModel, open_display: OpenDisplay, tell: Tell) -> int:
    """Until ^D; the exit code. tell: of Interrupts."""
    keys = Keys()
    editor = Editor(keys, note, complete, tell)
    talk = Talk(session, loaded, open_display, tell=tell, confirm=editor.confirm, more_tokens="/set max_tokens")
    facts = loaded.backend.facts
    note(f"{loaded.files.name} on the {facts.device} in {facts.dtype}, context {loaded.backend.limits.max_seq_len}")
    note(HINTS)
    _show_end(session)
    with keys.quiet(), tell(lambda: None):  # ^C that comes when an answer has just ended must not end the conversation
        if session.waits:
            _guarded(talk.answer)
        while (text := editor.read()) is not None:
            if not _guarded(partial(talk.take, text)):
                break
    return EXIT_OK


def _guarded(do: Callable[[], bool | None]) -> bool:
    """False where it says that it was the last. What goes wrong with a turn is said, and the conversation goes on."""
    try:
        return do() is not False
    except (RequestError, UsageError) as error:
        warn(f"error: {error}")
        return True


def _show_end(session: Session) -> None:
    """The last messages of a conversation that was loaded, one line each."""
    spoken = [message for message in session.messages if message.role != "system"]
    if len(spoken) > SHOWN_MESSAGES:
        note(f"... {len(spoken) - SHOWN_MESSAGES} messages before")
    for message in spoken[-SHOWN_MESSAGES:]:
        note(f"{message.role}: {shorten(message.content)}")
