"""Where the time goes from the start of a process to its first token on a GPU, part by part.

    python benchmarks/gpu_start.py MODEL [--rounds 5]

MODEL is a folder or a file, as `tinyvllm bench --random-weights llama-3.2-1b --write FOLDER` writes one. Each round is
a process of its own, with the caches that the first one, which does not count, has filled. A part counts what is in
none of the parts inside of it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from functools import wraps
from typing import Any

PROMPT_TOKENS = 128
# What is timed: a name for people, and where the function stands. Those that others call come first.
PARTS = (
    ("find the GPU and its packages", "tinyvllm_cli.load", "choose_backend"),
    ("find the model, wait for its tokenizer", "tinyvllm_cli.load", "open_text_side"),
    ("read the headers of the weights", "tinyvllm_cli.load", "open_checkpoint"),
    ("read the chat template", "tinyvllm_cli.load", "load_chat_template"),
    ("import the GPU backend", "tinyvllm_cli.load", "open_backend"),
    ("open the backend, the rest", "tinyvllm_cli.backends.gpu.backend", "open_gpu_backend"),
    ("wait for CUDA, which starts beside", "tinyvllm_cli.load", "start_backend"),
    ("look at the card again", "tinyvllm_cli.backends.gpu.backend", "open_card"),
    ("take the memory", "tinyvllm_cli.backends.gpu.backend", "open_arena"),
    ("load the kernels", "tinyvllm_cli.backends.gpu.backend", "load_kernels"),
    ("open NVRTC", "tinyvllm_cli.backends.gpu.kernels", "load_nvrtc"),
    ("open cuBLAS", "tinyvllm_cli.backends.gpu.backend", "Blas.create"),
    ("recall the algorithms, beside the weights", "tinyvllm_cli.backends.gpu.backend", "recall"),
    ("wait for the weights", "tinyvllm_cli.backends.gpu.loading", "wait_for_weights"),
    ("make the tables of RoPE", "tinyvllm_cli.backends.gpu.backend", "rope_tables"),
)


class Clock:
    """Seconds of each part, without those of the parts inside of it."""

    def __init__(self, started: float) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inside: list[str] = []
        self._last = started

    def enter(self, name: str) -> None:
        self._count()
        self._inside.append(name)

    def leave(self) -> None:
        self._count()
        self._inside.pop()

    def _count(self) -> None:
        now = time.monotonic()
        self.seconds[self._inside[-1] if self._inside else "Python itself, and elsewhere"] += now - self._last
        self._last = now

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            self.enter(name)
            try:
                return function(*args, **kwargs)
            finally:
                self.leave()

        return wrapper


def start(model: str, started: float) -> dict[str, float]:
    """In a fresh process: to the first token of a prompt. started: when the process was, on the monotonic clock."""
    clock = Clock(started)
    clock.enter("import the command, NumPy and the like")
    from tinyvllm_cli.backends.gpu.wake import wake_gpu

    wake_gpu("gpu")
    from tinyvllm_cli.config import EngineOptions
    from tinyvllm_cli.load import load, prepare
    from tinyvllm_cli.types import Request, SamplingParams

    clock.leave()
    clock.enter("import the GPU backend")  # the parts stand in it
    for name, module, path in PARTS:
        owner: Any = importlib.import_module(module)
        *outer, last = path.split(".")
        for part in outer:
            owner = getattr(owner, part)
        setattr(owner, last, clock.timed(name, getattr(owner, last)))
    clock.leave()
    loaded = load(prepare(model, backend="gpu", config=EngineOptions(), report=print))
    clock.enter("make the first token")
    ids, params = tuple(range(PROMPT_TOKENS)), SamplingParams(max_tokens=1, ignore_eos=True)
    loaded.engine.add(Request(request_id=0, custom_id=0, prompt_token_ids=ids, params=params))
    while not loaded.engine.idle:
        loaded.engine.step()
    clock.leave()
    return clock.seconds


def measured(model: str) -> dict[str, float]:
    command = [sys.executable, __file__, model, "--started", str(time.monotonic())]
    return dict(json.loads(subprocess.run(command, capture_output=True, check=True).stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description="Where the time of a start goes.")
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--started", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.started is not None:
        print(json.dumps(start(args.model, args.started)))
        return
    measured(args.model)
    rounds = [measured(args.model) for _ in range(args.rounds)]
    for name in rounds[0]:
        values = [seconds.get(name, 0.0) for seconds in rounds]
        print(f"{name:42}{statistics.median(values):7.3f} s ({min(values):.3f} - {max(values):.3f})")
    totals = [sum(seconds.values()) for seconds in rounds]
    print(f"{'all':42}{statistics.median(totals):7.3f} s ({min(totals):.3f} - {max(totals):.3f})")


if __name__ == "__main__":
    main()
