"""How many lines a second are read: the scan before a run, requests with every check, and both.

    python benchmarks/reader.py
    python benchmarks/reader.py --lines 200000 --rounds 5

Short lines of each kind of input, from a file in the system's cache, in one process and on one thread. No model is
needed: what a run adds is tokenizing.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path

from tinyvllm_cli.io.prompts import Defaults, read_lines, read_requests
from tinyvllm_cli.io.rows import Rows, read_rows
from tinyvllm_cli.io.scan import scan_file
from tinyvllm_cli.io.settings import TextOption
from tinyvllm_cli.io.source import Source, open_source
from tinyvllm_cli.types import Request

LINES, ROUNDS = 100_000, 3
TEMPLATE = "Answer in one word: {{ question }}"


def prompt(index: int) -> str:
    """About 60 characters, no two alike."""
    return f"Which is the larger one of the numbers {index} and {index * 7919 % 99991}?"


def json_lines(count: int) -> str:
    return _dumped({"custom_id": f"r-{i}", "prompt": prompt(i)} for i in range(count))


def message_lines(count: int) -> str:
    return _dumped({"custom_id": f"r-{i}", "messages": [{"role": "user", "content": prompt(i)}]} for i in range(count))


def batch_lines(count: int) -> str:
    """Of OpenAI's batch service."""
    bodies = ({"model": "m", "messages": [{"role": "user", "content": prompt(i)}]} for i in range(count))
    envelope = {"method": "POST", "url": "/v1/chat/completions"}
    return _dumped({"custom_id": f"r-{i}", **envelope, "body": body} for i, body in enumerate(bodies))


def text_lines(count: int) -> str:
    return "".join(f"{prompt(i)}\n" for i in range(count))


def csv_rows(count: int) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(
        [["custom_id", "question"], *([f"r-{i}", prompt(i)] for i in range(count))]
    )
    return text.getvalue()


def json_rows(count: int) -> str:
    return _dumped({"custom_id": f"r-{i}", "question": prompt(i)} for i in range(count))


def _dumped(lines: Iterable[object]) -> str:
    return "".join(json.dumps(line) + "\n" for line in lines)


KINDS: dict[str, tuple[str, Callable[[int], str]]] = {  # suffix, text of the file
    "prompts, .jsonl": (".jsonl", json_lines),
    "messages, .jsonl": (".jsonl", message_lines),
    "OpenAI Batch": (".jsonl", batch_lines),
    "prompts, .txt": (".txt", text_lines),
    "rows, .csv": (".csv", csv_rows),
    "rows, .jsonl": (".jsonl", json_rows),
}


def scan(source: Source, rows: Rows | None) -> int:
    return scan_file(source.stream, source.name, text_lines=source.text_lines, limit=None, rows=rows).requests


def read(source: Source, rows: Rows | None) -> int:
    lines = read_lines(source.stream) if rows is None else rows.lines(source.stream)
    items = read_requests(lines, Defaults(), text_lines=source.text_lines, rows=rows)
    count = sum(isinstance(item, Request) for item in items)
    source.stream.seek(0)
    return count


def seconds(path: Path, count: int, *, as_rows: bool) -> tuple[float, float]:
    """Of a scan, and of reading all requests."""
    with closing((source := open_source(str(path))).stream):
        rows = read_rows(source, TextOption(TEMPLATE), None, (), raw=False) if as_rows else None
        times = []
        for work in (scan, read):
            started = time.perf_counter()
            if work(source, rows) != count:
                raise SystemExit(f"{path}: not every line is a request")
            times.append(time.perf_counter() - started)
    return times[0], times[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=LINES)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    print(f"{options.lines} lines, {options.rounds} rounds: lines/s, median (least - most)")
    with tempfile.TemporaryDirectory() as folder:
        for name, (suffix, text) in KINDS.items():
            path = Path(folder) / f"in{suffix}"
            path.write_text(text(options.lines))
            as_rows = name.startswith("rows")
            times = [seconds(path, options.lines, as_rows=as_rows) for _ in range(options.rounds)]
            columns = zip(*((first, second, first + second) for first, second in times), strict=True)
            rates = [[options.lines / time for time in column] for column in columns]
            shown = [f"{statistics.median(rate):9,.0f} ({min(rate):,.0f} - {max(rate):,.0f})" for rate in rates]
            print(f"{name:<17} scan {shown[0]}, requests {shown[1]}, both {shown[2]}", flush=True)


if __name__ == "__main__":
    main()
