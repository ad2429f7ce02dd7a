"""Chat messages of a line: roles and contents checked, text parts joined."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

from tinyvllm_cli.errors import RequestError
from tinyvllm_cli.io.fields import invalid, shown, unknown_field
from tinyvllm_cli.types import Message

Role: TypeAlias = Literal["system", "user", "assistant"]
ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",  # OpenAI's newer name for the same
    "user": "user",
    "assistant": "assistant",
}
TOOL_ROLES = {"tool", "function"}
MESSAGE_KEYS = ("role", "content")
# Of chat APIs, but not in this version: a template may print them. Null and an empty list ask for nothing.
UNSUPPORTED_KEYS = ("name", "tool_calls", "tool_call_id", "function_call", "refusal", "annotations", "audio")
PART_KEYS = ("type", "text")


def read_messages(values: Sequence[dict[str, Any]]) -> tuple[Message, ...]:
    """Messages from decoded JSON.

    RequestError invalid_value, unknown_field or unsupported, with the place of the fault as its field.
    """
    return tuple(_message(value, f"messages[{i}]") for i, value in enumerate(values))


def _message(value: dict[str, Any], place: str) -> Message:
    for key in UNSUPPORTED_KEYS:
        if value.get(key) not in (None, []):
            raise RequestError("unsupported", f"{place}.{key} is not supported, wanted a message without it", place)
    _refuse_unknown(value, (*MESSAGE_KEYS, *UNSUPPORTED_KEYS), place)
    return Message(_role(value.get("role"), f"{place}.role"), _content(value.get("content"), f"{place}.content"))


def _refuse_unknown(value: dict[str, Any], known: Sequence[str], place: str) -> None:
    for key, item in value.items():
        if key not in known and item is not None:
            error = unknown_field(key, known)
            raise RequestError(error.type, f"{place}: {error.message}", place)


def _role(value: Any, place: str) -> Role:
    role = value if isinstance(value, str) else ""
    if role in TOOL_ROLES:
        raise RequestError("unsupported", f"{place} is {shown(role)}, which is not supported", place)
    if role not in ROLES:
        raise invalid(place, shown(value), "system, developer, user or assistant")
    return ROLES[role]


def _content(value: Any, place: str) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise invalid(place, shown(value), "a text or a list of text parts")
    return "".join(_part(part, f"{place}[{i}]") for i, part in enumerate(value))


def _part(part: Any, place: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind != "text":
        raise RequestError("unsupported", f"{place} is of type {shown(kind)}, which is not supported: text only", place)
    text = part.get("text") if kind == "text" else None
    if not isinstance(text, str):
        raise invalid(place, shown(part), 'a part like {"type": "text", "text": "..."}')
    _refuse_unknown(part, PART_KEYS, place)
    return text
