"""Runs of one file of prompts by `tinyvllm run`, for tests of what stands behind the seam."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from command import by_id, place_free, read_answers, run_here, write_lines

Answers = dict[Any, dict[str, Any]]


def run(
    folder: Path, model: Path, lines: list[Any], *options: str | Path, code: int = 0
) -> tuple[Answers, dict[str, Any]]:
    """Answers by id, and the record."""
    source, out = write_lines(folder / "in.jsonl", lines), folder / "out.jsonl"
    assert run_here("run", source, "-m", model, "-o", out, "--overwrite", *options) == code
    return by_id(read_answers(out)), json.loads((folder / "out.jsonl.run.json").read_text())


def finished_before(
    fault: str, found: Answers, record: dict[str, Any], whole: Answers, said: str, *, slots: int
) -> int:
    """The number of lines that a run finished before its GPU failed with `fault`; AssertionError unless these are as in
    the whole run, what held a slot got a line that names the fault, and the rest is said to be to do.
    """
    lost = [answer["error"] for answer in found.values() if answer["error"]]
    assert len(lost) == slots, "those that held a slot"
    for error in lost:
        assert error["type"] == "internal" and "bug" not in error["message"]
        assert error["message"] == f"the GPU failed under way: {fault}"
    finished = {name: place_free(answer) for name, answer in found.items() if not answer["error"]}
    assert finished == {name: place_free(whole[name]) for name in finished}
    assert (record["state"], record["tracebacks"], record["progress"]["done"]) == ("failed", [], len(found))
    assert "Traceback" not in said and f"requests: {len(finished)} ok, {slots} failed" in said
    last = said.splitlines()[-1]
    assert last.startswith(f"error: the GPU failed under way: {fault}; ")
    assert "--resume" in last.split("; go on with: tinyvllm ")[1]
    return len(finished)
