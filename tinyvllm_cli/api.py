"""What a Python program asks with, by the names and with the checks of a line's fields: SamplingParams and Request."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import wraps
from inspect import signature
from numbers import Integral
from typing import Any, TypeGuard, TypeVar

from tinyvllm_cli import types
from tinyvllm_cli.errors import RequestError, UsageError
from tinyvllm_cli.io.constraints import read_params
from tinyvllm_cli.io.fields import FIELDS, OTHER_NAMES, PROMPT_KINDS, nearest, read_field, refuse_equal_answers
from tinyvllm_cli.io.messages import read_messages
from tinyvllm_cli.io.strict import refuse_deep
from tinyvllm_cli.types import DEFAULT_MAX_TOKENS, Constraint

SHOWN_CHARS = 60  # of a value in a message
T = TypeVar("T")


def names_nearest(cls: type[T]) -> type[T]:
    """The class, whose TypeError for an argument that it has not names the nearest one, as a line's error does."""
    init: Any = cls.__init__
    known = signature(cls).parameters

    @wraps(init)
    def checked(self: T, *args: Any, **given: Any) -> None:
        for name in given:
            if name not in known:
                other = OTHER_NAMES.get(name)
                near = other if other in known else nearest(name, known)
                raise TypeError(f"{cls.__name__} has no argument {name}" + (f", did you mean {near}?" if near else ""))
        init(self, *args, **given)

    cls.__init__ = checked  # type: ignore[assignment]
    return cls


@names_nearest
class SamplingParams(types.SamplingParams):
    """How an answer is made: the answer fields of a line, with their ranges and defaults (docs/lines.md).

    None is a field that is not given. Of json_schema, regex, grammar, choice and response_format one at most may be; it
    becomes `constraint`. Values of NumPy are taken as those of Python. UsageError, which is a ValueError, for a value
    out of its range, and for a wrong schema, expression or grammar.
    """

    __slots__ = ()

    def __init__(
        self,
        *,
        max_tokens: int | None = DEFAULT_MAX_TOKENS,
        temperature: float | None = 0.0,
        top_p: float | None = 1.0,
        top_k: int | None = 0,
        min_p: float | None = 0.0,
        n: int | None = 1,
        seed: int | None = None,
        stop: str | Sequence[str] | None = None,
        stop_token_ids: Sequence[int] | None = None,
        include_stop_str_in_output: bool | None = False,
        min_tokens: int | None = 0,
        ignore_eos: bool | None = False,
        presence_penalty: float | None = 0.0,
        frequency_penalty: float | None = 0.0,
        repetition_penalty: float | None = 1.0,
        logit_bias: Mapping[int, float] | Iterable[tuple[int, float]] | None = None,
        logprobs: int | None = None,
        json_schema: Mapping[str, Any] | bool | None = None,
        regex: str | None = None,
        grammar: str | None = None,
        choice: Sequence[str] | None = None,
        response_format: Mapping[str, Any] | None = None,
        constraint: Constraint | None = None,
    ) -> None:
        given = {name: value for name, value in locals().items() if value is not None and name not in NOT_FIELDS}
        try:
            if logit_bias is not None:
                given["logit_bias"] = _bias(logit_bias)
            values = read_params({name: _read(name, value) for name, value in given.items()})
            if values.get("constraint") is not None:
                _refuse_wrong(values["constraint"])
            if constraint is not None:  # of another one that is copied
                if not isinstance(constraint, Constraint):
                    raise _wrong("constraint", constraint, "json_schema, regex, grammar or choice in its place")
                values.setdefault("constraint", constraint)
            super().__init__(**values)
            refuse_equal_answers(self)
        except RequestError as error:
            raise UsageError(error.message) from None


def _refuse_wrong(constraint: Constraint) -> None:
    from tinyvllm_cli.text.grammars import refuse_wrong  # with llguidance: for those who want a form

    refuse_wrong(constraint)


NOT_FIELDS = {"self", "constraint", "__class__"}


@names_nearest
@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt with what belongs to it alone: exactly one of prompt, messages and prompt_token_ids.

    It is checked where it is answered, so that a bad one is an error in its place. messages: objects with role and
    content. custom_id: comes back with the answer, and seeds it where params has no seed. params: None takes those of
    the call.
    """

    prompt: str | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    prompt_token_ids: Sequence[int] | None = None
    custom_id: str | int | None = None
    params: SamplingParams | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    continue_final_message: bool = False


def prompt_request(item: object, request_id: int, place: int, params: types.SamplingParams) -> types.Request:
    """Of a text as it is, token ids, or a Request, whose prompt is as it is too. place: its id where it has none.

    RequestError where it is none of them, and where one of its fields is wrong.
    """
    if isinstance(item, str):
        item = Request(prompt=item)
    elif _is_list(item):
        item = Request(prompt_token_ids=list(item))
        if item.prompt_token_ids and all(isinstance(part, Mapping) for part in item.prompt_token_ids):
            raise _wrong("the prompt", item.prompt_token_ids, "Request(messages=...) for a conversation")
    if not isinstance(item, Request):
        raise _wrong("the prompt", item, "a text, a list of token ids or a Request")
    return _request(item, request_id, place, params, raw=item.prompt is not None)


def chat_request(item: object, request_id: int, place: int, params: types.SamplingParams) -> types.Request:
    """Of a list of messages, the text of a user's message, or a Request. place, errors: as of prompt_request()."""
    if isinstance(item, str):
        item = Request(prompt=item)
    elif _is_list(item):
        item = Request(messages=list(item))
    if not isinstance(item, Request):
        raise _wrong("the conversation", item, "a list of messages, a text or a Request")
    return _request(item, request_id, place, params, raw=False)


