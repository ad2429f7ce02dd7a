"""`tinyvllm run`, with the token ids of every answer written beside the answers, so that runs compare id for id.

    python benchmarks/run_with_ids.py ids.jsonl prompts.jsonl -o out.jsonl --max-tokens 32
    python benchmarks/compare_runs.py ids.jsonl other_ids.jsonl

The first argument is the file of ids (it is overwritten), the others are those of `tinyvllm run`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TextIO

from tinyvllm_cli.cli import main
from tinyvllm_cli.io.results import ResultWriter
from tinyvllm_cli.types import Completion


def tell_ids(file: TextIO) -> None:
    """Have the writer of answers tell the ids of each that it writes."""
    write = ResultWriter.write

    def write_both(writer: ResultWriter, completion: Completion) -> None:
        write(writer, completion)
        ids = [list(choice.token_ids) for choice in completion.choices]
        file.write(json.dumps({"custom_id": completion.custom_id, "token_ids": ids}) + "\n")

    ResultWriter.write = write_both  # type: ignore[method-assign]


if __name__ == "__main__":
    with Path(sys.argv[1]).open("w", encoding="utf-8") as file:
        tell_ids(file)
        sys.argv[1:2] = ["run"]
        main()
