"""One prompt and its answer, which is all that standard output gets."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tinyvllm_cli.chat.answering import OpenDisplay, answer, say_what_came
from tinyvllm_cli.chat.notes import complain, note
from tinyvllm_cli.chat.session import Session
from tinyvllm_cli.chat.streams import waiting_bytes
from tinyvllm_cli.errors import EXIT_OK, EXIT_SOME_FAILED
from tinyvllm_cli.io.source import STDIN

if TYPE_CHECKING:
    from tinyvllm_cli.load import LoadedModel


def answer_once(
    session: Session, loaded: LoadedModel, open_display: OpenDisplay, prompt: str, *, took_input: bool
) -> int:
    """The next turn of a session, or where the model has no chat template the prompt as it is; the exit code."""
    session.ask(prompt)
    request = session.request()
    if loaded.codec.template is None:
        request = replace(request, messages=None, prompt=prompt)
    outcome = answer(loaded.engine, request, open_display)
    if outcome.failure is not None:
        complain(outcome.why)
        return EXIT_SOME_FAILED
    say_what_came(outcome, loaded.backend.limits.max_seq_len, "--max-tokens")
    if not took_input and waiting_bytes(STDIN):
        note("note: standard input was not read: a - behind the prompt puts it there")
    return EXIT_OK
