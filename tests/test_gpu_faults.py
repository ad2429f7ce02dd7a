"""Machines and environments in which a GPU cannot be used, as found by trying to break the command. No card needed."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from pathlib import Path
from typing import Any

import pytest
from command import run_here

from tinyvllm_cli.backends.gpu.driver import Driver
from tinyvllm_cli.backends.gpu.packages import EXTRAS, require_packages
from tinyvllm_cli.cli import exit_code
from tinyvllm_cli.errors import DeviceError

OLD, NEW = Driver(cuda_version=(12, 4), num_devices=1), Driver(cuda_version=(13, 0), num_devices=1)


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all there is of CuPy and NVIDIA's libraries: what is written into it is installed."""
    for name in [name for name in sys.modules if name.split(".")[0] == "cupy_backends"]:
        monkeypatch.delitem(sys.modules, name)
    real = importlib.metadata.version

    def version(name: str) -> str:
        if not name.startswith(("cupy", "nvidia")):
            return real(name)
        found = list(importlib.metadata.distributions(name=name, path=[str(tmp_path)]))
        if not found:
            raise importlib.metadata.PackageNotFoundError(name)
        return found[0].version

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def install(folder: Path, name: str, version: str | None = "14.2.0") -> None:
    """version None: an installation or removal that broke off."""
    info = folder / f"{name.replace('-', '_')}-{version or '14.2.0'}.dist-info"
    info.mkdir()
    if version is not None:
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def write_cupy(folder: Path, text: str) -> None:
    """text: of CuPy's bindings of CUDA."""
    api = folder / "cupy_backends" / "cuda" / "api"
    api.mkdir(parents=True)
    (api / "runtime.py").write_text(text)


def refusal(driver: Driver) -> tuple[str, str]:
    """What is said, and the command that mends it."""
    with pytest.raises(DeviceError) as caught:
        require_packages(driver)
    said, _, command = str(caught.value).partition(": run `")
    assert len(str(caught.value).splitlines()) == 1 and command.endswith("`")
    return said, command.removesuffix("`")


# ---------------------------------------------------------------- libraries of two CUDAs


@pytest.mark.parametrize("requirement", EXTRAS[13][1:])
def test_libraries_for_a_newer_cuda_than_the_driver_runs_are_taken_away(environment: Path, requirement: str):
    """Where two versions of a library are installed the newer one is loaded, and fails on the card."""
    name = requirement.partition(">=")[0]
    install(environment, "cupy-cuda12x")
    write_cupy(environment, "")
    require_packages(OLD)
    install(environment, name, "13.0.1")
    said, command = refusal(OLD)
    assert said == f"{name} needs a driver for CUDA 13 and this one runs CUDA 12.4"
    assert f"uninstall -y cupy-cuda12x {name} && " in command and "'cupy-cuda12x>=14.2'" in command
    require_packages(NEW)


def test_one_command_leaves_nothing_of_the_newer_cuda(environment: Path):
    for name in ("cupy-cuda13x", "nvidia-cublas", "nvidia-cuda-nvrtc"):
        install(environment, name)
    said, command = refusal(OLD)
    assert said.startswith("cupy-cuda13x and nvidia-cublas and nvidia-cuda-nvrtc need a driver for CUDA 13")
    assert "uninstall -y cupy-cuda13x nvidia-cublas nvidia-cuda-nvrtc && " in command


# ---------------------------------------------------------------- installations that are not whole


def test_an_installation_that_broke_off_is_mended(environment: Path):
    install(environment, "cupy-cuda13x", version=None)
    said, command = refusal(NEW)
    assert said == "cupy-cuda13x 0 is too old, wanted 14.2 or later"
    assert "uninstall -y cupy-cuda13x && " in command


@pytest.mark.parametrize(
    "files", [["cupy_backends/left_over"], ["cupy_backends/__init__.py"], ["cupy_backends.py"]], ids=str
)
def test_what_is_called_cupy_and_is_not_is_no_cupy(environment: Path, files: list[str]):
    install(environment, "cupy-cuda13x")
    for file in files:
        (environment / file).parent.mkdir(exist_ok=True)
        (environment / file).touch()
    importlib.invalidate_caches()
    said, _ = refusal(NEW)
    assert said.startswith("cupy-cuda13x 14.2.0 cannot be imported (No module named 'cupy_backends.cuda'")


def test_the_reason_is_what_failed_and_not_the_banner_around_it(environment: Path):
    install(environment, "cupy-cuda13x")
    banner = "raise ImportError('\\n====\\nFailed to import.') from ModuleNotFoundError('no libfoo.so')"
    write_cupy(environment, banner)
    said, _ = refusal(NEW)
    assert said == "cupy-cuda13x 14.2.0 cannot be imported (no libfoo.so)"


# ---------------------------------------------------------------- limits of the process, and what was typed


def test_threads_that_cannot_be_started_are_no_bug(capfd: Any):
    def command() -> None:
        raise RuntimeError("can't start new thread")

    assert exit_code(command) == 1
    said = capfd.readouterr().err
    assert said.startswith("error: this process may not start more threads") and "bug" not in said


@pytest.mark.parametrize("text", ["", " 0.9", "20GiB "])
def test_a_size_that_is_refused_is_shown_with_its_spaces(text: str, capfd: Any):
    assert run_here("run", "in.jsonl", "--gpu-memory", text) == 2
    assert f"found '{text}', wanted" in capfd.readouterr().err
