"""Checks of the machine, each with the command that mends it, and a known answer through the real engine."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tinyvllm_cli.backends.machine import available_cpus, available_memory
from tinyvllm_cli.config import DEFAULT_MODEL, EngineConfig
from tinyvllm_cli.errors import ModelError, TinyvllmError
from tinyvllm_cli.model.catalogue import CATALOGUE, locate
from tinyvllm_cli.model.storage import cache_dir, format_bytes, free_bytes, is_offline, make_folder
from tinyvllm_cli.model.wheel_fetch import verify

MEMORY_NEEDED = 1_000_000_000  # bytes: the default model's weights in float32 (0.54 GB), KV cache and the interpreter
DISK_NEEDED = 800_000_000  # bytes: the default model as it is fetched (0.1 GB, twice) and in float32 (0.54 GB)

MORE_MEMORY = "close other programs, or raise the limit of the container or of `ulimit -v`"
REINSTALL_NUMPY = f"{sys.executable} -m pip install --force-reinstall --only-binary :all: numpy"

QUESTION = "What is the capital of France?"
# Greedy ids of transformers 5.24 in float32 on the same weights; "The capital of France is Paris." and EOS.
KNOWN_IDS = (504, 3575, 282, 4649, 314, 7042, 30, 2)


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
    checks: tuple[tuple[str, Callable[[], Check]], ...] = (
        ("Python", _python),
        ("NumPy", _numpy),
        ("memory", _memory),
        ("cache", _cache),
        ("default model", _default_model),
        ("known answer", lambda: _known_answer(report)),
    )
    for name, check in checks:
        try:
            yield check()
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


def answer(model: str, question: str, max_tokens: int, report: Callable[[str], None]) -> tuple[int, ...]:
    """Greedy ids that the real engine gives to one chat question. NoAnswerError where the model gives none, another
    TinyvllmError where it cannot be loaded.
    """
    from tinyvllm_cli.load import open_engine
    from tinyvllm_cli.types import Completion, Message, Request, SamplingParams

    loaded = open_engine(model, config=EngineConfig(slots=1, max_model_len=256), report=report)
    try:
        loaded.engine.add(
            Request(
                request_id=0,
                custom_id="doctor",
                messages=(Message("user", question),),
                params=SamplingParams(max_tokens=max_tokens),
            )
        )
        while not loaded.engine.idle:
            for event in loaded.engine.step():
                if isinstance(event, Completion):
                    if event.error is not None:
                        raise NoAnswerError(f"{event.error.type}: {event.error.message}")
                    return event.choices[0].token_ids
        raise TinyvllmError("the engine stopped without an answer")
    finally:
        loaded.close()
