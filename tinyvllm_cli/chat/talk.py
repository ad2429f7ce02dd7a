"""A session and the model that answers it: takes one turn or command after the other, wherever they come from."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tinyvllm_cli.chat.answering import OpenDisplay, Outcome, Tell, answer, say_what_came
from tinyvllm_cli.chat.commands import run_command
from tinyvllm_cli.chat.notes import note
from tinyvllm_cli.chat.room import turns_to_drop
from tinyvllm_cli.chat.session import Session
from tinyvllm_cli.errors import RequestError

if TYPE_CHECKING:
    from tinyvllm_cli.load import LoadedModel

Confirm = Callable[[str], bool]


class Talk:
    """What cannot be done is a UsageError or RequestError, after which the session is as before."""

    def __init__(
        self,
        session: Session,
        loaded: LoadedModel,
        open_display: OpenDisplay,
        *,
        tell: Tell | None = None,
        confirm: Confirm | None = None,
        more_tokens: str = "--max-tokens",
    ) -> None:
        """tell: of answer(); confirm: asks the user, None where nobody is there; more_tokens: what sets max_tokens."""
        self._session = session
        self._loaded = loaded
        self._open_display = open_display
        self._tell = tell
        self._confirm = confirm
        self._more_tokens = more_tokens
        self._context = loaded.backend.limits.max_seq_len

    def take(self, text: str) -> bool:
        """A turn, or a command; white space around it goes. False: it was the last."""
        try:
            text.encode()
        except UnicodeEncodeError:  # what a terminal sends need not be text
            raise RequestError("invalid_encoding", "this is not UTF-8 text, wanted UTF-8 text") from None
        if not text or text.isspace():
            return True
        if text.startswith("/"):
            then = run_command(text, self._session, note)
            if then != "answer":
                return then != "end"
        else:
            self._session.ask(text.strip())
        self.answer()
        return True

    def answer(self) -> None:
        """Answer the session's last message."""
        try:
            outcome = self._ask()
            while _too_long(outcome) and self._make_room("the conversation no longer fits"):
                outcome = self._ask()
            if outcome.failure is not None:
                raise RequestError(outcome.failure.type, outcome.why, outcome.failure.field)
        except BaseException:
            self._session.take_back()
            raise
        if outcome.completion is None and not outcome.text:
            self._session.take_back()
            note("stopped before there was any text: all is as it was before")
            return
        self._session.answered(outcome.text, whole=outcome.completion is not None)
        say_what_came(outcome, self._context, self._more_tokens)
        if outcome.cut_by_context(self._context):
            self._make_room("there is no room for more")

    def _ask(self) -> Outcome:
        return answer(self._loaded.engine, self._session.request(), self._open_display, self._tell)

    def _make_room(self, why: str) -> bool:
        """Offer to drop the oldest turns; whether they were."""
        if self._confirm is None:
            return False
        count = turns_to_drop(self._session, self._loaded.codec, self._context)
        if count is None or count == 0:
            if count is None:
                note(f"{why}: the last turn alone fills the context of {self._context} tokens; /new starts over")
            return False
        turns = "oldest turn" if count == 1 else f"{count} oldest turns"
        if not self._confirm(f"{why} in the context of {self._context} tokens: drop the {turns}?"):
            return False
        self._session.drop(count)
        note(f"dropped the {turns}, {self._session.turns} left")
        return True


def _too_long(outcome: Outcome) -> bool:
    return outcome.failure is not None and outcome.failure.type == "prompt_too_long"
