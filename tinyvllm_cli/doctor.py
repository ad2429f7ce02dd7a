"""Checks of the machine, each with the command that mends it, and a known answer through the real engine."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tinyvllm_cli.backends.choose import Chosen
from tinyvllm_cli.backends.machine import available_cpus, available_memory
from tinyvllm_cli.config import DEFAULT_MODEL, EngineOptions
from tinyvllm_cli.errors import DeviceError, ModelError, RequestError, TinyvllmError
from tinyvllm_cli.model.catalogue import CATALOGUE, locate
from tinyvllm_cli.model.storage import cache_dir, free_bytes, is_offline, make_folder
from tinyvllm_cli.model.wheel_fetch import verify
from tinyvllm_cli.said import format_bytes

if TYPE_CHECKING:
    from tinyvllm_cli.load import LoadedModel
    from tinyvllm_cli.types import F32, Request

MEMORY_NEEDED = 1_000_000_000  # bytes: the default model's weights in float32 (0.54 GB), KV cache and the interpreter
DISK_NEEDED = 800_000_000  # bytes: the default model as it is fetched (0.1 GB, twice) and in float32 (0.54 GB)

MORE_MEMORY = "close other programs, or raise the limit of the container or of `ulimit -v`"
REPORT_IT = "give --backend cpu meanwhile, and report this as a bug with all that doctor says"
REINSTALL_NUMPY = f"{sys.executable} -m pip install --force-reinstall --only-binary :all: numpy"

QUESTION = "What is the capital of France?"
# Greedy ids of transformers 5.24 in float32 on the same weights, "The capital of France is Paris." and EOS; and how far
# the logit of each lies above the next.
KNOWN_IDS = (504, 3575, 282, 4649, 314, 7042, 30, 2)
KNOWN_MARGINS = (0.0821, 4.66168, 4.74832, 5.04459, 3.37342, 4.65304, 0.29764, 2.92815)
MAX_MODEL_LEN = 256
COMPARED_TOKENS = 8  # of an answer, after the prompt


class NoAnswerError(TinyvllmError):
    """A model that was loaded could not answer."""


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    ok: bool
    found: str
    mend: str = ""  # what to do where it is not ok


def run_checks(report: Callable[[str], None]) -> Iterator[Check]:
    """Every check in order, each as soon as it is done. `report` gets a line before the default model is fetched."""
    yield from _guarded("Python", _python)
    yield from _guarded("NumPy", _numpy)
    yield from _guarded("memory", _memory)
    yield from _guarded("cache", _cache)
    yield from _guarded("default model", _default_model)
    yield from _guarded("known answer", lambda: _known_answer(report))
    yield from _guarded("GPU", lambda: _gpu(report))


def compare_backends(model: str, report: Callable[[str], None]) -> Iterator[Check]:
    """The question on the GPU and the CPU, op by op on the same inputs: a check for each op, then the first at fault.

    TinyvllmError where the model cannot be loaded or there is no GPU.
    """
    from tinyvllm_cli.backends.gpu import ops
    from tinyvllm_cli.backends.gpu.driver import find_driver
    from tinyvllm_cli.backends.gpu.parity import compare_prompts, worst_by_op

    if find_driver() is None:
        raise DeviceError(
            "--compare cpu needs a GPU, and no NVIDIA device is visible: see whether `nvidia-smi` lists one"
        )
    with closing(_open(model, "gpu", 1, report)) as loaded:
        prompt_ids = _prompt_ids(loaded, QUESTION)
        comparisons = compare_prompts(loaded.backend, [prompt_ids], COMPARED_TOKENS, ops)
    for op, worst in worst_by_op(comparisons).items():
        yield Check(op, worst.ok, str(worst))
    first = next((comparison for comparison in comparisons if not comparison.ok), None)
    found = "none" if first is None else f"{first.op}: {first}"
    yield Check("first op that differs beyond its tolerance", first is None, found, REPORT_IT)


def _guarded(name: str, check: Callable[[], Check | Iterator[Check]]) -> Iterator[Check]:
    """What a check finds, or why it could not be made."""
    try:
        done = check()
        yield from (done,) if isinstance(done, Check) else done
    except TinyvllmError as error:
        yield Check(name, False, str(error))
    except MemoryError:
        yield Check(name, False, "not enough memory", MORE_MEMORY)
    except Exception as error:  # whatever is broken here is what the user came to learn
        yield Check(name, False, f"{type(error).__name__}: {error}", f"{sys.executable} -m pip check")


def _python() -> Check:
    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}, {available_cpus()} CPUs"
    ok = sys.version_info >= (3, 11) and os.name == "posix"
    return Check("Python", ok, found, "use Python 3.11 or later on Linux or macOS")


def _numpy() -> Check:
    import numpy as np
    from threadpoolctl import threadpool_info

    libraries = [library for library in threadpool_info() if library["user_api"] == "blas"]
    blas = ", ".join(f"{item['internal_api']} {item['version']}, {item['num_threads']} threads" for item in libraries)
    ok = bool(blas) or sys.platform == "darwin"  # threadpoolctl cannot see macOS' own BLAS
    found = f"{np.__version__} with {blas or ('Accelerate' if ok else 'no fast BLAS')}"
    return Check("NumPy", ok, found, REINSTALL_NUMPY)


def _memory() -> Check:
    free = available_memory()
    found = f"{format_bytes(free)} available, {format_bytes(MEMORY_NEEDED)} needed for the default model"
    return Check("memory", free >= MEMORY_NEEDED, found, MORE_MEMORY)


def _cache() -> Check:
    folder = cache_dir()
    make_folder(folder)
    free = free_bytes(folder)
    found = f"{folder} can be written, {format_bytes(free)} free"
    return Check(
        "cache", free >= DISK_NEEDED, found, f"export TINYVLLM_CACHE=a folder with {format_bytes(DISK_NEEDED)}"
    )


def _default_model() -> Check:
    entry = CATALOGUE[DEFAULT_MODEL]
    path = locate(entry)
    pull = f"TINYVLLM_OFFLINE=0 tinyvllm models pull {DEFAULT_MODEL}"
    if path is None:
        found = f"{DEFAULT_MODEL} is not here yet ({format_bytes(entry.source.wheel_size)})"
        return Check("default model", not is_offline(), found, pull)
    try:
        verify(path, entry.source.sha256)
    except ModelError as error:
        return Check("default model", False, str(error), f"rm {shlex.quote(str(path))} && {pull}")
    return Check("default model", True, f"{DEFAULT_MODEL} is here, {path}")


def _known_answer(report: Callable[[str], None]) -> Check:
    try:
        ids = answer(DEFAULT_MODEL, QUESTION, len(KNOWN_IDS), report)
    except NoAnswerError as error:
        found = str(error)
    else:
        if ids == KNOWN_IDS:
            return Check("known answer", True, "equal")
        found = f"different: ids {list(ids)}, wanted {list(KNOWN_IDS)}"
    from tinyvllm_cli.model.weights.converted import copies_folder

    model, copies = _default_model(), copies_folder(cache_dir())
    if not model.ok:
        return Check("known answer", False, found, model.mend)
    if copies.is_dir():
        return Check("known answer", False, found, f"rm -r {shlex.quote(str(copies))}")
    return Check("known answer", False, found, REINSTALL_NUMPY)


def _gpu(report: Callable[[str], None]) -> Iterator[Check]:
    """All that is asked of a GPU; DeviceError, with what mends it, where one is visible and cannot be used."""
    from tinyvllm_cli.backends.gpu.driver import find_driver

    if find_driver() is None:
        yield Check("GPU", True, "no NVIDIA device is visible, models run on the CPU")
        return
    from tinyvllm_cli.backends.gpu.checks import check_gpu

    for finding in check_gpu():
        yield Check(*finding, REPORT_IT)
    yield from _guarded("known answer on the GPU", lambda: _known_answer_on_gpu(report))


def _known_answer_on_gpu(report: Callable[[str], None]) -> Check:
    """Weights and activations are rounded there: steps count whose margin the rounding cannot bridge."""
    from tinyvllm_cli.backends.gpu.checks import agreement, forced_logits

    def logits(backend: Chosen) -> F32:
        with closing(_open(DEFAULT_MODEL, backend, len(KNOWN_IDS), report)) as loaded:
            return forced_logits(loaded.backend, _prompt_ids(loaded, QUESTION), KNOWN_IDS)

    found = agreement(logits("gpu"), logits("cpu"), KNOWN_IDS, KNOWN_MARGINS)
    return Check("known answer on the GPU", found.ok, str(found), REPORT_IT)


def answer(model: str, question: str, max_tokens: int, report: Callable[[str], None]) -> tuple[int, ...]:
    """Greedy ids that the real engine gives to one chat question. NoAnswerError where the model gives none, another
    TinyvllmError where it cannot be loaded.
    """
    from tinyvllm_cli.types import Completion

    with closing(_open(model, "cpu", 1, report)) as loaded:
        loaded.engine.add(_request(question, max_tokens))
        while not loaded.engine.idle:
            for event in loaded.engine.step():
                if isinstance(event, Completion):
                    if event.error is not None:
                        raise NoAnswerError(f"{event.error.type}: {event.error.message}")
                    return event.choices[0].token_ids
        raise TinyvllmError("the engine stopped without an answer")


def _open(model: str, backend: Chosen, slots: int, report: Callable[[str], None]) -> LoadedModel:
    from tinyvllm_cli.load import open_engine

    config = EngineOptions(slots=slots, max_model_len=MAX_MODEL_LEN)
    return open_engine(model, backend=backend, config=config, report=report)


def _prompt_ids(loaded: LoadedModel, question: str) -> list[int]:
    try:
        prompt_ids = loaded.codec.encode(_request(question))
    except RequestError as error:
        raise ModelError(f"the model's files do not take a prompt: {error.message}") from None
    if len(prompt_ids) > MAX_MODEL_LEN - COMPARED_TOKENS:
        raise ModelError(f"the chat template makes a question {len(prompt_ids)} tokens long, too many to compare")
    return prompt_ids


def _request(question: str, max_tokens: int = 1) -> Request:
    from tinyvllm_cli.types import Request, SamplingParams

    return Request(request_id=0, custom_id="doctor", prompt=question, params=SamplingParams(max_tokens=max_tokens))