def score_request(item: object, request_id: int, place: int) -> types.Request:
    """Of a text or token ids, or a pair of a context and the continuations that are scored behind it, all of them texts
    or all lists of token ids. place, errors: as of prompt_request()."""
    if isinstance(item, (tuple, list)) and is_pair(item):
        context, continuations = item
        if not _is_list(continuations):
            raise _wrong("the continuations", continuations, "a list")
        behind = tuple(_text_or_ids(each, "continuations") for each in continuations)
        if not behind:
            raise RequestError("invalid_value", "continuations is empty, wanted one at least", "continuations")
    else:
        context, behind = item, None
    prompt = _text_or_ids(context, "text" if behind is None else "context")
    return types.Request(
        request_id=request_id,
        custom_id=place,
        has_own_id=False,
        prompt=prompt if isinstance(prompt, str) else None,
        prompt_token_ids=prompt if isinstance(prompt, tuple) else None,
        raw=True,
        continuations=behind,
    )


def _request(item: Request, request_id: int, place: int, params: types.SamplingParams, *, raw: bool) -> types.Request:
    names = (*PROMPT_KINDS, "custom_id", "chat_template_kwargs", "continue_final_message")
    given = {name: value for name in names if (value := getattr(item, name)) is not None}
    values = {name: _read(name, value) for name, value in given.items()}
    kinds = [name for name in PROMPT_KINDS if name in values]
    if len(kinds) != 1:
        found = f"{' and '.join(kinds)} are given" if kinds else "the prompt is missing"
        raise RequestError("invalid_value", f"{found}, wanted exactly one of {', '.join(PROMPT_KINDS)}")
    if "messages" in values:
        values["messages"] = read_messages(values["messages"])
    if item.params is not None and not isinstance(item.params, SamplingParams):
        raise _wrong("params", item.params, "SamplingParams")
    own_id = values.pop("custom_id", None)
    return types.Request(
        request_id=request_id,
        custom_id=place if own_id is None else own_id,
        has_own_id=own_id is not None,
        params=params if item.params is None else item.params,
        raw=raw,
        **values,
    )


def _read(name: str, value: object) -> Any:
    """A field from a value of Python, by way of its JSON. RequestError as of read_field()."""
    if isinstance(value, str):
        _refuse_half_pairs(name, value)
    try:
        raw = json.dumps(value, default=_plain).encode()
    except (TypeError, ValueError, RecursionError) as error:  # no JSON, or a circle
        wanted = f"{FIELDS[name].wanted} ({error})"
        raise RequestError("invalid_value", f"{name} is {_shown(value)}, wanted {wanted}", name) from None
    refuse_deep(raw, name)
    return read_field(name, raw)


def _bias(bias: Mapping[int, float] | Iterable[tuple[int, float]]) -> object:
    """Pairs, as another one has them, made a mapping; ids of NumPy made Python's."""
    try:
        pairs = bias.items() if isinstance(bias, Mapping) else [(id, value) for id, value in bias]
        return {int(id) if isinstance(id, Integral) else id: value for id, value in pairs}
    except (TypeError, ValueError):
        return bias


def _plain(value: Any) -> Any:
    """What json does not know: numbers and arrays of NumPy, other mappings and sequences, dataclasses."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    tolist: Callable[[], Any] | None = getattr(value, "tolist", None)
    if tolist is not None:
        return tolist()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray, memoryview)):
        return list(value)
    raise TypeError(f"a {type(value).__name__} stands in it")


def _text_or_ids(value: object, name: str) -> str | tuple[int, ...]:
    if isinstance(value, str):
        _refuse_half_pairs(name, value)
        return value
    if _is_list(value):
        try:
            ids: tuple[int, ...] = _read("prompt_token_ids", list(value))
        except RequestError as error:  # whose field nobody has written
            raise RequestError(error.type, error.message.replace("prompt_token_ids", name), name) from None
        return ids
    raise _wrong(name, value, "a text or a list of token ids")


def is_pair(item: Sequence[Any]) -> bool:
    """Whether two are a context and its continuations: a text or ids, and a list of such."""
    return len(item) == 2 and not isinstance(item[0], Integral) and _is_list(item[1])


def read_text(name: str, text: object) -> str:
    """UsageError where it is none."""
    try:
        if not isinstance(text, str):
            raise _wrong(name, text, "a text")
        _refuse_half_pairs(name, text)
    except RequestError as error:
        raise UsageError(error.message) from None
    return text


def read_seed(seed: object) -> int:
    """UsageError where it is none."""
    try:
        number: int = _read("seed", seed)
    except RequestError as error:
        raise UsageError(error.message) from None
    return number


def _is_list(value: object) -> TypeGuard[Iterable[Any]]:
    """Of several things in an order: no text, no bytes, no mapping, no set."""
    return isinstance(value, Iterable) and not isinstance(value, (str, bytes, bytearray, memoryview, Mapping, Set))


def _refuse_half_pairs(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        message = f"{name} holds half of a surrogate pair, wanted Unicode text"
        raise RequestError("invalid_encoding", message, name) from None


def _wrong(name: str, value: object, wanted: str) -> RequestError:
    return RequestError("invalid_value", f"{name} is {_shown(value)} ({type(value).__name__}), wanted {wanted}")


def _shown(value: object) -> str:
    try:
        text = " ".join(repr(value).split())
    except Exception:  # it is too deep, or too long, or somebody else's
        return f"a {type(value).__name__}"
    return text if len(text) <= SHOWN_CHARS else text[: SHOWN_CHARS - 3] + "..."
