"""A request that is queued or running: the tokens and the text of each of its answers, until they end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

from tinyvllm_cli.engine.logprobs import Logprobs
from tinyvllm_cli.engine.stats import Timeline
from tinyvllm_cli.types import Choice, Completion, Request, Sequence, Usage

if TYPE_CHECKING:
    from tinyvllm_cli.text.codec import Answer

# What ended an answer: a token or a string that it was to end at, its constraint, or its length.
End: TypeAlias = Literal["stop", "complete", "length"]


@dataclass(frozen=True, slots=True)
class Live:
    """The tokens and the text of each answer to a request, its times."""

    request: Request
    sequences: list[Sequence]
    answers: list[Answer]
    times: Timeline
    ends: frozenset[int]  # ids that end an answer
    truncated: int  # tokens cut from the prompt
    late: bool  # the text of an answer is made at its end: nobody asks before
    logprobs: list[Logprobs]  # of each of its answers; empty: not asked for
    choices: list[Choice] = field(default_factory=list)  # answers that have ended, in the order of their ends

    def take(self, sequence: Sequence, token_id: int) -> tuple[str, End | None]:
        """An answer gets a token that its constraint forces: the text that is certain with it, and what ended it.

        RequestError invalid_schema where it cannot go on.
        """
        sequence.token_ids.append(token_id)
        if token_id in self.ends:
            return "", "stop"
        answer = self.answers[sequence.index]
        text = "" if self.late else answer.push(token_id)
        if answer.stopped_by is not None:
            return text, "stop"
        matcher = sequence.matcher
        assert matcher is not None, "a constraint forces it"
        matcher.advance(token_id)
        return text, self.ended(sequence, finished=matcher.finished)

    def ended(self, sequence: Sequence, *, finished: bool) -> End | None:
        """What ended an answer under a constraint, which its last token may have finished."""
        if finished:
            return "complete"
        return "length" if len(sequence.token_ids) == sequence.max_len else None

    def end(self, sequence: Sequence, ended: End, token_bytes: Callable[[int], bytes]) -> tuple[str, Choice]:
        """The text that an answer still gets whose last token has come, and the answer as it stands then.

        A token that is both an EOS id and one of stop_token_ids counts as the latter: the request asked for it by name.
        """
        params, answer = self.request.params, self.answers[sequence.index]
        token_ids = tuple(sequence.token_ids[sequence.prompt_len :])
        is_stop, text = token_ids[-1] in params.stop_token_ids, ""
        if self.late:
            text = answer.push_all(token_ids[:-1] if token_ids[-1] in self.ends else token_ids)
        if is_stop and params.include_stop_str_in_output:
            text += answer.push(token_ids[-1])
        text += answer.finish()
        stop_reason: str | int | None = token_ids[-1] if is_stop else None
        # A stop string may also turn up in what was held back; where there is one, the text ends there.
        if answer.stopped_by is not None:
            stop_reason = answer.stopped_by
        return text, Choice(
            index=sequence.index,
            text=answer.text,
            token_ids=token_ids,
            finish_reason="length" if ended == "length" and stop_reason is None else "stop",
            stop_reason=stop_reason,
            reasoning=answer.reasoning,
            logprobs=self.logprobs[sequence.index].told(token_ids, token_bytes) if self.logprobs else None,
        )


def answered(live: Live) -> Completion:
    """A request all of whose answers have ended, or that asks for none. Its prompt counts once, as does what was found
    of it: by the first answer, before which no other one begins."""
    request, first = live.request, live.sequences[0]
    made = sum(sequence.num_output for sequence in live.sequences)
    return Completion(
        request_id=request.request_id,
        custom_id=request.custom_id,
        line=request.line,
        choices=tuple(sorted(live.choices, key=lambda choice: choice.index)),
        usage=Usage(first.prompt_len, made),
        stats=live.times.stats(made, first.num_cached),
        metadata_json=request.metadata_json,
        api=request.api,
        fingerprint=request.fingerprint,
        truncated_tokens=live.truncated,
    )
