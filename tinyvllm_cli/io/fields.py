"""The fields a line may carry: their types, ranges and the errors that name field, found and wanted."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from tinyvllm_cli.errors import RequestError
from tinyvllm_cli.types import GREEDY_BELOW, MAX_SAMPLES, MAX_TOP_LOGPROBS, SamplingParams

SEED_LIMIT = 2**64
SHOWN_CHARS = 60  # of a value in a message
PROMPT_KINDS = ("prompt", "messages", "prompt_token_ids")  # a line has one of them
FORM_FIELDS = ("json_schema", "regex", "grammar", "choice", "response_format")  # io/constraints.py reads them on
ANSWER_FIELDS = frozenset(field.name for field in fields(SamplingParams)) - {"constraint"} | set(FORM_FIELDS)
# What the command may set for every line with --set, besides the answer fields.
PROMPT_FIELDS = frozenset({"chat_template_kwargs", "continue_final_message"})


@dataclass(frozen=True, slots=True)
class Field:
    """How one field is read: a msgspec type that checks type and range, and the same in words."""

    decode: Callable[[bytes], Any]
    wanted: str
    # A field this version knows but cannot obey: the values that ask for nothing. None: it obeys every value.
    neutral: tuple[Any, ...] | None = None
    instead: str = ""  # what this version has in the place of such a field


def _field(kind: Any, wanted: str, neutral: tuple[Any, ...] | None = None) -> Field:
    return Field(msgspec.json.Decoder(kind, strict=True).decode, wanted, neutral)


def _seed(raw: bytes) -> int:
    # msgspec's own upper bounds end at 2^63 - 1.
    seed = msgspec.json.decode(raw, type=Annotated[int, Meta(ge=0)])
    if seed >= SEED_LIMIT:
        raise msgspec.ValidationError("out of range")
    return seed


def _stop(raw: bytes) -> tuple[str, ...]:
    text = Annotated[str, Meta(min_length=1)]
    stop = msgspec.json.decode(raw, type=text | list[text])
    return (stop,) if isinstance(stop, str) else tuple(stop)


def _logit_bias(raw: bytes) -> tuple[tuple[int, float], ...]:
    bias = msgspec.json.decode(raw, type=dict[int, Annotated[float, Meta(ge=-100, le=100)]])
    return tuple(sorted(bias.items()))  # the order of keys is no difference


_COUNT = Annotated[int, Meta(ge=0)]
_PENALTY = Annotated[float, Meta(ge=-2, le=2)]
_ANY_BUT_NULL = bool | int | float | str | list[Any] | dict[str, Any]

FIELDS: dict[str, Field] = {
    # the prompt; messages are checked further in io/messages.py
    "custom_id": _field(str | int, "a text or an integer"),
    "prompt": _field(str, "a text"),
    "messages": _field(list[dict[str, Any]], "a list of messages with role and content"),
    "prompt_token_ids": _field(tuple[int, ...], "a list of token ids"),
    "metadata": Field(msgspec.json.decode, "a JSON value that is in the range of numbers"),
    "raw": _field(bool, "true or false"),
    "chat_template_kwargs": _field(dict[str, Any], "an object"),
    "continue_final_message": _field(bool, "true or false"),
    # the answer
    "max_tokens": _field(_COUNT, "an integer >= 0"),
    "temperature": _field(Annotated[float, Meta(ge=0)], "a number >= 0"),
    "top_p": _field(Annotated[float, Meta(gt=0, le=1)], "a number above 0 and at most 1"),
    "top_k": _field(_COUNT, "an integer >= 0 (0: no limit)"),
    "min_p": _field(Annotated[float, Meta(ge=0, le=1)], "a number from 0 to 1"),
    "n": _field(Annotated[int, Meta(ge=1, le=MAX_SAMPLES)], f"an integer from 1 to {MAX_SAMPLES}"),
    "seed": Field(_seed, "an integer from 0 to 2^64 - 1"),
    "stop": Field(_stop, "a text or a list of texts, none of them empty"),
    "stop_token_ids": _field(tuple[int, ...], "a list of token ids"),
    "include_stop_str_in_output": _field(bool, "true or false"),
    "min_tokens": _field(_COUNT, "an integer >= 0"),
    "ignore_eos": _field(bool, "true or false"),
    "presence_penalty": _field(_PENALTY, "a number from -2 to 2"),
    "frequency_penalty": _field(_PENALTY, "a number from -2 to 2"),
    "repetition_penalty": _field(Annotated[float, Meta(gt=0)], "a number above 0"),
    "logit_bias": Field(_logit_bias, "an object of token ids with numbers from -100 to 100"),
    "logprobs": _field(Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)], f"an integer from 0 to {MAX_TOP_LOGPROBS}"),
    "json_schema": _field(_ANY_BUT_NULL, "a JSON schema with numbers in their range"),
    "regex": _field(_ANY_BUT_NULL, "a regular expression"),
    "grammar": _field(_ANY_BUT_NULL, "a Lark grammar"),
    "choice": _field(_ANY_BUT_NULL, "a list of texts, not empty"),
    "response_format": _field(_ANY_BUT_NULL, "a response format with numbers in their range"),
    # known, but not in this version
    "tools": _field(Any, "a list of tools", ([],)),
    "functions": _field(Any, "a list of functions", ([],)),
    "tool_choice": _field(Any, "a tool choice", ("none",)),
    "stream": _field(bool, "true or false", (False,)),
}


def shown(value: Any) -> str:
    """A value as JSON for a message: on one line, and short."""
    return _short(msgspec.json.encode(value).decode())


def invalid(name: str, found: str, wanted: str) -> RequestError:
    """The one sentence of every wrong value."""
    return RequestError("invalid_value", f"{name} is {found}, wanted {wanted}", name)


def refuse_equal_answers(params: SamplingParams) -> None:
    """RequestError where several answers are wanted and all would be the same."""
    if params.n > 1 and params.temperature < GREEDY_BELOW:
        raise invalid("n", f"{params.n} at temperature 0", "a temperature for answers that differ, or 1")


# What other tools call a field.
OTHER_NAMES = {
    "max_completion_tokens": "max_tokens",
    "max_new_tokens": "max_tokens",
    "id": "custom_id",
    "text": "prompt",
    "input": "prompt",
    "question": "prompt",
    "instruction": "a column of a row, for which -t '{{ instruction }}' makes the prompt",
    "system": "messages with a system turn, or the option --system",
    "model": "the option --model",
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_grammar": "grammar",
    "guided_choice": "choice",
    "structured_outputs": "json_schema, regex, grammar or choice",
    "schema": "json_schema",
    "pattern": "regex",
    "enum": "choice",
}


def nearest(name: str, known: Collection[str]) -> str | None:
    """The one that begins with `name`, where only one does, else the one most like it; None: none is near."""
    longer = [each for each in known if name and each.startswith(name)]
    return longer[0] if len(longer) == 1 else next(iter(difflib.get_close_matches(name, known, 1)), None)


def unknown_field(name: str, known: Collection[str]) -> RequestError:
    """Names the nearest of `known`, where one is near."""
    name = name[:SHOWN_CHARS]
    plain = name if name.isprintable() and name else shown(name)
    other = OTHER_NAMES.get(name)
    if other and (field := other.split()[0]) in FIELDS and field not in known:  # not a line that takes a prompt so
        other = None
    can_be = [each for each in known if each not in FIELDS or FIELDS[each].neutral is None]
    near = other or nearest(name, can_be)
    hint = f", did you mean {near}?" if near else ""
    return RequestError("unknown_field", f"unknown field {plain}{hint}", plain)


def read_field(name: str, raw: bytes, known: Mapping[str, Field] = FIELDS) -> Any:
    """The value of one of the `known` fields from its JSON text, checked.

    RequestError unknown_field, invalid_value or unsupported.
    """
    field = known.get(name)
    if field is None:
        raise unknown_field(name, known)
    try:
        value = field.decode(raw)
    except msgspec.DecodeError:
        if name == "prompt" and raw.startswith(b"["):
            message = "prompt is a list, which is not supported: write one line for each prompt"
            raise RequestError("unsupported", message, name) from None
        raise invalid(name, _short(raw.decode()), field.wanted) from None
    if field.neutral is not None and value not in field.neutral:
        raise _unsupported(name, value, field)
    return value


def read_fields(raw_fields: Mapping[str, bytes], known: Mapping[str, Field] = FIELDS) -> dict[str, Any]:
    """Every field of a line, checked. Null means that a field is absent; fields that ask for nothing are left out."""
    values = {}
    for name, raw in raw_fields.items():
        if raw == b"null" and name in known:
            continue
        value = read_field(name, raw, known)
        if known[name].neutral is None:
            values[name] = value
    return values


def _short(text: str) -> str:
    text = " ".join(text[: 4 * SHOWN_CHARS].split())
    return text if len(text) <= SHOWN_CHARS else text[: SHOWN_CHARS - 3] + "..."


def _unsupported(name: str, value: Any, field: Field) -> RequestError:
    if field.neutral:
        message = f"{name} is {shown(value)}, which is not supported, wanted {shown(field.neutral[0])}"
    else:
        message = f"{name} is not supported, wanted {field.instead or 'a line without it'}"
    return RequestError("unsupported", message, name)
