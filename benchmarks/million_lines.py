"""Run a million short lines through a tiny model for a minute: time to the first answer, memory and rate. Linux only.

    python benchmarks/million_lines.py
    python benchmarks/million_lines.py --lines 100000 --seconds 20

The weights are random and the answers one token long, so that what is measured is reading, tokenizing and writing. The
context is short, for the KV cache counts as memory when it is first written, though all of it was planned at the start.
Limits: the first answer within 3 s after the model is loaded, and 50 MB more of memory from then to the end. Exit code
1 where one is passed. The file, the model and the answers go into a temporary folder, and away again.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from threading import Thread
from typing import IO, NamedTuple

from tinyvllm_cli.io.scan import scan_file
from tinyvllm_cli.model.presets import PRESETS
from tinyvllm_cli.model.random_weights import RandomTensors, read_preset
from tinyvllm_cli.random_folder import write_folder

LINES, SECONDS = 1_000_000, 60.0
FIRST_ANSWER_S, GROWTH_MB = 3.0, 50.0  # limits
TINY = {
    **PRESETS["smollm2-135m"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "max_position_embeddings": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}


class Figures(NamedTuple):
    """Seconds from the start of the process and from the loaded model; memory in MB (10^6 bytes)."""

    loaded_s: float
    first_answer_s: float
    first_mb: float
    growth_mb: float  # the most since the first answer
    answers: int
    answers_s: float  # from the first answer on


def write_lines(path: Path, count: int) -> None:
    with path.open("w") as file:
        for i in range(count):
            file.write(json.dumps({"custom_id": f"r-{i}", "prompt": f"Is {i} an even number?"}) + "\n")


def memory_mb(pid: int) -> float:
    """What a process has in memory now; 0 where it has ended."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024 / 1e6
    return 0.0


def measure(source: Path, model: Path, output: Path, seconds: float) -> Figures:
    """Start a run, and stop it so many seconds after its first answer, where it has not ended by then."""
    options = ["-m", str(model), "-o", str(output), "--max-tokens", "1", "--backend", "cpu"]
    started = time.monotonic()
    run = subprocess.Popen(
        [sys.executable, "-m", "tinyvllm_cli", "run", str(source), *options], stderr=subprocess.PIPE, text=True
    )
    try:
        assert run.stderr is not None
        loaded = _wait_for_model(run.stderr)
        Thread(target=run.stderr.read, daemon=True).start()  # so that the run never waits for this end
        while not output.stat().st_size and run.poll() is None:
            time.sleep(0.005)
        first, first_mb = time.monotonic(), memory_mb(run.pid)
        most = first_mb
        while time.monotonic() - first < seconds and run.poll() is None:
            most = max(most, memory_mb(run.pid))
            time.sleep(0.1)
        ended = time.monotonic()
        run.send_signal(signal.SIGINT)
        if run.wait() not in (0, 130):
            raise SystemExit(f"the run failed with exit code {run.returncode}")
    finally:
        run.kill()
    with output.open("rb") as file:
        answers = sum(1 for _ in file)
    return Figures(loaded - started, first - loaded, first_mb, most - first_mb, answers, ended - first)


def _wait_for_model(lines: IO[str]) -> float:
    """When the start line about the model came."""
    said = []
    for line in lines:
        if line.startswith("model:"):
            return time.monotonic()
        said.append(line)
    raise SystemExit(f"the run did not start:\n{''.join(said)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=LINES)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        source, model, output = (Path(name) / part for part in ("in.jsonl", "model", "out.jsonl"))
        write_folder(model, TINY, RandomTensors(read_preset(TINY)), progress=False)
        write_lines(source, options.lines)
        started = time.monotonic()
        with source.open("rb") as stream:
            scan_file(stream, str(source), text_lines=False, limit=None)
        scan_s = time.monotonic() - started
        found = measure(source, model, output, options.seconds)
    print(f"lines:         {options.lines}, scanned in {scan_s:.1f} s")
    print(f"model loaded:  {found.loaded_s:.1f} s after the start, the scan included")
    print(f"first answer:  {found.first_answer_s:.2f} s after that (limit {FIRST_ANSWER_S:.0f} s)")
    print(f"memory:        {found.first_mb:.0f} MB then, {found.growth_mb:.1f} MB more since (limit {GROWTH_MB:.0f})")
    print(f"answers:       {found.answers} in {found.answers_s:.0f} s, {found.answers / found.answers_s:.0f} a second")
    sys.exit(found.first_answer_s > FIRST_ANSWER_S or found.growth_mb > GROWTH_MB)


if __name__ == "__main__":
    main()
