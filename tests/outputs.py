"""Output files in tests: what two runs have in common, and the damage that accidents do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from command import read_answers

Answer = dict[str, Any]


def index(answer: Answer) -> int:
    """Of the request."""
    found = answer.get("tinyvllm", answer)["index"]
    assert isinstance(found, int)
    return found


def timeless(answer: Answer) -> Answer:
    """Without what the clock decides; the place in the file stays."""
    if "tinyvllm" not in answer:
        return {name: value for name, value in answer.items() if name != "stats"}
    body = {name: value for name, value in answer["response"]["body"].items() if name != "created"}
    ours = {name: value for name, value in answer["tinyvllm"].items() if name != "stats"}
    return {**answer, "response": {**answer["response"], "body": body}, "tinyvllm": ours}


def by_index(output: Path | bytes) -> list[Answer]:
    """All lines as the same run gives them each time, in the order of the input."""
    return sorted(map(timeless, read_answers(output)), key=index)


def as_failed(line: bytes) -> bytes:
    """The line where this request failed instead."""
    answer = json.loads(line)
    if "tinyvllm" in answer:
        failed = {"response": {"status_code": 500, "request_id": "", "body": {}}, "error": {"code": "internal"}}
    else:
        failed = {"choices": [], "usage": None, "error": {"type": "internal", "message": "a bug", "line": 1}}
    return json.dumps(answer | failed, separators=(",", ":")).encode() + b"\n"


def failed(line: bytes) -> bool:
    return json.loads(line)["error"] is not None
