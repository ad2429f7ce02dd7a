"""Drawing tokens on a GPU: microseconds for 256 rows of 128,256 logits, setting by setting, beside a whole step.

    python benchmarks/gpu_sampling.py
    python benchmarks/gpu_sampling.py --rows 64 --history 4000

Logits are normal with a deviation of 2.5: flatter than a model's, so that the nucleus of top_p has thousands of ids.
Each row has a history of its own. Launches are captured, one after another, and each reads logits that no longer are in
the cache. The share is what a setting adds to a greedy step of the model behind the same history, with random weights.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from gpu_timeline import equal_rows
from run_main import run_main

from tinyvllm_cli.backends.gpu import ops
from tinyvllm_cli.backends.gpu.backend import GpuBackend
from tinyvllm_cli.backends.gpu.timing import GpuTiming
from tinyvllm_cli.bench.subject import open_random
from tinyvllm_cli.config import EngineOptions
from tinyvllm_cli.types import I32, MAX_TOP_LOGPROBS, U32, Batch, SlotOptions

LAUNCHES = 10  # of a graph: what begins and ends it does not count
ROUNDS = 9  # of which the median counts, one more before them
SPREAD = 2.5  # of logits
PROMPT_SHARE = 0.2  # of the history; the rest is output
ALLOWED_SHARE = 0.05  # of the ids, by a mask


@dataclass(frozen=True)
class Setting:
    name: str
    options: SlotOptions
    top_logprobs: int = 0
    masked: bool = False


GREEDY, DRAWN = SlotOptions(), SlotOptions(temperature=1.0)
PENALTIES = {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.1}
BIAS = tuple((token, 1.0) for token in range(0, 300, 5))
SETTINGS = (
    Setting("greedy", GREEDY),
    Setting("temperature", DRAWN),
    Setting("top_k 50", replace(DRAWN, top_k=50)),
    Setting("top_p 0.9", replace(DRAWN, top_p=0.9)),
    Setting("top_k 50, top_p 0.9", replace(DRAWN, top_k=50, top_p=0.9)),
    Setting("min_p 0.05", replace(DRAWN, min_p=0.05)),
    Setting("penalties", replace(GREEDY, **PENALTIES)),
    Setting("penalties, temperature", replace(DRAWN, **PENALTIES)),
    Setting("logprobs", replace(GREEDY, logprobs=True)),
    Setting(f"logprobs of the {MAX_TOP_LOGPROBS} likeliest", replace(GREEDY, logprobs=True), MAX_TOP_LOGPROBS),
    Setting("masks", GREEDY, masked=True),
    Setting("masks, temperature", DRAWN, masked=True),
    Setting("masks, top_k 50, top_p 0.9", replace(DRAWN, top_k=50, top_p=0.9), masked=True),
    Setting(
        "all of it", replace(DRAWN, **PENALTIES, top_k=50, top_p=0.9, logprobs=True), MAX_TOP_LOGPROBS, masked=True
    ),
)


def fill_logits(backend: GpuBackend) -> None:
    logits, generator = backend._device.buffers.logits, np.random.default_rng(0)
    cuda, width = backend._card.cuda, logits.shape[1]
    for row in range(len(logits)):
        values = generator.normal(0, SPREAD, width).astype(np.float32)
        cuda.memcpy(logits[row].data.ptr, values.ctypes.data, values.nbytes, cuda.memcpyHostToDevice)


def seconds(backend: GpuBackend, timing: GpuTiming, work: Callable[[], object]) -> list[float]:
    """Of the device for one piece of work, in each round."""
    stream = backend._device.stream
    work()  # kernels are loaded at their first launch
    stream.begin_capture()
    for _ in range(LAUNCHES):
        work()
    graph = stream.end_capture()
    found = []
    for _ in range(1 + ROUNDS):
        timing.restart()
        graph.launch(stream)
        found.append(timing.seconds(timing.mark()) / LAUNCHES)
    return found[1:]


class Sampling:
    """Steps of so many rows, each the next token behind a history of its own."""

    def __init__(self, backend: GpuBackend, timing: GpuTiming, rows: int, history: int) -> None:
        self.backend, self.timing, self.history = backend, timing, history
        generator, vocab = np.random.default_rng(1), backend.limits.vocab_size
        self.slots: I32 = np.arange(rows, dtype=np.int32)
        # Few ids come often, as in text.
        self.tokens: I32 = (vocab * generator.random((rows, history)) ** 4).astype(np.int32)
        allowed = generator.random((rows, -(-vocab // 32), 32)) < ALLOWED_SHARE
        self.masks: U32 = np.packbits(allowed, axis=-1, bitorder="little").view(np.uint32)[..., 0]

    def batch(self, setting: Setting) -> Batch:
        """Slots are bound as the setting wants."""
        start = int(PROMPT_SHARE * self.history)
        for slot in self.slots.tolist():
            options = replace(setting.options, seed=slot, output_start=start)
            self.backend.bind(slot, self.tokens[slot], options)
        rows = equal_rows(self.slots, 1, self.history - 1, self.backend.limits.vocab_size, room=self.history)
        rows = replace(rows, token_ids=np.full_like(rows.token_ids, -1))
        mask_rows = self.slots if setting.masked else None
        return replace(rows, mask_rows=mask_rows, top_logprobs=setting.top_logprobs)

    def resolved(self, setting: Setting) -> Any:
        rows = self.backend._resolve(self.batch(setting))
        if rows.draw.masks is not None:
            self.backend._masks.send(self.masks, rows.draw.masks)
        return rows

    def draws(self, setting: Setting) -> list[float]:
        rows = self.resolved(setting)
        return seconds(self.backend, self.timing, lambda: self.backend._draw(rows))

    def step(self) -> list[float]:
        """A greedy one, of the whole model. Leaves other logits."""
        rows = self.resolved(SETTINGS[0])
        return seconds(self.backend, self.timing, lambda: self.backend._enqueue(rows, ops))

    def mask_to_token(self) -> tuple[list[float], list[float]]:
        """Seconds of the host, of which the first are those of mask() itself, where the forward is done already: the
        worst that can be. The second until the tokens are read."""
        calls, ends = [], []
        memory = self.backend.mask_memory()[: len(self.masks)]
        memory[:] = self.masks
        for _ in range(1 + ROUNDS):
            pending = self.backend.step(self.batch(Setting("masks", GREEDY, masked=True)))
            self.backend._device.stream.synchronize()
            start = time.perf_counter()
            pending.mask(memory)
            calls.append(time.perf_counter() - start)
            pending.result()
            ends.append(time.perf_counter() - start)
        return calls[1:], ends[1:]


def spread(values: Sequence[float]) -> str:
    """Microseconds: median (least - most)."""
    us = 1e6 * np.array(values)
    return f"{np.median(us):.1f} ({us.min():.1f} - {us.max():.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.2-1b")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--history", type=int, default=500)
    options = parser.parse_args()
    engine = EngineOptions(slots=options.rows, max_model_len=options.history + 16)
    with closing(open_random(options.model, backend="gpu", options=engine, write=None)) as subject:
        backend = subject.backend
        assert isinstance(backend, GpuBackend)
        facts = backend.facts
        print(f"{subject.name}, {facts.dtype}, {facts.device}: {dict(facts.details)}")
        with closing(GpuTiming(backend)) as timing:
            sampling = Sampling(backend, timing, options.rows, options.history)
            fill_logits(backend)
            draws = {setting.name: sampling.draws(setting) for setting in SETTINGS}
            step, (calls, ends) = sampling.step(), sampling.mask_to_token()
        print(f"{options.rows} rows, history {options.history}: a greedy step takes {spread(step)} us")
        print(
            f"masks of all rows: mask() takes {spread(calls)} us of the host; from there to the tokens {spread(ends)}\n"
        )
        print("| draws | us | added to a greedy step |\n| --- | --- | --- |")
        greedy = np.median(draws["greedy"])
        for name, found in draws.items():
            print(f"| {name} | {spread(found)} | {(np.median(found) - greedy) / np.median(step):.1%} |")


if __name__ == "__main__":
    run_main(main)
