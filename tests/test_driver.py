"""What the driver and the installed packages say, without a card: every way in which a GPU cannot be used."""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tinyvllm_cli.backends.gpu import driver as driver_module
from tinyvllm_cli.backends.gpu import packages
from tinyvllm_cli.backends.gpu.driver import NO_DEVICE, Driver, find_driver
from tinyvllm_cli.backends.gpu.packages import EXTRAS, require_capability, require_packages
from tinyvllm_cli.errors import DeviceError

ROOT = Path(__file__).parent.parent
NEW = Driver(cuda_version=(13, 0), num_devices=1)
OLD = Driver(cuda_version=(12, 4), num_devices=1)


def store(value: Any) -> Callable[..., int]:
    """A function of the driver that writes through its last argument, a pointer."""

    def function(*arguments: Any) -> int:
        arguments[-1]._obj.value = value
        return 0

    return function


def fake_driver(
    monkeypatch: pytest.MonkeyPatch, *, version: int = 13000, init: int = 0, count: int = 1, nodes: int = 1
) -> SimpleNamespace:
    """A libcuda.so.1 that answers so, in a machine with that many cards."""
    library = SimpleNamespace(
        cuInit=lambda flags: init,
        cuDriverGetVersion=store(version),
        cuDeviceGetCount=store(count),
        cuGetErrorName=store(b"CUDA_ERROR_OF_A_TEST"),
    )
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    fake_nodes(monkeypatch, nodes)
    return library


def fake_nodes(monkeypatch: pytest.MonkeyPatch, nodes: int) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(driver_module, "_count_device_nodes", lambda: nodes)


def no_library(name: str) -> None:
    raise OSError(f"{name}: cannot open shared object file")


# ---------------------------------------------------------------- the driver


@pytest.mark.parametrize(("number", "version"), [(13000, (13, 0)), (12040, (12, 4)), (11080, (11, 8))])
def test_a_driver_that_works(monkeypatch: pytest.MonkeyPatch, number: int, version: tuple[int, int]):
    fake_driver(monkeypatch, version=number, count=2, nodes=8)
    assert find_driver() == Driver(version, 2, None)


def test_no_card_no_driver(monkeypatch: pytest.MonkeyPatch):
    fake_nodes(monkeypatch, 0)
    monkeypatch.setattr(ctypes, "CDLL", no_library)
    assert find_driver() is None


@pytest.mark.parametrize(("init", "count"), [(NO_DEVICE, 0), (999, 0), (0, 0)])
def test_a_driver_without_a_card(monkeypatch: pytest.MonkeyPatch, init: int, count: int):
    fake_driver(monkeypatch, init=init, count=count, nodes=0)
    assert find_driver() is None


@pytest.mark.parametrize("hidden", ["", " ", "-1"])
def test_hidden_cards_are_not_asked_for(monkeypatch: pytest.MonkeyPatch, hidden: str):
    fake_driver(monkeypatch)
    monkeypatch.setattr(ctypes, "CDLL", no_library)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert find_driver() is None


