"""Write a model of random weights as a folder in Hugging Face layout, of two shards, which every command opens."""

from __future__ import annotations

import errno
import math
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from tinyvllm_cli.backends.base import Backend
from tinyvllm_cli.errors import ModelError, UsageError
from tinyvllm_cli.model.hub import CONTROL
from tinyvllm_cli.model.presets import HFConfig
from tinyvllm_cli.model.random_weights import BF16, DTYPE, read_preset
from tinyvllm_cli.model.storage import free_bytes
from tinyvllm_cli.model.weights.layout import tensor_shapes
from tinyvllm_cli.model.weights.safetensors import INDEX
from tinyvllm_cli.model.weights.safetensors_writer import Shapes, write_safetensors
from tinyvllm_cli.model.weights.source import TensorSource
from tinyvllm_cli.said import format_bytes, on_terminal
from tinyvllm_cli.text.random_tokenizer import random_tokenizer
from tinyvllm_cli.text.tokenizer import CONFIG_FILE, TOKENIZER_FILE

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
ROOM_FOR_TEXT = 50_000_000  # bytes of a disk, for all but the shards


def check_folder(folder: Path) -> None:
    """UsageError where something is in the folder, or it is none: a cheap check before a model is made."""
    try:
        found = None
        if CONTROL.search(os.path.realpath(folder)):
            found = "has a name with control characters, which no model has"
        elif folder.is_dir():
            found = "is not empty" if any(folder.iterdir()) else None
        elif folder.exists():
            found = "is no folder"
        elif not (parent := next(filter(Path.exists, Path(os.path.realpath(folder)).parents))).is_dir():
            found = f"lies in {parent}, which is no folder"
    except OSError as error:
        raise UsageError(f"{folder} cannot be looked at: {error.strerror}") from None
    if found:
        raise UsageError(f"{folder} {found}: give the name of a new one, or of one that is empty")


def quickest_source(backend: Backend, tensors: TensorSource) -> TensorSource:
    """Random weights from where they are read soonest: a GPU that holds them as they are stored, else NumPy. The bits
    are the same."""
    from tinyvllm_cli.backends.gpu.backend import GpuBackend

    return backend.tensors() if isinstance(backend, GpuBackend) and backend.facts.dtype == DTYPE else tensors


def write_folder(folder: Path, config: HFConfig, tensors: TensorSource, *, progress: bool) -> None:
    """config.json with these keys, the tensors in its model's shapes, and a tokenizer.

    Another folder beside it is written and gets its name when it is whole, config.json last: what a killed process
    leaves is no model. A folder that is there stays the one it is, mounted or somebody's current one: the other is
    written inside of it, and what it holds is moved. progress: a bar on standard error, where that is a terminal.
    UsageError as of check_folder; ModelError where there is no room or it cannot be written.
    """
    folder = Path(os.path.realpath(folder))  # where a link leads to; Path.resolve raises where it leads round
    check_folder(folder)
    shapes = tensor_shapes(read_preset(config))
    there = folder.exists()
    # One name in a folder that is there, so that no two processes fill it.
    part = folder / "model.part" if there else folder.with_name(f"{folder.name}.{secrets.token_hex(4)}.part")
    try:
        part.parent.mkdir(parents=True, exist_ok=True)
        _require_room(part.parent, shapes)
        part.mkdir()
        try:
            _write_weights(part, shapes, tensors, progress=progress)
            _write_text(part, config)
            _write_json(part / "config.json", config)
            if there:
                _move_up(part)
            else:
                part.replace(folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)  # its name is gone where all went well
    except OSError as error:
        raise ModelError(f"the model cannot be written to {folder}: {error.strerror}") from error


def _move_up(part: Path) -> None:
    """What is in a folder into its parent, which holds nothing else; all of it, config.json last, or nothing."""
    if set(part.parent.iterdir()) != {part}:
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))
    moved: list[Path] = []
    try:
        for path in sorted(part.iterdir(), key=lambda path: path.name == "config.json"):
            moved.append(part.parent / path.name)
            path.replace(moved[-1])
    except BaseException:
        for path in moved:
            path.unlink(missing_ok=True)
        raise


def _require_room(parent: Path, shapes: Shapes) -> None:
    needed, free = _nbytes(shapes) + ROOM_FOR_TEXT, free_bytes(parent)
    if free < needed:
        raise ModelError(
            f"the model needs {format_bytes(needed)} of disk and {parent} has {format_bytes(free)} left: make room, or "
            "give a folder on another disk"
        )


def _write_weights(folder: Path, shapes: Shapes, tensors: TensorSource, *, progress: bool) -> None:
    """Two shards of about the same size, and their index."""
    total = _nbytes(shapes)
    first: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        if 2 * _nbytes(first) >= total:
            break
        first[name] = shape
    parts = (first, {name: shape for name, shape in shapes.items() if name not in first})
    with _bar(total, shown=progress) as advance:
        for file, part in zip(SHARDS, parts, strict=True):
            write_safetensors(folder / file, part, tensors, DTYPE, metadata={"format": "pt"}, written=advance)
    weight_map = {name: file for file, part in zip(SHARDS, parts, strict=True) for name in part}
    _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _write_text(folder: Path, config: HFConfig) -> None:
    tokenizer = random_tokenizer(config)
    (folder / TOKENIZER_FILE).write_text(tokenizer.core.to_str(), encoding="utf-8")
    names = {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token}
    _write_json(folder / CONFIG_FILE, {"tokenizer_class": "PreTrainedTokenizerFast", **names})
    ids = {name: config[name] for name in ("bos_token_id", "eos_token_id")}
    _write_json(folder / "generation_config.json", ids)


def _write_json(path: Path, value: Any) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=2))


def _nbytes(shapes: Shapes) -> int:
    return sum(BF16.itemsize * math.prod(shape) for shape in shapes.values())


@contextmanager
def _bar(total: int, *, shown: bool) -> Iterator[Callable[[int], None]]:
    """A bar over so many bytes; what it gives is called with those that are done."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not (shown and on_terminal())) as bar:
        task = bar.add_task("", total=total)
        yield lambda nbytes: bar.advance(task, nbytes)
