"""A conversation without a terminal: each line of standard input is a turn, its answer goes to standard output."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tinyvllm_cli.chat.display import AnswerDisplay, make_answer_display
from tinyvllm_cli.chat.notes import complain
from tinyvllm_cli.chat.session import Session
from tinyvllm_cli.chat.talk import Talk
from tinyvllm_cli.errors import EXIT_OK, EXIT_SOME_FAILED, RequestError, UsageError
from tinyvllm_cli.io.prompts import Line, decode_line
from tinyvllm_cli.stdout import write_stdout

if TYPE_CHECKING:
    from tinyvllm_cli.load import LoadedModel


def talk_through(session: Session, loaded: LoadedModel, lines: Iterator[Line]) -> int:
    """Until the lines end; the exit code. What goes wrong with a line is said, and the others go on."""
    answers = 0

    def open_display() -> AnswerDisplay:
        nonlocal answers
        if answers:
            write_stdout(b"\n")
        answers += 1
        return make_answer_display(plain=True)

    talk = Talk(session, loaded, open_display)
    code = EXIT_OK
    try:
        if session.waits:
            talk.answer()
    except (RequestError, UsageError) as error:
        complain(f"the last message of the conversation: {error}")
        code = EXIT_SOME_FAILED
    for line in lines:
        try:
            if not talk.take(decode_line(line.text)):
                break
        except (RequestError, UsageError) as error:
            complain(f"line {line.number}: {error}")
            code = EXIT_SOME_FAILED
    return code
