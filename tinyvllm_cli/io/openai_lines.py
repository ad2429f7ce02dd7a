"""OpenAI Batch lines in: method, url and body become the fields of a line of our own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, TypeVar

import msgspec

from tinyvllm_cli.errors import RequestError
from tinyvllm_cli.io.fields import ANSWER_FIELDS, FIELDS, OTHER_NAMES, PROMPT_KINDS, Field, invalid, read_fields, shown
from tinyvllm_cli.types import Api, Completion, Request

Item = TypeVar("Item", bound=Request | Completion)

APIS: dict[str, Api] = {"/v1/chat/completions": "chat", "/v1/completions": "completions"}
PROMPTS: dict[Api, str] = {"chat": "messages", "completions": "prompt"}
BATCH_FIELDS = ("method", "url", "body")
_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
LINE_FIELDS = {
    "custom_id": FIELDS["custom_id"],
    "method": Field(msgspec.json.Decoder(Literal["POST"]).decode, '"POST"'),
    "url": Field(msgspec.json.Decoder(str).decode, " or ".join(APIS)),
    "body": Field(_OBJECT.decode, "an object with the parameters of the request"),
}


def _any(raw: bytes) -> None:
    """What is never looked at."""


def _only(kind: Any, *neutral: Any) -> Field:
    """A parameter that is refused by name unless it has a value that asks for nothing."""
    wanted = {bool: "true or false", int: "an integer", float: "a number"}.get(kind, "a JSON value")
    return Field(msgspec.json.Decoder(kind).decode, wanted, neutral)


def _top_k(raw: bytes) -> int:
    """vLLM has two values for no limit."""
    return 0 if raw == b"-1" else FIELDS["top_k"].decode(raw)


def _seed(raw: bytes) -> int:
    """These APIs have seeds of 64 bits with a sign, we have them without: the bits stay."""
    seed = msgspec.json.decode(raw, type=int)
    return seed % 2**64 if -(2**63) <= seed < 0 else FIELDS["seed"].decode(raw)


# They name, route, bill, order or store a request: no value of theirs can change an answer.
IGNORED = (
    "model", "user", "store", "service_tier", "stream_options", "metadata", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention", "prompt_cache_options", "parallel_tool_calls",
    "priority", "request_id", "session_id", "cache_salt",  # of vLLM
)  # fmt: skip

# Of the two APIs, and of vLLM's servers for them, but not in this version.
_UNSUPPORTED = {
    "audio": _only(Any),
    "best_of": _only(int, 1),
    "echo": _only(bool, False),
    "function_call": _only(Any, "none"),
    "modalities": _only(Any, ["text"]),
    "moderation": _only(Any),
    "prediction": _only(Any),
    "reasoning_effort": _only(Any),
    "suffix": _only(Any, ""),
    "top_logprobs": _only(int, 0),
    "verbosity": _only(Any, "medium"),
    "web_search_options": _only(Any),
    # of vLLM
    "allowed_token_ids": _only(Any),
    "bad_words": _only(Any, []),
    "chat_template": _only(Any),
    "documents": _only(Any, []),
    "include_reasoning": _only(bool, True),
    "length_penalty": _only(float, 1),
    "logits_processors": _only(Any, []),
    "mm_processor_kwargs": _only(Any),
    "prompt_embeds": _only(Any),
    "prompt_logprobs": _only(Any),
    "repetition_detection": _only(Any),
    "return_token_ids": _only(bool, False),
    "return_tokens_as_token_ids": _only(bool, False),
    "skip_special_tokens": _only(bool, True),
    "spaces_between_special_tokens": _only(bool, True),
    "thinking_token_budget": _only(Any, -1),
    "truncate_prompt_tokens": _only(Any),
    "use_beam_search": _only(bool, False),
    "vllm_xargs": _only(Any, {}),
    # Of vLLM too, and here by other names.
    **{
        name: dataclasses.replace(_only(Any), instead=OTHER_NAMES[name])
        for name in ("guided_choice", "guided_grammar", "guided_json", "guided_regex", "structured_outputs")
    },
}
_SHARED = {
    **{name: field for name, field in FIELDS.items() if name in ANSWER_FIELDS or field.neutral is not None},
    "max_completion_tokens": FIELDS["max_tokens"],
    "top_k": dataclasses.replace(FIELDS["top_k"], decode=_top_k),
    "seed": dataclasses.replace(FIELDS["seed"], decode=_seed),
    **_UNSUPPORTED,
    **{name: Field(_any, "", neutral=(None,)) for name in IGNORED},
}
BODIES: dict[Api, dict[str, Field]] = {
    "chat": {
        **{name: FIELDS[name] for name in ("messages", "chat_template_kwargs", "continue_final_message")},
        **_SHARED,
        "logprobs": Field(msgspec.json.Decoder(bool).decode, "true or false"),
        "top_logprobs": FIELDS["logprobs"],
        "add_special_tokens": _only(bool, False),
        "add_generation_prompt": FIELDS["continue_final_message"],  # its opposite, in the words of a chat template
    },
    "completions": {
        "prompt": Field(msgspec.json.Decoder(str | tuple[int, ...]).decode, "a text or a list of token ids"),
        **_SHARED,
        "add_special_tokens": _only(bool, True),
    },
}


def api_of(raw_fields: Mapping[str, Any]) -> Api | None:
    """The API that a line is for, in whose envelope even its error goes; None: it is a line of our own.

    One that names none of APIs gets the error all the same, which looks alike in both. A line with a prompt of ours
    and no body is ours, with a field too many.
    """
    own = any(name in raw_fields for name in PROMPT_KINDS)
    if "body" not in raw_fields and (own or not any(name in raw_fields for name in BATCH_FIELDS)):
        return None
    try:
        return APIS.get(msgspec.json.decode(raw_fields.get("url", b'""'), type=str), "chat")
    except msgspec.DecodeError:
        return "chat"


def read_batch_line(raw_fields: Mapping[str, bytes]) -> dict[str, Any]:
    """The fields of our own line that say the same, checked, from the fields of an OpenAI Batch line as JSON texts.

    RequestError invalid_value, unknown_field or unsupported; its field is the one of the body.
    """
    for name in raw_fields:
        if name in FIELDS and name not in LINE_FIELDS:
            raise invalid(name, "outside the body", "it inside")
    line = read_fields(raw_fields, LINE_FIELDS)
    for name in BATCH_FIELDS:
        if name not in line:
            raise _missing(name, "an OpenAI Batch line with method, url and body")
    url = line["url"]
    if url not in APIS:
        message = f"url is {shown(url)}, which is not supported, wanted {LINE_FIELDS['url'].wanted}"
        raise RequestError("unsupported", message, "url")
    api = APIS[url]
    values = read_fields({name: bytes(raw) for name, raw in line["body"].items()}, BODIES[api])
    if PROMPTS[api] not in values:
        raise _missing(PROMPTS[api], f"it in the body of {url}")
    _merge_max_tokens(values)
    if api == "chat":
        _check_generation_prompt(values)
        _merge_logprobs(values)
    elif isinstance(values["prompt"], str):
        values["raw"] = True
    else:
        values["prompt_token_ids"] = values.pop("prompt")
    return values


def _missing(name: str, wanted: str) -> RequestError:
    return RequestError("invalid_value", f"{name} is missing, wanted {wanted}", name)


def _merge_max_tokens(values: dict[str, Any]) -> None:
    """Two names for one thing."""
    newer = values.pop("max_completion_tokens", None)
    if newer is not None and values.setdefault("max_tokens", newer) != newer:
        found = f"{newer} and max_tokens is {values['max_tokens']}"
        raise invalid("max_completion_tokens", found, "one of them, for they mean the same")


def _check_generation_prompt(values: dict[str, Any]) -> None:
    """A turn of the assistant is opened for every answer, and for none that goes on with an open one."""
    opens, goes_on = values.pop("add_generation_prompt", None), values.get("continue_final_message", False)
    if opens is goes_on:
        found = f"{shown(opens)} and continue_final_message is {shown(goes_on)}"
        raise invalid("add_generation_prompt", found, "the opposite of it")


def _merge_logprobs(values: dict[str, Any]) -> None:
    """Whether logprobs are wanted, and of how many other tokens: one number says both."""
    wanted, top = values.pop("logprobs", None), values.pop("top_logprobs", 0)
    if top and not wanted:
        raise invalid("top_logprobs", f"{top} without logprobs", "logprobs: true beside it")
    if wanted is not None:
        values["logprobs"] = top if wanted else None  # false: not those of the command either


def note_model(items: Iterable[Item], model: str, say: Callable[[str], None]) -> Iterator[Item]:
    """The same items; where the first comes from an OpenAI Batch line, it is said once which model answers."""
    noted = False
    for item in items:
        if item.api is not None and not noted:
            say(f"note:    OpenAI Batch lines are answered by {model}, whatever model they name")
            noted = True
        yield item
