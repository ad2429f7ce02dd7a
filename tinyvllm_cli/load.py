"""From a model's name to a running engine: find the files, read the headers, fill the backend, join the text side."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from functools import partial

from tinyvllm_cli.backends.base import Backend
from tinyvllm_cli.backends.choose import (
    BackendName,
    Chosen,
    check_dtype,
    choose_backend,
    engine_config,
    open_backend,
    start_backend,
)
from tinyvllm_cli.backends.gpu.wake import wake_gpu
from tinyvllm_cli.backends.machine import available_cpus
from tinyvllm_cli.config import EngineConfig, EngineOptions
from tinyvllm_cli.engine.engine import Engine
from tinyvllm_cli.model.checkpoint import Checkpoint, open_checkpoint
from tinyvllm_cli.model.hub import ModelFiles, find_model
from tinyvllm_cli.model.storage import known_cache_dir
from tinyvllm_cli.text.chat_template import load_chat_template
from tinyvllm_cli.text.codec import TextCodec
from tinyvllm_cli.text.tokenizer import load_tokenizer

MASK_THREADS = 16  # at most: more have too little to do each


@dataclass(frozen=True)
class TextSide:
    """What of a model is there before its weights."""

    codec: TextCodec
    checkpoint: Checkpoint
    files: ModelFiles

    def close(self) -> None:
        self.checkpoint.tensors.close()


@dataclass(frozen=True)
class Prepared:
    """A model whose weights have not been read: all that a run can be checked with before it starts."""

    backend: Chosen
    config: EngineConfig  # in force
    text: TextSide
    seconds: float  # that it took

    def close(self) -> None:
        self.text.close()


@dataclass(frozen=True)
class LoadedModel:
    """A model that is ready to answer."""

    engine: Engine
    config: EngineConfig  # in force
    backend: Backend
    codec: TextCodec
    checkpoint: Checkpoint
    files: ModelFiles
    load_s: float  # finding the files, and making them ready for the first step

    def close(self) -> None:
        self.engine.close()
        self.backend.close()
        self.checkpoint.tensors.close()


def open_text_side(
    model: str,
    *,
    revision: str | None = None,
    system: str | None = None,
    now: datetime | None = None,
    report: Callable[[str], None],
    progress: bool = True,
    beside: Callable[[], object] = lambda: None,
) -> TextSide:
    """Find the files, read the headers, join the text side. now: the date that chat templates see. beside: what can be
    done while a tokenizer is read, which takes a while and lets go of the interpreter.

    As prepare(); ModelError for whatever they lack.
    """
    files = find_model(model, revision=revision, report=report, progress=progress)
    checkpoint = open_checkpoint(files.path)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(load_tokenizer, checkpoint.source)
        template = load_chat_template(checkpoint.source, now=now)
        beside()
        tokenizer = reading.result()
    codec = TextCodec(
        tokenizer,
        template,
        system,
        checkpoint.config.vocab_size,
        checkpoint.generation.eos_token_ids,
        threads=min(MASK_THREADS, available_cpus()),
    )
    return TextSide(codec, checkpoint, files)


def prepare(
    model: str,
    *,
    revision: str | None = None,
    backend: BackendName = "auto",
    config: EngineOptions,
    system: str | None = None,
    now: datetime | None = None,
    report: Callable[[str], None],
    progress: bool = True,
) -> Prepared:
    """Find a model and read all but its weights. now: as of open_text_side(). `report` gets a line when something is
    fetched; progress: a bar while it is, on a terminal.

    Errors: ModelError for whatever the files lack, DeviceError for the GPU (before anything is fetched, where that
    can be told so early), UsageError for a config that cannot be.
    """
    started = time.monotonic()
    wake_gpu(backend)
    chosen = choose_backend(backend)
    check_dtype(chosen, config.dtype)
    start = partial(start_backend, chosen)
    text = open_text_side(
        model, revision=revision, system=system, now=now, report=report, progress=progress, beside=start
    )
    in_force = engine_config(chosen, config, text.checkpoint)
    return Prepared(chosen, in_force, text, time.monotonic() - started)


def load(prepared: Prepared, *, deltas: bool = True) -> LoadedModel:
    """Read the weights and make the device ready. deltas: as of Engine.

    ModelError where the weights do not fit, DeviceError for the GPU.
    """
    started = time.monotonic()
    config, codec, checkpoint = prepared.config, prepared.text.codec, prepared.text.checkpoint
    device = open_backend(prepared.backend, checkpoint, config, codec.tokenizer.size, known_cache_dir())
    engine = new_engine(device, codec, checkpoint, config, deltas=deltas)
    seconds = prepared.seconds + time.monotonic() - started
    return LoadedModel(engine, config, device, codec, checkpoint, prepared.text.files, seconds)


def new_engine(
    device: Backend, codec: TextCodec, checkpoint: Checkpoint, config: EngineConfig, *, deltas: bool
) -> Engine:
    """One that takes nothing for known of what the device's blocks hold. deltas: as of Engine."""
    return Engine(
        device,
        codec,
        eos_token_ids=checkpoint.generation.eos_token_ids,
        run_seed=config.seed,
        prefix_cache=config.prefix_cache,
        deltas=deltas,
    )


def open_engine(
    model: str,
    *,
    revision: str | None = None,
    backend: BackendName = "auto",
    config: EngineOptions,
    report: Callable[[str], None],
) -> LoadedModel:
    """prepare() and load(), with their errors."""
    return load(prepare(model, revision=revision, backend=backend, config=config, report=report))
