"""Long inputs: what is held does not grow with the lines that are done."""

import gc
import io
import itertools
import json
import runpy
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from command import run_here, write_lines

from tinyvllm_cli.io.prompts import Defaults, read_lines, read_requests
from tinyvllm_cli.io.results import ResultWriter
from tinyvllm_cli.io.scan import scan_file
from tinyvllm_cli.types import Completion

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def held() -> Iterator[Callable[[], int]]:
    """The bytes that Python and NumPy hold."""

    def now() -> int:
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    yield now
    tracemalloc.stop()


def lines(count: int) -> list[dict[str, Any]]:
    """Every second one cannot be answered."""
    names = ["n", "max_token"]
    return [{"custom_id": f"r-{i}", "prompt": f"Is {i} even?", names[i % 2]: 1} for i in range(count)]


def test_a_run_holds_no_more_after_many_lines_than_after_a_few(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: Callable[[], int]
):
    count, few, many = 3200, 1200, 3000  # after a few, every block of the KV cache has been used
    done, seen, write = itertools.count(1), {}, ResultWriter.write

    def watched(self: ResultWriter, completion: Completion) -> None:
        write(self, completion)
        if (number := next(done)) in {few, many}:
            seen[number] = held()

    monkeypatch.setattr(ResultWriter, "write", watched)
    source, out = write_lines(tmp_path / "in.jsonl", lines(count)), tmp_path / "out.jsonl"
    options = ("--max-tokens", "1", "--max-model-len", "64", "-q")
    assert run_here("run", source, "-m", tiny, "-o", out, *options) == 3
    assert out.read_bytes().count(b"\n") == count
    assert (seen[many] - seen[few]) / (many - few) < 50, "bytes a line; the summary's times are 16 of an answer"


def test_a_scan_holds_eight_bytes_of_each_line_and_a_reader_none(held: Callable[[], int]):
    count = 5_000
    data = io.BytesIO(b"\n".join(json.dumps(line).encode() for line in lines(count)))
    before = held()

    def most_per_line() -> float:
        most = tracemalloc.get_traced_memory()[1] - before
        tracemalloc.reset_peak()
        return most / count

    most_per_line()
    assert scan_file(data, "in", text_lines=False, limit=None).requests == count
    assert most_per_line() < 8 * 4  # the hashes, and what sorts them
    assert sum(1 for _ in read_requests(read_lines(data), Defaults())) == count
    assert most_per_line() < 8


@pytest.mark.parametrize(
    ("script", "options", "said"),
    [
        (
            "reader.py",
            "--lines 20 --rounds 1",
            ["prompts, .jsonl", "messages", "OpenAI", ".txt", ".csv", "rows, .jsonl"],
        ),
        ("million_lines.py", "--lines 200 --seconds 1", ["200, scanned", "first answer", "MB more", "200 in"]),
    ],
)
def test_the_benchmarks_of_long_inputs_run(
    script: str, options: str, said: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "argv", [script, *options.split()])
    try:
        runpy.run_path(str(BENCHMARKS / script), run_name="__main__")
    except SystemExit as end:
        assert not end.code
    out = capsys.readouterr().out
    assert [words for words in said if words not in out] == []
