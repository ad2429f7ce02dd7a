"""One answer from an engine, shown while it is made, and what is said of it afterwards."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from tinyvllm_cli.chat.keys import when_resumed
from tinyvllm_cli.chat.notes import note
from tinyvllm_cli.chat.streams import settle
from tinyvllm_cli.said import on_terminal
from tinyvllm_cli.types import Completion, Failure, Request

if TYPE_CHECKING:
    from tinyvllm_cli.chat.display import AnswerDisplay
    from tinyvllm_cli.engine.engine import Engine

Tell: TypeAlias = Callable[[Callable[[], None]], AbstractContextManager[None]]  # Interrupts.tell()
OpenDisplay: TypeAlias = "Callable[[], AnswerDisplay]"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a request."""

    request: Request
    text: str
    made: int  # tokens
    completion: Completion | None  # None: it was stopped

    @property
    def failure(self) -> Failure | None:
        return None if self.completion is None else self.completion.error

    @property
    def why(self) -> str:
        """The message of the failure, in the words of somebody who has written no messages but talked."""
        message = "" if self.failure is None else self.failure.message
        return message.replace("messages: found", "the conversation has", 1)

    @property
    def cut(self) -> bool:
        return self.completion is not None and any(c.finish_reason == "length" for c in self.completion.choices)

    def cut_by_context(self, context: int) -> bool:
        """It ended because the context of so many tokens did."""
        usage = None if self.completion is None else self.completion.usage
        return self.cut and usage is not None and usage.prompt_tokens + usage.completion_tokens >= context


def answer(engine: Engine, request: Request, open_display: OpenDisplay, tell: Tell | None = None) -> Outcome:
    """Have a request answered to its end, or until ^C. tell: None where ^C ends the process."""
    display: AnswerDisplay | None = None  # there is none where the request fails before its first token
    stopped: list[bool] = []
    texts: list[str] = []
    made = 0

    def moved() -> None:
        if display is not None:
            display.moved()

    engine.add(request)
    try:
        with when_resumed(moved), nullcontext() if tell is None else tell(lambda: stopped.append(True)):
            while not stopped:
                for event in engine.step():
                    if event.request_id != request.request_id:
                        continue
                    if isinstance(event, Completion):
                        text = event.choices[0].text if event.choices else ""
                        return Outcome(request, text, made, event)
                    made += len(event.token_ids)
                    texts.append(event.text)
                    display = open_display() if display is None else display
                    if event.text:
                        display.push(event.text)
                    else:
                        display.working(made)
    finally:
        engine.abort(request.request_id)
        if display is not None:
            display.close()
    return Outcome(request, "".join(texts), made, None)


def say_what_came(outcome: Outcome, context: int, more_tokens: str) -> None:
    """On a terminal how long the answer is and how long it took; everywhere whether it is cut. context: in tokens;
    more_tokens: what sets max_tokens."""
    cut = _cut_note(outcome, context, more_tokens)
    if on_terminal():
        settle()
        note(_figures(outcome))
    if cut:
        note(f"note: the answer is {cut}")


def _figures(outcome: Outcome) -> str:
    completion = outcome.completion
    if completion is None:
        return f"stopped; {_count(outcome.made, 'token')} so far, which stay"
    usage, stats = completion.usage, completion.stats
    assert usage is not None and stats is not None
    parts = [_count(usage.completion_tokens, "token"), f"{stats.tokens_per_s:.1f} tokens/s"]
    if stats.ttft_s is not None:
        parts.append(f"TTFT {stats.ttft_s:.2f} s")
    parts.append(f"{stats.cached_tokens} of {_count(usage.prompt_tokens, 'prompt token')} cached")
    return ", ".join(parts)


def _cut_note(outcome: Outcome, context: int, more_tokens: str) -> str | None:
    """Why the answer is not whole; None where it is."""
    if not outcome.cut:
        return None
    if outcome.cut_by_context(context):
        return f"cut: the context of {context} tokens is full"
    return f"cut at max_tokens {outcome.request.params.max_tokens}: {more_tokens} allows more"


def _count(number: int, name: str) -> str:
    return f"{number} {name}{'s' * (number != 1)}"
