"""Running the command `tinyvllm`: here in this process, or apart in one of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tinyvllm_cli.cli import exit_code, tinyvllm
from tinyvllm_cli.cli.signals import Interrupts

CASES = Path(__file__).parent / "data" / "cases"
TINYVLLM = [sys.executable, "-m", "tinyvllm_cli"]


def run_here(*args: str | Path) -> int:
    """The exit code; what it says goes to the standard streams of the tests."""
    command = [str(arg) for arg in args]
    return exit_code(lambda: tinyvllm.main(command, "tinyvllm", standalone_mode=False, obj=Interrupts()))


def run_apart(*args: str | Path, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([*TINYVLLM, *map(str, args)], input=stdin, capture_output=True, timeout=60, check=False)


def write_lines(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def read_answers(data: Path | bytes) -> list[dict[str, Any]]:
    """Output lines, as strict JSON: no NaN, no Infinity, no key twice, nothing after the last line end."""
    text = data if isinstance(data, bytes) else data.read_bytes()
    assert text == b"" or text.endswith(b"\n")
    assert len(text.decode().splitlines()) == text.count(b"\n")
    return [strict_json(line) for line in text.splitlines()]


def strict_json(text: bytes) -> Any:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} in JSON")

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len(dict(pairs)) == len(pairs)
        return dict(pairs)

    return json.loads(text, parse_constant=refuse, object_pairs_hook=once)


def by_id(answers: list[dict[str, Any]]) -> dict[Any, dict[str, Any]]:
    """Answers by custom_id, which none has twice."""
    found = {answer["custom_id"]: answer for answer in answers}
    assert len(found) == len(answers)
    return found


def place_free(answer: dict[str, Any]) -> dict[str, Any]:
    """What is a function of the line, the model and the options alone: no times, no place in the file."""
    kept = {name: value for name, value in answer.items() if name not in {"stats", "index"}}
    if kept["error"] is not None:
        kept["error"] = {name: value for name, value in kept["error"].items() if name != "line"}
    return kept
