"""What a step costs the host, counted: calls of CUDA, launches, bytes, calls of Python, memory. No card is needed."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_backend import request
from idle_gpu import CONFIG, IdleRuntime, idle_backend

from tinyvllm_cli.backends.gpu.backend import GpuBackend
from tinyvllm_cli.engine.engine import Engine
from tinyvllm_cli.text.together import Asking, together
from tinyvllm_cli.types import Request

SLOTS = 256
PROMPT = 32  # tokens: the positions from 32 to 47 cross no border of blocks
LAYERS = CONFIG.num_layers
CLOSE = 16 * 16  # bytes: arrays of an upload lie at multiples of 16


def prompt(i: int) -> list[int]:
    """Of no other's prefix: what is computed once for many is another matter."""
    return [i // 300, i % 300, *[5] * (PROMPT - 2)]


class Silent:
    """An answer whose text costs nothing: that is the text side's."""

    text, reasoning, stopped_by = "", None, None

    def push(self, token_id: int) -> str:
        return ""

    def finish(self) -> str:
        return ""


class SilentCodec:
    def least_tokens(self, request: Request) -> int:
        return 0

    def together(self, askings: list[Asking[Any]]) -> list[Any]:
        return together(askings, None)  # none asks for anything

    def asking(self, request: Request) -> Asking[list[int]]:
        yield from ()
        return list(request.prompt_token_ids or ())

    def answer(self, request: Request, prompt_ids: list[int]) -> Silent:
        return Silent()


@dataclass(frozen=True)
class Running:
    """An engine with a sequence in every slot, all of which decode."""

    engine: Engine
    backend: GpuBackend
    cuda: IdleRuntime

    def counted(self, act: Callable[[], object]) -> tuple[Counter[str], Counter[str], int]:
        """Calls of the CUDA runtime, launches by name, bytes uploaded."""
        calls, launches, uploaded = self.cuda.calls.copy(), Counter(self.backend.counts()), self.cuda.uploaded
        act()
        return self.cuda.calls - calls, Counter(self.backend.counts()) - launches, self.cuda.uploaded - uploaded


@pytest.fixture
def running() -> Iterator[Running]:
    with idle_backend(SLOTS) as (backend, cuda):
        engine = Engine(backend, SilentCodec(), eos_token_ids=(2, 7))
        for i in range(SLOTS):
            engine.add(request(i, prompt(i), max_tokens=400))
        while engine.stats.completion_tokens < 5 * SLOTS:  # until the shape of the step is captured
            engine.step()
        engine.check()
        yield Running(engine, backend, cuda)


def test_a_decode_step_is_one_upload_one_graph_and_one_copy_back(running: Running):
    calls, launches, uploaded = running.counted(running.engine.step)
    # An event for the upload, which is waited for before its memory is used again, and one for what comes back.
    assert calls == {"memcpyAsync": 2, "eventRecord": 2, "eventSynchronize": 2}
    assert launches.pop("graphs") == 1
    outside = Counter(running.backend._device.kernels.counts)
    running.engine.step()
    assert running.backend._device.kernels.counts == outside, "all launches are in the graph"
    # Of each row 8 numbers and 18 words of options, and an item of attention, which has 5.
    assert uploaded == pytest.approx(4 * SLOTS * (8 + 18 + 5), abs=CLOSE)


def test_a_decode_step_launches_few_kernels(running: Running):
    _, launches, _ = running.counted(running.engine.step)
    each = dict.fromkeys(("rope_write", "attend_decode", "attend_tail", "silu_mul"), LAYERS)
    once = {"embed": 1, "sample_rows": 1, "graphs": 1}
    assert launches == {**each, **once, "rms_norm": 2 * LAYERS + 1, "product": 4 * LAYERS + 1}


def test_a_step_whose_tables_have_changed_uploads_the_changes(running: Running):
    """Once in 16 steps each sequence gets a block, here as many of them at once as got their slots together."""
    together = running.backend.limits.admit_slots
    steps = [running.counted(running.engine.step)[1:] for _ in range(16)]
    changing = [uploaded for launches, uploaded in steps if launches["place_blocks"] == 1]
    (plain,) = {uploaded for launches, uploaded in steps if "place_blocks" not in launches}
    assert changing == [pytest.approx(plain + 8 * together, abs=CLOSE)] * (SLOTS // together)


def test_a_step_with_a_prompt_waits_and_allocates_for_nothing(running: Running):
    """One sequence ends, another comes: its prompt is computed beside the rest, kernel by kernel."""
    running.engine.abort(3)
    running.engine.add(request(SLOTS, prompt(SLOTS), max_tokens=400))
    calls, launches, _ = running.counted(running.engine.step)
    # A copy more, of the prompt's tokens into the token table.
    assert calls == {"memcpyAsync": 3, "eventRecord": 2, "eventSynchronize": 2}
    assert launches["attend_prefill"] == launches["attend_decode"] == LAYERS
    assert launches.total() <= 11 * LAYERS + 5, launches


def test_most_steps_are_captured_while_the_queue_lasts(running: Running):
    """Prompts wait for a sixteenth of the slots: as sequences end one by one, every fourth step has some at most."""
    engine, counts = running.engine, running.backend.counts
    for i in range(SLOTS):
        engine.abort(i)
    for i in range(4 * SLOTS):
        engine.add(request(SLOTS + i, prompt(SLOTS + i), max_tokens=16 + i * 37 % 113))  # 16..128 in no order
    engine.step()  # they join the queue
    graphs = steps = 0
    while len(engine._batcher.waiting) >= running.backend.limits.refill_slots:
        before = counts()["graphs"]
        engine.step()
        graphs, steps = graphs + counts()["graphs"] - before, steps + 1
    assert steps > 100 and graphs / steps > 3 / 4, (graphs, steps)


def python_calls(act: Callable[[], object]) -> Counter[str]:
    """Functions that are called: "call" of Python's, "c_call" of C's, but those of and by NumPy's own, whose number
    its version decides. The collector rests: when it comes, and whose callbacks and finalizers it then calls, depends
    on the tests before."""
    calls: Counter[str] = Counter()
    numpy_files = str(Path(np.__file__).parent)

    def count(frame: Any, event: str, arg: Any) -> None:
        if not frame.f_code.co_filename.startswith(numpy_files):
            calls[event] += 1

    gc.disable()
    sys.setprofile(count)
    try:
        act()
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls


def test_a_decode_step_calls_few_functions(running: Running):
    """Two of Python's for each token: its text is made, and itself told; three of C's, as it joins two lists."""
    calls = python_calls(running.engine.step)
    assert calls["call"] <= 2 * SLOTS + 164, calls
    assert calls["c_call"] <= 3 * SLOTS + 118, calls


def test_a_step_with_a_prompt_calls_few_functions(running: Running):
    plain = python_calls(running.engine.step)
    running.engine.abort(3)
    running.engine.add(request(SLOTS, prompt(SLOTS), max_tokens=400))
    calls = python_calls(running.engine.step)
    assert calls["call"] - plain["call"] <= 39 * LAYERS + 125, (calls, plain)


def test_a_decode_step_takes_little_memory_and_gives_it_back(running: Running):
    """What stays are the lists of the tokens, which move as they grow."""
    for _ in range(3):
        running.engine.step()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(10):
            running.engine.step()
        after, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak - before < 1000 * SLOTS, f"{peak - before} bytes at once"
    assert after - before < 600 * SLOTS, f"{after - before} bytes more after ten steps"
