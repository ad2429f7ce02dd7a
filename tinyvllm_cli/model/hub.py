"""From the name of a model to its files: a folder, a .gguf file, a name in the catalogue or a Hub id."""

from __future__ import annotations

import difflib
import errno
import os
import re
import stat
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tinyvllm_cli.errors import ModelError, UsageError
from tinyvllm_cli.model import catalogue, hub_repo
from tinyvllm_cli.model.storage import cache_dir
from tinyvllm_cli.model.weights.gguf import is_gguf
from tinyvllm_cli.said import on_terminal

__all__ = ["ModelFiles", "cache_dir", "find_model"]

HUB_ID = re.compile(r"(?P<repo>[\w][\w.-]*/[\w][\w.-]*)(?:/(?P<file>.+\.(?i:gguf)))?", re.ASCII)
ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG)  # errors of a path that leads nowhere
CONTROL = re.compile(r"[\x00-\x1f\x7f]")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Where the files of a model are on this machine."""

    path: Path  # a folder in Hugging Face layout, or a GGUF file
    name: str  # as the user gave it
    source: Literal["folder", "file", "hub", "catalogue"]
    commit: str | None = None  # of a Hub repository


def find_model(
    name: str,
    *,
    revision: str | None = None,
    report: Callable[[str], None] = lambda line: print(line, file=sys.stderr),
    progress: bool = True,
    fetch: bool = True,
) -> ModelFiles:
    """Find a model's files, and fetch them where `name` is a Hub id or a catalogue name that is not here yet.

    report: gets one line before anything is fetched. progress: a bar on standard error, where that is a terminal.
    fetch: False asks for what is on this machine only. Raises ModelError, or UsageError for a misplaced revision.
    """
    progress = progress and on_terminal()
    entry = catalogue.CATALOGUE.get(name)
    local = _local_files(name)
    if local is not None and (entry is None or local.is_file() or os.path.lexists(local / "config.json")):
        _refuse_revision(revision, name)
        return _local_model(local, name)
    if entry is not None:
        _refuse_revision(revision, name)
        path = catalogue.obtain(entry, report=report, progress=progress) if fetch else catalogue.locate(entry)
        if path is None:
            raise _not_here(name)
        return ModelFiles(path, name, "catalogue")
    match = HUB_ID.fullmatch(name)
    if match is None or (match["file"] is None and name.lower().endswith(".gguf")):
        raise ModelError(_unknown(name))
    repo, file = match["repo"], match["file"]
    if fetch:
        path, commit = hub_repo.fetch(repo, file, revision=revision, report=report, progress=progress)
    elif cached := hub_repo.find_cached(repo, file, revision=revision):
        path, commit = cached
    else:
        raise _not_here(name)
    return ModelFiles(path, name, "hub", commit)


def _local_files(name: str) -> Path | None:
    """The folder or file that `name` is the path of, if there is one."""
    if not name or CONTROL.search(name):
        raise ModelError(f"{name!r} cannot name a model: give a folder, a .gguf file, a Hub id or a catalogue name")
    try:
        path = _path(name)
        path.lstat()  # a broken link is there
    except OSError as error:
        if error.errno in ABSENT:
            return None
        raise ModelError(f"cannot look at {name}: {error.strerror}") from None
    except (RuntimeError, ValueError):  # no such user's home; characters that no path has
        return None
    return path


def _local_model(path: Path, name: str) -> ModelFiles:
    if path.is_dir():
        if os.path.lexists(path / "config.json"):
            return ModelFiles(path, name, "folder")
        held = sorted(path.glob("*.gguf"))
        hint = f"; give the file: {held[0]}" if held else ""
        raise ModelError(f"{path} has no config.json, so it is no model folder in Hugging Face layout{hint}")
    try:
        if stat.S_ISREG(path.stat().st_mode) and is_gguf(path):  # a pipe would keep us waiting
            return ModelFiles(path, name, "file")
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from None
    raise ModelError(f"{path} is not a GGUF file; of a model in Hugging Face layout give the folder")


def _refuse_revision(revision: str | None, name: str) -> None:
    if revision is not None:
        raise UsageError(f"revision {revision} needs a model of the Hub (org/name); {name} is none")


def _not_here(name: str) -> ModelError:
    return ModelError(f"{name} is not on this machine: fetch it with `tinyvllm models pull {name}`")


def _unknown(name: str) -> str:
    """Why `name` leads nowhere, with the nearest name that would."""
    if "/" in name or name.startswith((".", "~")) or name.lower().endswith((".gguf", ".safetensors")):
        return f"there is no file or folder {name}{_nearest(Path(name).name, _siblings(name))}"
    hint = _nearest(name, list(catalogue.CATALOGUE)) or f"; the catalogue has {', '.join(catalogue.CATALOGUE)}"
    others = "a folder, a .gguf file or org/name of the Hub, such as Qwen/Qwen2.5-1.5B-Instruct"
    return f"there is no model {name}{hint}; else give {others}"


def _path(name: str) -> Path:
    """~ is the home where it stands first: Path("./~x") would be ~x, and that somebody's home."""
    return Path(os.path.expanduser(name))  # noqa: PTH111


def _siblings(name: str) -> list[str]:
    try:
        return [e.name for e in _path(name).parent.iterdir() if e.suffix.lower() == ".gguf" or e.is_dir()]
    except (OSError, RuntimeError, ValueError):
        return []


def _nearest(name: str, candidates: list[str]) -> str:
    """In whatever case."""
    lower = {candidate.lower(): candidate for candidate in candidates}
    near = difflib.get_close_matches(name.lower(), lower, n=3, cutoff=0.5)
    near += [candidate for candidate in lower if candidate.startswith(name.lower()) and candidate not in near]
    close = [lower[candidate] for candidate in near]
    return f"; did you mean {' or '.join(close[:3])}?" if name and close else ""
