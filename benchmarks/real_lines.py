"""What a user waits for: a file of lines in, a file of answers out, whole processes; and whether its order matters.

    python benchmarks/real_lines.py FILE.jsonl [-m MODEL] [--rounds 3]

FILE has lines for `tinyvllm run` with a custom_id each; some may fail. The first process finds an empty cache, in which
nothing is compiled or timed; the model's own files are fetched before. Then the same again, and once with the lines
reversed: of every id the answer must be the same.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from compare_runs import differing, read_answers

KEPT = "models"  # of the cache: what was fetched
ENDED = (0, 3)  # exit codes of a run that came to its end: all answered, or some lines failed


def seconds(lines: Path, answers: Path, options: list[str], cache: Path) -> float:
    """Of a whole process. SystemExit where it did not come to its end; it has said why."""
    command = [sys.executable, "-m", "tinyvllm_cli", "run", str(lines), "-o", str(answers), "--overwrite", "-q"]
    started = time.perf_counter()
    ended = subprocess.run([*command, *options], check=False, env={**os.environ, "TINYVLLM_CACHE": str(cache)})
    if ended.returncode not in ENDED:
        sys.exit(f"error: tinyvllm run ended with {ended.returncode}")
    return time.perf_counter() - started


def lines_with_ids(path: Path) -> list[bytes]:
    """The lines of a file. SystemExit where it cannot be read, or an answer could not be told by its custom_id."""
    try:
        lines = [line for line in path.read_bytes().split(b"\n") if line.strip()]
        for number, line in enumerate(lines, 1):
            if json.loads(line).get("custom_id") is None:
                sys.exit(f"error: request {number} of {path} has no custom_id, wanted one in each")
    except (OSError, ValueError, AttributeError) as error:
        sys.exit(f"error: {path} cannot be read, wanted JSON objects: {error}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description="Whole runs over a file.")
    parser.add_argument("file", type=Path)
    parser.add_argument("-m", "--model")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds}: at least 1 is needed")
    lines = lines_with_ids(args.file)
    options = [] if args.model is None else ["-m", args.model]
    with tempfile.TemporaryDirectory(prefix="tinyvllm-real-") as folder:
        cache, reversed_lines = Path(folder) / "cache", Path(folder) / "reversed.jsonl"
        first, last = Path(folder) / "first.jsonl", Path(folder) / "last.jsonl"
        cache.mkdir()
        own = Path(os.environ.get("TINYVLLM_CACHE", Path.home() / ".cache" / "tinyvllm")) / KEPT
        if own.is_dir():
            (cache / KEPT).symlink_to(own)
        print(f"nothing compiled before   {seconds(args.file, first, options, cache):6.2f} s", flush=True)
        again = [seconds(args.file, last, options, cache) for _ in range(args.rounds)]
        print(f"again                     {statistics.median(again):6.2f} s ({min(again):.2f} - {max(again):.2f})")
        reversed_lines.write_bytes(b"".join(line + b"\n" for line in reversed(lines)))
        print(f"reversed                  {seconds(reversed_lines, last, options, cache):6.2f} s")
        wanted, found = read_answers(first), read_answers(last)
        assert wanted.keys() == found.keys(), "each id is answered once"
        changed = differing(wanted, found)
        print(f"answers that change when the file is reversed: {len(changed)} of {len(wanted)}")


if __name__ == "__main__":
    main()
