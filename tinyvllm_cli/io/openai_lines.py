"""OpenAI Batch lines in: method, url and body become the fields of a line of our own."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import msgspec

from tinyvllm_cli.errors import RequestError
from tinyvllm_cli.io.fields import ANSWER_FIELDS, FIELDS, Field, invalid, read_field, read_fields, shown, unknown_field
from tinyvllm_cli.types import Api

APIS: dict[str, Api] = {"/v1/chat/completions": "chat", "/v1/completions": "completions"}
BATCH_FIELDS = ("method", "url", "body")
LINE_FIELDS = ("custom_id", *BATCH_FIELDS)
# They name, route, bill or store a request: no value of theirs can change an answer.
IGNORED = frozenset(
    {
        "model", "user", "store", "service_tier", "stream_options", "metadata",
        "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "parallel_tool_calls",
    }
)  # fmt: skip


def _cannot(*neutral: Any) -> Field:
    """A parameter that is refused by name unless it has a value that asks for nothing."""
    return Field(msgspec.json.decode, "another value", neutral)


# Parameters of the two APIs, and of vLLM's servers for them, that this version cannot obey.
_UNSUPPORTED = {
    "top_logprobs": _cannot(0),
    "modalities": _cannot(["text"]),
    "function_call": _cannot("none"),
    "best_of": _cannot(1),
    "echo": _cannot(False),
    "suffix": _cannot(""),
    "add_generation_prompt": _cannot(True),
    "skip_special_tokens": _cannot(True),
    "spaces_between_special_tokens": _cannot(True),
    "use_beam_search": _cannot(False),
    "length_penalty": _cannot(1),
    "bad_words": _cannot([]),
    "audio": _cannot(),
    "prediction": _cannot(),
    "reasoning_effort": _cannot(),
    "verbosity": _cannot(),
    "web_search_options": _cannot(),
    "chat_template": _cannot(),
    "documents": _cannot(),
    "prompt_logprobs": _cannot(),
    "truncate_prompt_tokens": _cannot(),
    "structured_outputs": _cannot(),
    "guided_json": _cannot(),
    "guided_regex": _cannot(),
    "guided_choice": _cannot(),
    "guided_grammar": _cannot(),
}
_SHARED = {
    **{name: field for name, field in FIELDS.items() if name in ANSWER_FIELDS or field.neutral is not None},
    "max_completion_tokens": FIELDS["max_tokens"],
    **_UNSUPPORTED,
}
BODIES: dict[Api, dict[str, Field]] = {
    "chat": {
        **{name: FIELDS[name] for name in ("messages", "chat_template_kwargs", "continue_final_message")},
        **_SHARED,
        "logprobs": dataclasses.replace(FIELDS["logprobs"], decode=msgspec.json.decode, neutral=(False,)),
    },
    "completions": {
        "prompt": Field(msgspec.json.Decoder(str | tuple[int, ...]).decode, "a text or a list of token ids"),
        **_SHARED,
    },
}
_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])


def api_of(raw_fields: Mapping[str, Any]) -> Api | None:
    """The API that a line is for, in whose envelope even its error goes; None: it is a line of our own.

    One that names none of APIs gets the error all the same, which looks alike in both.
    """
    if not any(name in raw_fields for name in BATCH_FIELDS):
        return None
    return APIS.get(_decoded(raw_fields.get("url")), "chat")


def _decoded(raw: Any) -> str:
    """A JSON string; empty for anything else."""
    try:
        return msgspec.json.decode(b'""' if raw is None else raw, type=str)
    except msgspec.DecodeError:
        return ""


def read_batch_line(raw_fields: Mapping[str, bytes]) -> dict[str, Any]:
    """The fields of our own line that say the same, checked, from the fields of an OpenAI Batch line as JSON texts.

    RequestError invalid_value, unknown_field or unsupported; its field is the one of the body.
    """
    _check_line(raw_fields)
    api = APIS[_decoded(raw_fields["url"])]
    values = read_fields(_body(raw_fields), BODIES[api])
    _merge_max_tokens(values)
    prompt_field = "messages" if api == "chat" else "prompt"
    if prompt_field not in values:
        raise RequestError("invalid_value", f"{prompt_field} is missing, wanted it in the body", prompt_field)
    if api == "completions":
        values["raw"] = True
        if not isinstance(values["prompt"], str):
            values["prompt_token_ids"] = values.pop("prompt")
            del values["raw"]
    return values


def _check_line(raw_fields: Mapping[str, bytes]) -> None:
    """What stands around the body."""
    given = {name: raw for name, raw in raw_fields.items() if raw != b"null"}
    for name in given:
        if name in FIELDS and name not in LINE_FIELDS:
            raise invalid(name, "beside method, url and body", "an OpenAI Batch line or one of our own")
        if name not in LINE_FIELDS:
            raise unknown_field(name, LINE_FIELDS)
    for name in BATCH_FIELDS:
        if name not in given:
            message = f"{name} is missing, wanted an OpenAI Batch line with method, url and body"
            raise RequestError("invalid_value", message, name)
    if "custom_id" in given:
        read_field("custom_id", given["custom_id"])
    method, url = msgspec.json.decode(given["method"]), msgspec.json.decode(given["url"])
    if method != "POST":
        raise invalid("method", shown(method), '"POST"')
    wanted = " or ".join(APIS)
    if not isinstance(url, str):
        raise invalid("url", shown(url), wanted)
    if url not in APIS:
        raise RequestError("unsupported", f"url is {shown(url)}, which is not supported, wanted {wanted}", "url")


def _body(raw_fields: Mapping[str, bytes]) -> dict[str, bytes]:
    """The parameters that count."""
    try:
        body = _OBJECT.decode(raw_fields["body"])
    except msgspec.DecodeError:
        found = shown(msgspec.json.decode(raw_fields["body"]))
        raise invalid("body", found, "an object with the parameters of the request") from None
    return {name: bytes(raw) for name, raw in body.items() if name not in IGNORED}


def _merge_max_tokens(values: dict[str, Any]) -> None:
    """Two names for one thing."""
    newer = values.pop("max_completion_tokens", None)
    if newer is None:
        return
    if values.setdefault("max_tokens", newer) != newer:
        found = f"{newer} and max_tokens is {values['max_tokens']}"
        raise invalid("max_completion_tokens", found, "one of them, for they mean the same")