def test_cards_that_are_hidden_by_another_name(monkeypatch: pytest.MonkeyPatch):
    fake_driver(monkeypatch, init=NO_DEVICE, nodes=1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert find_driver() is None


def test_a_card_without_a_driver(monkeypatch: pytest.MonkeyPatch):
    fake_nodes(monkeypatch, 1)
    monkeypatch.setattr(ctypes, "CDLL", no_library)
    found = find_driver()
    assert found is not None and found.num_devices == 1
    assert found.problem is not None and found.problem.startswith(
        "libcuda.so.1: cannot open shared object file: install"
    )


@pytest.mark.parametrize("init", [NO_DEVICE, 803, 999])
def test_a_driver_that_fails(monkeypatch: pytest.MonkeyPatch, init: int):
    fake_driver(monkeypatch, init=init, nodes=1)
    found = find_driver()
    assert found is not None and found.problem is not None
    assert found.problem.startswith(f"CUDA error {init} (CUDA_ERROR_OF_A_TEST): `nvidia-smi`")


def test_a_driver_from_before_a_function(monkeypatch: pytest.MonkeyPatch):
    del fake_driver(monkeypatch).cuGetErrorName
    found = find_driver()
    assert found is not None and found.problem is not None
    assert found.problem.startswith("libcuda.so.1 has no function cuGetErrorName")


# ---------------------------------------------------------------- the packages


def fake_packages(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    """An environment in which these distributions (with _ for -) are all that there is of CuPy."""
    installed = {name.replace("_", "-"): version for name, version in versions.items()}

    def version(name: str) -> str:
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(importlib, "import_module", lambda name: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace())


def refusal(driver: Driver) -> str:
    with pytest.raises(DeviceError) as caught:
        require_packages(driver)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    return message


@pytest.mark.parametrize("name", ["cupy_cuda12x", "cupy_cuda13x", "cupy"])
@pytest.mark.parametrize("version", ["14.2.0", "14.10.1", "15.0.0rc1"])
def test_packages_that_do(monkeypatch: pytest.MonkeyPatch, name: str, version: str):
    fake_packages(monkeypatch, **{name: version})
    require_packages(NEW)


def test_cuda_12_does_for_an_older_driver(monkeypatch: pytest.MonkeyPatch):
    fake_packages(monkeypatch, cupy_cuda12x="14.2.0")
    require_packages(OLD)


@pytest.mark.parametrize(
    ("driver", "installed", "said", "uninstalled"),
    [
        (NEW, {}, "CuPy is not installed", None),
        (OLD, {}, "CuPy is not installed", None),
        (
            NEW,
            {"cupy_cuda12x": "14.2.0", "cupy_cuda13x": "14.2.0"},
            "cupy-cuda12x and cupy-cuda13x are installed, CuPy may stand only once",
            "cupy-cuda12x cupy-cuda13x",
        ),
        (NEW, {"cupy_cuda13x": "13.6.0"}, "cupy-cuda13x 13.6.0 is too old, wanted 14.2", "cupy-cuda13x"),
        (NEW, {"cupy_cuda12x": "14.1.9"}, "cupy-cuda12x 14.1.9 is too old, wanted 14.2", "cupy-cuda12x"),
        (OLD, {"cupy_cuda11x": "13.6.0"}, "cupy-cuda11x 13.6.0 is too old, wanted 14.2", "cupy-cuda11x"),
        (
            OLD,
            {"cupy_cuda13x": "14.2.0"},
            "cupy-cuda13x needs a driver for CUDA 13 and this one runs CUDA 12.4",
            "cupy-cuda13x",
        ),
    ],
)
def test_packages_are_mended_by_one_command(
    monkeypatch: pytest.MonkeyPatch, driver: Driver, installed: dict[str, str], said: str, uninstalled: str | None
):
    fake_packages(monkeypatch, **installed)
    message = refusal(driver)
    assert message.startswith(said)
    command = message.partition("run `")[2].removesuffix("`")
    wanted = " ".join(f"'{requirement}'" for requirement in EXTRAS[driver.cuda_version[0]])
    first = f"{sys.executable} -m pip uninstall -y {uninstalled} && " if uninstalled else ""
    assert command == f"{first}{sys.executable} -m pip install {wanted}"


def test_cupy_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch):
    def broken(name: str) -> None:
        raise ImportError("\nlibfoo.so: cannot open\nand a page of advice")

    fake_packages(monkeypatch, cupy_cuda13x="14.2.0")
    monkeypatch.setattr(importlib, "import_module", broken)
    assert "cupy-cuda13x 14.2.0 cannot be imported (libfoo.so: cannot open): run `" in refusal(NEW)


def test_an_environment_of_uv_has_no_pip(monkeypatch: pytest.MonkeyPatch):
    fake_packages(monkeypatch, cupy_cuda11x="12.0")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    command = refusal(NEW).partition("run `")[2]
    assert command.startswith(f"uv pip uninstall --python {sys.executable} cupy-cuda11x && uv pip install --python ")


def test_a_driver_that_is_too_old(monkeypatch: pytest.MonkeyPatch):
    fake_packages(monkeypatch)
    message = refusal(Driver(cuda_version=(11, 8), num_devices=1))
    assert (
        message == "the NVIDIA driver is too old: it runs CUDA 11.8, wanted 12.0 or later: install driver 525 or later"
    )


def test_a_driver_with_a_problem(monkeypatch: pytest.MonkeyPatch):
    fake_packages(monkeypatch, cupy_cuda13x="14.2.0")
    assert refusal(Driver((0, 0), 1, "of a test")) == "the NVIDIA driver cannot be used: of a test"


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (9, 0), (10, 0), (12, 1)])
def test_cards_since_ampere(capability: tuple[int, int]):
    require_capability(*capability, "a card")


@pytest.mark.parametrize("capability", [(7, 5), (6, 1)])
def test_cards_before_ampere(capability: tuple[int, int]):
    with pytest.raises(
        DeviceError, match=rf"^Tesla T4 has compute capability {capability[0]}\.{capability[1]}, wanted"
    ):
        require_capability(*capability, "Tesla T4")


def test_the_extras_are_those_of_the_project():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {f"cuda{major}": list(requirements) for major, requirements in EXTRAS.items()} == {
        name: requirements for name, requirements in extras.items() if name.startswith("cuda")
    }
    assert {12: "cupy-cuda12x", 13: "cupy-cuda13x"}.items() <= {
        major: requirements[0].partition(">=")[0] for major, requirements in EXTRAS.items()
    }.items()


def test_requirements_go_with_the_cupy_that_is_there(monkeypatch: pytest.MonkeyPatch):
    for name, major in (("cupy_cuda13x", 13), ("cupy_cuda12x", 12), ("cupy", 12)):
        fake_packages(monkeypatch, **{name: "14.2.0"})
        assert packages.required_packages() == EXTRAS[major]


# ---------------------------------------------------------------- tests that need a card


@pytest.mark.parametrize(("required", "code", "word"), [("0", 0, "skipped"), ("1", 1, "error")])
def test_gpu_tests_where_no_card_is_visible(required: str, code: int, word: str):
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "TINYVLLM_REQUIRE_GPU": required}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rsf", str(ROOT / "tests/test_gpu_cublas.py")]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == code, run.stdout + run.stderr
    assert word in run.stdout.splitlines()[-1] and "passed" not in run.stdout
    assert "no NVIDIA device is visible" in run.stdout
