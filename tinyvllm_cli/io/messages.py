"""Chat messages of a line: roles and contents checked, text parts joined."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from tinyvllm_cli.errors import RequestError
from tinyvllm_cli.io.fields import invalid, shown, unknown_field
from tinyvllm_cli.types import Message

ROLES: dict[str, Literal["system", "user", "assistant"]] = {
    "system": "system",
    "developer": "system",  # OpenAI's newer name for the same
    "user": "user",
    "assistant": "assistant",
}
TOOL_ROLES = {"tool", "function"}
TOOL_KEYS = {"tool_calls", "tool_call_id", "function_call"}
MESSAGE_KEYS = {"role": "", "content": ""}


def read_messages(values: Sequence[dict[str, Any]]) -> tuple[Message, ...]:
    """Messages from decoded JSON.

    RequestError invalid_value, unknown_field or unsupported, with the place of the fault as its field.
    """
    return tuple(_message(value, f"messages[{i}]") for i, value in enumerate(values))


def _message(value: dict[str, Any], place: str) -> Message:
    for key in (key for key, item in value.items() if item is not None):
        if key in TOOL_KEYS:
            raise RequestError("unsupported", f"{place}.{key} is not supported, wanted messages of text", place)
        if key not in MESSAGE_KEYS:
            error = unknown_field(key, MESSAGE_KEYS)
            raise RequestError(error.type, f"{place}: {error.message}", place)
    role = value.get("role")
    if role in TOOL_ROLES:
        raise RequestError("unsupported", f"{place}.role is {shown(role)}, which is not supported", f"{place}.role")
    if not isinstance(role, str) or role not in ROLES:
        raise invalid(f"{place}.role", shown(role), "system, developer, user or assistant")
    return Message(ROLES[role], _content(value.get("content"), f"{place}.content"))


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
    return text
