"""LLM: a model as a Python object, which answers and scores with the engine of the command."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence, Sized
from functools import partial
from numbers import Integral
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeAlias, overload

from tinyvllm_cli.api import (
    Request,
    SamplingParams,
    chat_request,
    is_pair,
    names_nearest,
    prompt_request,
    read_seed,
    read_text,
    score_request,
)
from tinyvllm_cli.backends.choose import BackendName
from tinyvllm_cli.calls import Call, Calls
from tinyvllm_cli.config import GPU_MEMORY, AskedDtype, EngineOptions, KVDtypeName, read_memory
from tinyvllm_cli.errors import RequestError, UsageError
from tinyvllm_cli.load import load, prepare
from tinyvllm_cli.said import warn
from tinyvllm_cli.text.tokenizer import Tokenizer
from tinyvllm_cli.types import Completion, Delta, Event

if TYPE_CHECKING:
    from tinyvllm_cli.text.chat_template import ChatTemplate

Ids: TypeAlias = Sequence[int]
Prompt: TypeAlias = str | Ids | Request
Conversation: TypeAlias = str | Sequence[Mapping[str, Any]] | Request
Scored: TypeAlias = str | Ids | tuple[str, Sequence[str]] | tuple[Ids, Sequence[Ids]]


@names_nearest
class LLM:
    """A model that answers, in this process, with the engine of `tinyvllm run`: the same request gets the same answer.

    At a temperature its custom_id, or its seed, belongs to it: an item without either draws by its content.

    Every call may hand over any number of requests: they run at once, in `slots`, also those of several calls whose
    iterators are open. Threads may share it: their steps take turns. What has no answer is a Completion with `error` in
    its place. After an error of the device, which ends all that was running so, every further call raises it.

        with LLM("smollm2-135m-instruct") as llm:
            for answer in llm.generate(["The capital of France is"], SamplingParams(max_tokens=8)):
                print(answer.choices[0].text if answer.error is None else answer.error.message)
    """

    def __init__(
        self,
        model: str | PathLike[str],
        *,
        revision: str | None = None,
        backend: BackendName = "auto",
        dtype: AskedDtype = "auto",
        kv_dtype: KVDtypeName = "auto",
        slots: int | None = None,
        max_model_len: int | None = None,
        gpu_memory: float | int | str = GPU_MEMORY,
        prefix_cache: bool = True,
        threads: int | None = None,
        system: str | None = None,
        seed: int = 0,
    ) -> None:
        """Find a model and load it; what is fetched for that is said on standard error.

        model: a folder, a .gguf file, a Hub id, or a name of the catalogue. The others are the options of the command
        by the same names (docs/cli.md). gpu_memory: a share of what is free (a float), bytes (an int), or as the
        command has it ("20GiB"). system: message for conversations without one. seed: for requests without their own.

        ModelError for whatever the model's files lack, DeviceError where the GPU cannot be used, UsageError, which is a
        ValueError, for arguments that cannot be.
        """
        if not isinstance(model, str | PathLike):
            raise UsageError(f"model is {model!r}, wanted a text or a path")
        options = EngineOptions(
            slots=slots,
            dtype=dtype,
            kv_dtype=kv_dtype,
            max_model_len=max_model_len,
            threads=threads,
            gpu_memory=read_memory(gpu_memory) if isinstance(gpu_memory, str) else gpu_memory,
            prefix_cache=prefix_cache,
            seed=read_seed(seed),
        )
        system = None if system is None else read_text("system", system)
        prepared = prepare(
            fspath(model), revision=revision, backend=backend, config=options, system=system, report=warn
        )
        try:
            self._loaded = load(prepared, deltas=False)
        except BaseException:
            prepared.close()
            raise
        self._calls = Calls(self._loaded)

    # ---------------------------------------------------------------- what there is

    @property
    def model(self) -> str:
        """As people call it."""
        return self._loaded.files.name

    @property
    def device(self) -> str:
        """As people call it: "CPU", "NVIDIA H200"."""
        return self._loaded.backend.facts.device

    @property
    def max_model_len(self) -> int:
        """Tokens of a text at most, prompt and answer together."""
        return self._loaded.backend.limits.max_seq_len

    @property
    def tokenizer(self) -> Tokenizer:
        """encode(text) -> ids as of generate(), decode(ids) -> text."""
        return self._loaded.codec.tokenizer

    @property
    def chat_template(self) -> ChatTemplate | None:
        """render(messages) -> text of a prompt; None where the model has none."""
        return self._loaded.codec.template

    def __repr__(self) -> str:
        if self._calls.closed:
            return f"LLM({self.model!r}, closed)"
        return f"LLM({self.model!r}, {self.device}, {self._loaded.config.dtype}, max_model_len={self.max_model_len})"

    # ---------------------------------------------------------------- what it does

    @overload
    def generate(self, prompts: Sequence[Prompt], params: SamplingParams | None = None) -> list[Completion]: ...
    @overload
    def generate(self, prompts: Iterator[Prompt], params: SamplingParams | None = None) -> Iterator[Completion]: ...
    def generate(
        self, prompts: Iterable[Prompt], params: SamplingParams | None = None
    ) -> list[Completion] | Iterator[Completion]:
        """Go on from prompts, each a text as it is, token ids, or a Request. params: of those that bring none.

        Of a list, or whatever else has a length, a list of Completions in its order. Of an iterator, an iterator of
        them as they finish, `request_id` their place in it, from 0; it asks for prompts as slots get free, and closed
        early it drops what is running.
        """
        several = _several("prompts", prompts, Integral)
        return self._answers(several, Call(partial(prompt_request, params=_checked(params))))

    @overload
    def chat(self, conversations: Sequence[Conversation], params: SamplingParams | None = None) -> list[Completion]: ...
    @overload
    def chat(
        self, conversations: Iterator[Conversation], params: SamplingParams | None = None
    ) -> Iterator[Completion]: ...
    def chat(
        self, conversations: Iterable[Conversation], params: SamplingParams | None = None
    ) -> list[Completion] | Iterator[Completion]:
        """Answer conversations through the model's chat template: each a list of messages ({"role", "content"}), the
        text of a user's message, or a Request. Lists and iterators as of generate().
        """
        several = _several("conversations", conversations, Mapping)
        return self._answers(several, Call(partial(chat_request, params=_checked(params))))

    @overload
    def score(self, texts: Sequence[Scored]) -> list[Completion]: ...
    @overload
    def score(self, texts: Iterator[Scored]) -> Iterator[Completion]: ...
    def score(self, texts: Iterable[Scored]) -> list[Completion] | Iterator[Completion]:
        """How likely texts are, as `tinyvllm score` tells it: each a text as it is, its token ids, or a pair (context,
        continuations), of texts or of lists of ids. `scores` of a Completion has one Score for a text, one for each
        continuation. Lists and iterators as of generate().

        Scores wait for the answers that are being made, and the other way round; what is cached of prompts is lost
        between them.
        """
        several = _several("texts", texts, Integral)
        if isinstance(texts, tuple) and is_pair(texts) and all(isinstance(each, str) for each in (texts[0], *texts[1])):
            raise TypeError("texts is one pair, wanted a list or an iterator of them: [pair]")
        return self._answers(several, Call(score_request, scores=True))

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Stream:
        """The answer to a prompt of generate(), in pieces as it is made. A Request with messages is a conversation."""
        call = Call(partial(prompt_request, params=_checked(params)), streams=True)
        return Stream(self._calls.events(call, iter([prompt])))

    def close(self) -> None:
        """Drop what is running, and give memory and device back. Further calls are errors, but for this one."""
        self._calls.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("an LLM is neither copied nor pickled: make one in each process")

    def _answers(self, items: list[Any] | Iterator[Any], call: Call) -> list[Completion] | Iterator[Completion]:
        call.listed = isinstance(items, list)
        events = self._calls.events(call, iter(items))
        completions = (event for event in events if isinstance(event, Completion))
        return sorted(completions, key=_place) if call.listed else completions


class Stream(Iterator[Delta]):
    """The pieces of an answer: `text` of each is certain to stay. Once they have come, `completion` is the whole.

    Where there is no answer the iterator raises RequestError, and `completion` has the same as its `error`. close()
    before the end drops the rest of the answer, and so does leaving a `with`.
    """

    def __init__(self, events: Generator[Event]) -> None:
        self.completion: Completion | None = None
        self._events = events

    def __next__(self) -> Delta:
        for event in self._events:
            if isinstance(event, Delta):
                return event
            self.completion = event
            if event.error is not None:
                raise RequestError(event.error.type, event.error.message, event.error.field)
        raise StopIteration

    def close(self) -> None:
        self._events.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _place(completion: Completion) -> int:
    return completion.request_id


def _checked(params: SamplingParams | None) -> SamplingParams:
    if params is not None and not isinstance(params, SamplingParams):
        hint = "(**it)" if isinstance(params, Mapping) else ""
        raise TypeError(f"params is a {type(params).__name__}, wanted SamplingParams{hint}")
    return SamplingParams() if params is None else params


def _several(name: str, items: object, begins: type) -> list[Any] | Iterator[Any]:
    """An iterator as it is, of whatever else has a length a list. TypeError where one is given in the place of several.

    begins: what one that is a list is made of.
    """
    one = name[:-1]
    if isinstance(items, Iterator):
        return items
    if isinstance(items, str | bytes | bytearray | memoryview | Request) or _has_columns(items):
        raise TypeError(f"{name} is a {type(items).__name__}, wanted a list or an iterator: [{one}]")
    if not isinstance(items, Iterable):
        raise TypeError(f"{name} is a {type(items).__name__}, wanted a list or an iterator: [{one}]")
    if not isinstance(items, Sized):
        return iter(items)
    several = list(items)
    if several and all(isinstance(item, begins) for item in several):
        raise TypeError(f"{name} is one {one}, wanted a list or an iterator of them: [{one}]")
    return several


def _has_columns(items: object) -> bool:
    """A mapping or a data frame, which gives its keys; a column of one has keys too, which are those of its rows."""
    return hasattr(items, "columns") or (hasattr(items, "keys") and getattr(items, "ndim", None) != 1)
