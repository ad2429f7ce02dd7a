"""What is measured: a model that is open, from its files or of random weights."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from tinyvllm_cli.backends.base import Backend
from tinyvllm_cli.backends.choose import BackendName, check_dtype, choose_backend, engine_config, open_backend
from tinyvllm_cli.config import EngineConfig, EngineOptions, ModelConfig
from tinyvllm_cli.load import open_engine
from tinyvllm_cli.model.storage import known_cache_dir
from tinyvllm_cli.text.codec import Answer, TextCodec
from tinyvllm_cli.text.tokenizer import Tokenizer
from tinyvllm_cli.types import Request


@dataclass(frozen=True, slots=True)
class Subject:
    name: str
    config: ModelConfig
    engine: EngineConfig  # in force
    backend: Backend
    codec: TextCodec
    num_ids: int  # ids below it may stand in a prompt
    eos_token_ids: tuple[int, ...]
    path: Path | None  # of its files
    close: Callable[[], None]


def open_model(
    model: str,
    *,
    revision: str | None,
    backend: BackendName,
    options: EngineOptions,
    report: Callable[[str], None],
) -> Subject:
    """As `run` opens it. Errors as of load.open_engine."""
    loaded = open_engine(model, revision=revision, backend=backend, config=options, report=report)
    return Subject(
        name=loaded.files.name,
        config=loaded.checkpoint.config,
        engine=loaded.config,
        backend=loaded.backend,
        codec=loaded.codec,
        num_ids=loaded.codec.size,
        eos_token_ids=loaded.checkpoint.generation.eos_token_ids,
        path=loaded.files.path,
        close=loaded.close,
    )


def open_random(name: str, *, backend: BackendName, options: EngineOptions, write: Path | None) -> Subject:
    """A name of model/presets.py; write: a folder for its files. Errors as of load.open_engine and write_folder."""
    from tinyvllm_cli.model.presets import PRESETS
    from tinyvllm_cli.model.random_weights import RandomTensors, random_checkpoint
    from tinyvllm_cli.random_folder import check_folder, quickest_source, write_folder

    if write is not None:
        check_folder(write)
    chosen = choose_backend(backend)
    check_dtype(chosen, options.dtype)
    checkpoint = random_checkpoint(name)
    config, tensors = checkpoint.config, checkpoint.tensors
    assert isinstance(tensors, RandomTensors)
    engine = engine_config(chosen, options, checkpoint)
    device = open_backend(chosen, checkpoint, engine, config.vocab_size, known_cache_dir())
    if write is not None:
        try:
            write_folder(write, PRESETS[name], quickest_source(device, tensors), progress=True)
        except BaseException:
            device.close()
            raise
    return Subject(
        name=f"random weights of {name}",
        config=config,
        engine=engine,
        backend=device,
        codec=IdCodec(config.vocab_size),
        num_ids=config.vocab_size,
        eos_token_ids=(),
        path=write,
        close=device.close,
    )


def model_option(folder: str) -> str | None:
    """How a command names the model in a folder that `write_folder` has made; None where there is none, or not yet."""
    if not os.path.lexists(Path(folder) / "config.json"):  # the last of its files
        return None
    # A bare name could be that of another model, and one that starts with ~ somebody's home.
    return f"-m {folder if folder.startswith(('/', '.')) else f'./{folder}'}"


class IdCodec(TextCodec):
    """The text side where there is no tokenizer: prompts are ids, checked as in a run, and nobody reads answers."""

    def __init__(self, num_ids: int) -> None:
        super().__init__(cast(Tokenizer, _NumIds(num_ids)), template=None)

    def answer(self, request: Request, prompt_ids: Sequence[int]) -> Answer:  # noqa: ARG002
        return cast(Answer, _NoText())

    def token_bytes(self, token_id: int) -> bytes:  # noqa: ARG002
        return b""


@dataclass(frozen=True, slots=True)
class _NumIds:
    """All that the check of ids asks of a tokenizer."""

    size: int


class _NoText:
    """An answer without text."""

    text = ""
    reasoning = None
    stopped_by = None

    def push(self, token_id: int) -> str:  # noqa: ARG002
        return ""

    def push_all(self, token_ids: Sequence[int]) -> str:  # noqa: ARG002
        return ""

    def finish(self) -> str:
        return ""
