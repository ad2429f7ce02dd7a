"""Seconds from the start of a process to its first token: `tinyvllm run` on a model's files."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tinyvllm_cli.errors import TinyvllmError

PROMPT_TOKENS = 128
TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class StartTimes:
    first_s: float  # with an empty cache: kernels are compiled, the matrix library's algorithms are timed
    again_s: float  # with what the first process left there


def time_start(model: Path, options: Sequence[str], max_prompt: int) -> StartTimes:
    """Two processes one after the other, each from its start until the first token of one request is there.

    model: files that lie in the page cache, where they were read or written just before. options: of `run`. max_prompt:
    tokens of a prompt at most. TinyvllmError, with its last line, where a process fails, or none can be run.
    """
    ids = list(range(min(PROMPT_TOKENS, max_prompt)))
    line = json.dumps({"prompt_token_ids": ids, "max_tokens": 1, "ignore_eos": True}).encode() + b"\n"
    try:
        # -P: no module of the current folder, which may hold a numpy.py of its own, unless all of this is there.
        safe = [] if Path(__file__).parents[2] == Path.cwd() else ["-P"]
        path = str(model.absolute())  # for `run` a ~ at the start is somebody's home
        command = [sys.executable, *safe, "-m", "tinyvllm_cli", "run", "-", "-m", path, "-q", *options]
        with tempfile.TemporaryDirectory(prefix="tinyvllm-bench-") as cache:
            return StartTimes(_seconds(command, line, cache), _seconds(command, line, cache))
    except OSError as error:
        raise TinyvllmError(f"the start cannot be timed: {error.strerror or error}") from None


def _seconds(command: list[str], line: bytes, cache: str) -> float:
    """An answer of one token is written with its first token, which is its last."""
    environment = {**os.environ, "TINYVLLM_CACHE": cache, "TINYVLLM_OFFLINE": "1"}
    with tempfile.TemporaryFile() as said:
        started = time.perf_counter()
        with _running(command, environment, said.fileno()) as process:
            assert process.stdin is not None and process.stdout is not None
            with suppress(BrokenPipeError):  # it has ended, and has said why
                process.stdin.write(line)
                process.stdin.close()
            ready, _, _ = select.select([process.stdout], [], [], TIMEOUT_S)
            answered = bool(ready and os.read(process.stdout.fileno(), 1))  # no whole line: it may never end
            seconds = time.perf_counter() - started
            code = None
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(TIMEOUT_S if ready else 0)
        said.seek(0)
        lines = said.read().decode(errors="replace").splitlines()
    if code != 0 or not answered:
        late = f"no {'end' if answered else 'answer'} in {TIMEOUT_S:.0f} s"
        why = late if code is None else lines[-1] if lines else f"exit code {code}"
        raise TinyvllmError(f"the process whose start is timed failed: {why.removeprefix('error: ')}")
    return seconds


@contextmanager
def _running(command: list[str], environment: dict[str, str], stderr: int) -> Iterator[subprocess.Popen[bytes]]:
    """A process that does not outlive the block."""
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=stderr, env=environment) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
