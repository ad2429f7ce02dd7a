"""From a model's name to a running engine: find the files, read the headers, fill the backend, join the text side."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from tinyvllm_cli.backends.base import Backend
from tinyvllm_cli.config import EngineConfig
from tinyvllm_cli.engine.engine import Engine
from tinyvllm_cli.errors import ModelError
from tinyvllm_cli.model.checkpoint import Checkpoint, open_checkpoint
from tinyvllm_cli.model.hub import ModelFiles, cache_dir, find_model
from tinyvllm_cli.model.weights.converted import converted
from tinyvllm_cli.text.chat_template import load_chat_template
from tinyvllm_cli.text.codec import TextCodec
from tinyvllm_cli.text.tokenizer import load_tokenizer


@dataclass(frozen=True)
class LoadedModel:
    """A model that is ready to answer."""

    engine: Engine
    backend: Backend
    codec: TextCodec
    checkpoint: Checkpoint
    files: ModelFiles
    load_s: float  # from finding the files to the first step that could run

    def close(self) -> None:
        self.backend.close()
        self.checkpoint.tensors.close()


def open_engine(
    model: str,
    *,
    revision: str | None = None,
    config: EngineConfig,
    system: str | None = None,
    report: Callable[[str], None],
    progress: bool = True,
) -> LoadedModel:
    """Make a model ready. `report` gets a line when something is fetched; progress: a bar while it is, on a terminal.

    Errors: ModelError for whatever the files lack, TinyvllmError where the machine does.
    """
    started = time.monotonic()
    files = find_model(model, revision=revision, report=report, progress=progress)
    checkpoint = open_checkpoint(files.path)
    tokenizer = load_tokenizer(checkpoint.source)
    codec = TextCodec(tokenizer, load_chat_template(checkpoint.source), system, checkpoint.config.vocab_size)
    backend = _cpu_backend(_converted(checkpoint), config, tokenizer.size)
    engine = Engine(backend, codec, eos_token_ids=checkpoint.generation.eos_token_ids, run_seed=config.seed)
    return LoadedModel(engine, backend, codec, checkpoint, files, time.monotonic() - started)


def _converted(checkpoint: Checkpoint) -> Checkpoint:
    try:
        folder = cache_dir()
    except ModelError:  # a user without a home has no cache: the weights are converted as they are read
        return checkpoint
    return converted(checkpoint, folder)


def _cpu_backend(checkpoint: Checkpoint, config: EngineConfig, tokenizer_size: int) -> Backend:
    from tinyvllm_cli.backends.cpu.backend import CpuBackend

    return CpuBackend(checkpoint.config, checkpoint.tensors, config, tokenizer_size=tokenizer_size)
