"""The text side of one model, all that an engine knows of text: requests to ids, ids to answers."""

from __future__ import annotations

import struct
from collections.abc import Collection, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from tinyvllm_cli.errors import ModelError, RequestError
from tinyvllm_cli.text.chat_template import ChatTemplate
from tinyvllm_cli.text.control_words import ControlWords
from tinyvllm_cli.text.detokenizer import Detokenizer
from tinyvllm_cli.text.reasoning import OPEN, ThoughtSplitter, ends_inside_thought
from tinyvllm_cli.text.stops import StopFinder
from tinyvllm_cli.text.together import Asking, alone, together
from tinyvllm_cli.text.tokenizer import Tokenizer
from tinyvllm_cli.types import I32, Message, Request, SamplingParams

if TYPE_CHECKING:
    from tinyvllm_cli.text.grammars import Grammars

T = TypeVar("T")
_THOUGHT_TAIL = 16  # ids at a prompt's end that may spell "<think>" and white space


class TextCodec:
    """Turns requests into prompt ids, and generated ids into text.

    template: None where the model has none. system: what a templated prompt or conversation without a system turn
    starts with; ModelError where there is no template to put it in. vocab_size: ids that the model knows, where they
    may be fewer than the tokenizer's (a pad token that was added without a row of the embedding). eos_token_ids: where
    an answer under a constraint may end; threads: that look for what such answers may go on with.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        system: str | None = None,
        vocab_size: int | None = None,
        eos_token_ids: Sequence[int] = (),
        threads: int = 1,
    ) -> None:
        if system is not None and template is None:
            raise ModelError("a system message needs a chat template, and the model has none")
        self.tokenizer = tokenizer
        self.template = template
        self.size = tokenizer.size if vocab_size is None else min(tokenizer.size, vocab_size)  # ids below it exist
        self._vocab_size = tokenizer.size if vocab_size is None else vocab_size
        self._eos_token_ids = eos_token_ids
        self._threads = threads
        self._system = None if system is None else Message("system", system)
        self._control_words = None if template is None else ControlWords(tokenizer, template)

    def describe_prompts(self, *, raw: bool) -> str:
        """How prompts and messages are given to the model. raw: what holds for a prompt whose line does not say it."""
        if self.template is None:
            return "prompts are given as they are, and messages are refused (the model has no chat template)"
        if raw:
            return "plain prompts are given as they are (--raw), messages go through the model's chat template"
        return "plain prompts and messages go through the model's chat template"

    def encode(self, request: Request) -> list[int]:
        """The ids of a prompt. Raises RequestError as asking() does."""
        ids: list[int] = alone(self.asking(request), self.tokenizer).tolist()
        return ids

    def asking(self, request: Request) -> Asking[I32]:
        """What makes the ids of a prompt.

        Raises RequestError: empty_prompt, invalid_token_id, invalid_value, template_error, and invalid_schema where no
        answer can be under the constraint of the request.
        """
        params = request.params
        self.check_ids("stop_token_ids", params.stop_token_ids)
        self.check_ids("logit_bias", [id for id, _ in params.logit_bias])
        if params.constraint is not None:
            self.grammars.check(params.constraint)
        if request.continue_final_message and request.messages is None:
            message = "continue_final_message needs messages, the last of them from the assistant"
            raise RequestError("invalid_value", message, "continue_final_message")
        ids = yield from self._asking(request)
        if not ids:
            raise RequestError("empty_prompt", "the prompt has no tokens", request.prompt_field)
        return self._checked(request.prompt_field, ids)

    def together(self, askings: Sequence[Asking[T]]) -> list[T | Exception]:
        """What each of these comes to, or raises; texts are split into ids on all cores."""
        return together(askings, self.tokenizer)

    @cached_property
    def grammars(self) -> Grammars:
        """For the constraints of answers; made for the first of them, for it takes a moment."""
        from tinyvllm_cli.text.grammars import Grammars

        return Grammars(self.tokenizer, self._eos_token_ids, self._vocab_size, threads=self._threads)

    def least_tokens(self, request: Request) -> int:
        """The prompt has no fewer; encode() tells how many."""
        texts = [message.content for message in request.messages or ()]
        if request.prompt is not None:
            texts.append(request.prompt)
        return sum(self.tokenizer.least_tokens(text) for text in texts) + len(request.prompt_token_ids or ())

    def encode_plain(self, text: str, field: str) -> list[int]:
        """The ids of a text as it is, behind BOS where the tokenizer adds it: none, where both are empty.

        RequestError invalid_token_id, which names the field.
        """
        ids = self.tokenizer.encode(text, add_bos=True)
        self.check_ids(field, ids)
        return ids

    def least_plain(self, text: str) -> int:
        """encode_plain() gives no fewer ids."""
        return self.tokenizer.least_tokens(text)

    def is_plain(self, request: Request) -> bool:
        """The prompt is given to the model as it is: nothing of a chat template stands around it."""
        return request.messages is None and (
            request.prompt_token_ids is not None or request.raw or self.template is None
        )

    def keep_end(self, ids: Sequence[int], count: int) -> list[int]:
        """The last `count` >= 1 ids of a longer prompt, among them the BOS that it starts with, if it does."""
        bos = [id for id in ids[:1] if id == self.tokenizer.bos_token_id]
        return [*bos, *ids[len(ids) - count + len(bos) :]]

    def token_bytes(self, token_id: int) -> bytes:
        """What an id stands for alone: also a control word, or a part of a character."""
        return self.tokenizer.token_bytes(token_id, skip_special=False)

    def answer(self, request: Request, prompt_ids: Sequence[int]) -> Answer:
        """A fresh answer to a prompt that encode() gave."""
        tail = self.tokenizer.decode(prompt_ids[-_THOUGHT_TAIL:], skip_special=False)
        in_thought = tail.rstrip().endswith(OPEN)
        if request.continue_final_message and request.messages:
            in_thought = ends_inside_thought(request.messages[-1].content)
        in_thought &= request.params.constraint is None
        return Answer(self.tokenizer, request.params, in_thought=in_thought)

    def _checked(self, field: str, ids: Sequence[int]) -> I32:
        """As an array, in which they are looked at all at once. RequestError as of check_ids().

        The array lies over packed numbers: NumPy takes three times as long to make one of a list.
        """
        try:
            checked = np.frombuffer(struct.pack(f"{len(ids)}i", *ids), np.int32)
        except struct.error:  # a number that no int32 holds
            checked = None
        if checked is None or checked.min() < 0 or checked.max() >= self.size:
            self.check_ids(field, ids)
        assert checked is not None, "no model has more ids than an int32 holds"
        return checked

    def _asking(self, request: Request) -> Asking[Sequence[int]]:
        if request.prompt_token_ids is not None:
            return request.prompt_token_ids
        if request.messages is not None:
            return (yield from self._asking_messages(request, request.messages))
        prompt = request.prompt or ""
        if self.is_plain(request):
            return self.tokenizer.with_bos((yield prompt))
        return (yield from self._asking_messages(request, (Message("user", prompt),)))

    def _asking_messages(self, request: Request, messages: Sequence[Message]) -> Asking[list[int]]:
        if not messages:
            raise RequestError("empty_prompt", "messages is empty, wanted at least one message", "messages")
        if self._control_words is None:
            message = "messages need a chat template and the model has none: give a prompt, or take a chat model"
            raise RequestError("template_error", message, "messages")
        _check_last(messages, request.continue_final_message)
        if self._system is not None and all(message.role != "system" for message in messages):
            messages = (self._system, *messages)
        return (
            yield from self._control_words.asking(
                messages, continue_final_message=request.continue_final_message, kwargs=request.chat_template_kwargs
            )
        )

    def check_ids(self, field: str, ids: Collection[int]) -> None:
        """RequestError invalid_token_id, which names the field, for an id that the model does not have."""
        if not ids or (min(ids) >= 0 and max(ids) < self.size):  # of many ids in half the time
            return
        for id in ids:
            if 0 <= id < self.size:
                continue
            message = f"{field} has {id}, wanted ids from 0 to {self.size - 1}"
            if self.size <= id < self.tokenizer.size:
                token = self.tokenizer.core.id_to_token(id)
                message = f"{field} has {id} (the token {token!r}), and the model has no row for this id: its ids end"
                message += f" at {self.size - 1}"
            raise RequestError("invalid_token_id", message, field)


class Answer:
    """The text of one answer while its ids come in.

    The ids become text, a leading thought goes to `reasoning`, and stop strings are looked for in what is left: a stop
    string inside a thought is none. They count once min_tokens ids were pushed, then also where they began before.

    stopped_by: the stop string that ended the answer, set by push() or finish(). text and reasoning are complete after
    finish() or once stopped_by is set.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, *, in_thought: bool = False) -> None:
        self.text = ""
        self._params = params
        self._num_pushed = 0
        self._num_shown = 0  # characters of text
        self._detokenizer = Detokenizer(tokenizer.token_bytes)
        self._thoughts = ThoughtSplitter(inside=in_thought, looks=params.constraint is None)  # it holds for all of it
        self._stops = StopFinder(params.stop, include=params.include_stop_str_in_output)

    @property
    def stopped_by(self) -> str | None:
        return self._stops.matched

    @property
    def reasoning(self) -> str | None:
        return self._thoughts.reasoning

    def push(self, token_id: int) -> str:
        """Text that is certain now; '' while it is held back. Nothing that was given is ever taken back."""
        self._num_pushed += 1
        # A stop id comes here only if it is to be seen, so it shows even where it is a control word.
        piece = self._detokenizer.push(token_id, skip_special=token_id not in self._params.stop_token_ids)
        return self._advance(self._thoughts.push(piece))

    def push_all(self, token_ids: Sequence[int]) -> str:
        """The same of many ids at once, of an answer without stop strings."""
        self._num_pushed += len(token_ids)
        piece = self._detokenizer.push_all(token_ids, shown=self._params.stop_token_ids)
        return self._advance(self._thoughts.push(piece))

    def finish(self) -> str:
        """What was held back, now that no more ids come: '' after a stop string."""
        rest = self._thoughts.push(self._detokenizer.finish())
        shown = self._advance(rest + self._thoughts.finish())
        self.text += self._stops.finish()
        return shown + self._unseen()

    def _advance(self, visible: str) -> str:
        if self._thoughts.inside:  # all that was visible so far is the white space before the thought
            self._stops.clear()
            self.text = ""
            return ""
        self.text += self._stops.push(visible, counts=self._num_pushed >= self._params.min_tokens)
        if self._thoughts.undecided and self.stopped_by is None:
            return ""
        return self._unseen()

    def _unseen(self) -> str:
        start, self._num_shown = self._num_shown, len(self.text)
        return self.text[start:]


def _check_last(messages: Sequence[Message], continue_final: bool) -> None:
    """The last message is the user's to answer, or the assistant's to continue."""
    from_assistant = messages[-1].role == "assistant"
    if from_assistant and not continue_final:
        message = "the last message is from the assistant: set continue_final_message: true to continue it"
        raise RequestError("invalid_value", message, "messages")
    if continue_final and not from_assistant:
        message = f"continue_final_message continues the assistant, but the last message is from {messages[-1].role}"
        raise RequestError("invalid_value", message, "continue_final_message")
