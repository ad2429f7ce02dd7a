"""One prompt and its answer, which is all that standard output gets."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tinyvllm_cli.chat.answering import OpenDisplay, answer, say_what_came
from tinyvllm_cli.chat.session import Session
from tinyvllm_cli.errors import EXIT_OK, EXIT_SOME_FAILED
from tinyvllm_cli.said import warn

if TYPE_CHECKING:
    from tinyvllm_cli.load import LoadedModel


def answer_once(session: Session, loaded: LoadedModel, open_display: OpenDisplay, prompt: str) -> int:
    """The first turn of a session, or where the model has no chat template the prompt as it is; the exit code."""
    session.ask(prompt)
    request = session.request()
    if loaded.codec.template is None:
        request = replace(request, messages=None, prompt=prompt)
    outcome = answer(loaded.engine, request, open_display)
    if outcome.failure is not None:
        warn(f"error: {outcome.failure.message}")
        return EXIT_SOME_FAILED
    say_what_came(outcome, loaded.backend.limits.max_seq_len, "--max-tokens")
    return EXIT_OK
