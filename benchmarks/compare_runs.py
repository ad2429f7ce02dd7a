"""Compare two output files of `tinyvllm run`, line by line of the same custom_id; exit 1 if an answer differs.

    python benchmarks/compare_runs.py all.jsonl some.jsonl

The second file may hold fewer lines, in any order; a line that the first one lacks counts as different. Compared is all
that a line says but its times and its place in the file: texts, why they ended, numbers of tokens, errors.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

Answer = dict[str, Any]


def read_answers(path: Path) -> dict[str, Answer]:
    """Lines by custom_id (as JSON, for 17 and "17" are two ids). An exit with a message where the file is no such."""
    answers: dict[str, Answer] = {}
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError) as error:
        sys.exit(f"{path}: cannot be read: {error}")
    for number, text in enumerate(lines, 1):
        if not text:
            continue
        try:
            line = json.loads(text)
            name, answer = json.dumps(line["custom_id"]), without_place(line)
        except (ValueError, TypeError, KeyError, AttributeError):
            sys.exit(f"{path}:{number}: not an answer of tinyvllm run")
        if name in answers:
            sys.exit(f"{path}:{number}: custom_id {name} stands there twice")
        answers[name] = answer
    return answers


def without_place(line: Answer) -> Answer:
    """What is a function of the request, the model and the options alone."""
    kept = _without(line, "stats", "index")
    if kept.get("error"):
        kept["error"] = _without(kept["error"], "line")
    if "response" in kept:  # an answer of the OpenAI Batch API, whose ids are made from its place
        body = _without(kept["response"]["body"], "id", "created")
        kept = _without(kept, "id") | {
            "response": _without(kept["response"], "request_id") | {"body": body},
            "tinyvllm": _without(kept["tinyvllm"], "stats", "index"),
        }
    return kept


def _without(value: Answer, *names: str) -> Answer:
    return {name: of_it for name, of_it in value.items() if name not in names}


def answer_tokens(answer: Answer) -> int:
    """Of a line of `tinyvllm run`, or of run_with_ids.py."""
    body = answer["response"]["body"] if "response" in answer else answer
    return (body.get("usage") or {}).get("completion_tokens", 0) + sum(map(len, answer.get("token_ids", ())))


def differing(whole: dict[str, Answer], part: dict[str, Answer]) -> list[str]:
    """The ids of part whose answers are others in whole, or none."""
    return [name for name, answer in part.items() if whole.get(name) != answer]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("whole", type=Path)
    parser.add_argument("part", type=Path)
    options = parser.parse_args()
    whole, part = read_answers(options.whole), read_answers(options.part)
    different = differing(whole, part)
    tokens = sum(map(answer_tokens, part.values()))
    failed = sum(answer.get("error") is not None for answer in part.values())
    print(f"{len(part)} lines compared ({tokens} answer tokens, {failed} errors): {len(different)} differ")
    if different:
        name = different[0]
        print(f"custom_id {name}\n  {options.whole}: {json.dumps(whole.get(name))}")
        print(f"  {options.part}: {json.dumps(part[name])}")
    if different or not part:
        sys.exit(1)


if __name__ == "__main__":
    main()
