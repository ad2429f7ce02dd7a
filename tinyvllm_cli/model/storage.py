"""The user's cache folder: where it is, whether there is room in it, one writer at a time, and when to stay offline."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tinyvllm_cli.errors import ModelError
from tinyvllm_cli.said import format_bytes


def cache_dir() -> Path:
    """The folder named by TINYVLLM_CACHE, else the platform's own place for caches. It may not exist yet.

    ModelError where neither is known: a user without a home.
    """
    import platformdirs

    override = os.environ.get("TINYVLLM_CACHE")
    try:
        return Path(override or platformdirs.user_cache_dir("tinyvllm")).expanduser().absolute()
    except RuntimeError as error:
        raise ModelError(f"no folder for the cache is known ({error}): set TINYVLLM_CACHE to one") from None


def known_cache_dir() -> Path | None:
    """cache_dir(), or None where no folder is known: what would be kept there is made again each time."""
    try:
        return cache_dir()
    except ModelError:
        return None


def is_offline() -> bool:
    """Whether TINYVLLM_OFFLINE forbids every use of the network."""
    return os.environ.get("TINYVLLM_OFFLINE", "").strip().lower() not in ("", "0", "false", "no", "off")


def make_folder(folder: Path) -> None:
    """Make a folder of the cache, or raise a ModelError that names TINYVLLM_CACHE."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(None, "permission denied")
    except OSError as error:
        raise ModelError(
            f"the cache folder {folder} cannot be written ({error.strerror}): set TINYVLLM_CACHE to another folder"
        ) from None


def free_bytes(folder: Path) -> int:
    """Free disk space where `folder` is, or would be made."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def require_room(folder: Path, needed: int, *, what: str, variable: str) -> None:
    """Raise a ModelError where `needed` bytes do not fit; `variable` is the setting that moves the folder elsewhere."""
    free = free_bytes(folder)
    if free < needed:
        raise ModelError(
            f"{what} needs {format_bytes(needed)} of disk and {folder} has {format_bytes(free)} left: "
            f"make room, or set {variable} to a folder on another disk"
        )


@contextmanager
def locked(path: Path, *, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold the lock file `path`; `on_wait` is called once where another process has it. It falls with the process."""
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
