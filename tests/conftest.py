"""Fixtures of many tests, and which tests run where: some marked ones need what not all machines have.

TINYVLLM_NO_MODEL_TESTS=1 deselects `model`; TINYVLLM_TEST_CUDA12=1 selects `cuda12`, TINYVLLM_TEST_EXTRAS=1 `extras`;
TINYVLLM_REQUIRE_GPU=1 makes a `gpu` test fail where it would be skipped, TINYVLLM_REQUIRE_COMPILER=1 one that is
`emulated`.
"""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from tiny import make_tiny_model

from tinyvllm_cli.config import DEFAULT_MODEL

# Started in the background of a script, or by nohup, this process ignores them, and so would all that it starts.
for signum in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
    if signal.getsignal(signum) is signal.SIG_IGN:
        signal.signal(signum, signal.default_int_handler)

if TYPE_CHECKING:
    from emulated_cuda import Runtime

    from tinyvllm_cli.load import LoadedModel

settings.register_profile("patient", deadline=None)  # how long an example takes says more of the machine than of us
settings.load_profile("patient")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect, never skip: a run without these tests says so in its summary, and a missing model is a failure."""
    unwanted = ["model"] if os.environ.get("TINYVLLM_NO_MODEL_TESTS") == "1" else []
    unwanted += [name for name in ("cuda12", "extras") if os.environ.get(f"TINYVLLM_TEST_{name.upper()}") != "1"]
    kept: list[pytest.Item] = []
    deselected: list[pytest.Item] = []
    for item in items:
        (deselected if any(item.get_closest_marker(name) for name in unwanted) else kept).append(item)
    if deselected:
        config.hook.pytest_deselected(items=deselected)
        items[:] = kept


@pytest.hookimpl(tryfirst=True)  # before any fixture asks for the card
def pytest_runtest_setup(item: pytest.Item) -> None:
    """A `gpu` test is skipped only where no NVIDIA device is visible; where one is and cannot be used, it fails. An
    `emulated` one is skipped only where no C++ compiler is.
    """
    if item.get_closest_marker("gpu") is not None:
        visible, problem = gpu_problem()
        _skip(problem, fail=visible or os.environ.get("TINYVLLM_REQUIRE_GPU") == "1")
    if item.get_closest_marker("emulated") is not None:
        from cuda_emulator import compiler

        problem = None if compiler() else "emulating CUDA needs Linux and a C++ compiler"
        _skip(problem, fail=os.environ.get("TINYVLLM_REQUIRE_COMPILER") == "1")


def _skip(problem: str | None, *, fail: bool) -> None:
    """Skip the test where there is a problem, or fail it."""
    if problem is None:
        return
    if fail:
        pytest.fail(problem, pytrace=False)
    pytest.skip(problem)


@cache
def gpu_problem() -> tuple[bool, str | None]:
    """Whether an NVIDIA device is visible, and why GPU tests cannot run; None where they can."""
    from tinyvllm_cli.backends.gpu.driver import find_driver
    from tinyvllm_cli.backends.gpu.packages import require_packages
    from tinyvllm_cli.errors import DeviceError

    driver = find_driver()
    if driver is None:
        return False, "no NVIDIA device is visible"
    try:
        require_packages(driver)
    except DeviceError as error:
        return True, str(error)
    return True, None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The table of the greatest errors that GPU tests have seen, beside the tolerances."""
    tools = sys.modules.get("gpu_tools")
    lines = tools.error_table() if tools else []
    if lines:
        terminalreporter.section("errors on the GPU")
        for line in lines:
            terminalreporter.write_line(line)


@pytest.fixture(autouse=True)
def _records(request: pytest.FixtureRequest) -> Iterator[None]:
    """The table of errors is that of the card."""
    tools = sys.modules.get("gpu_tools")
    count = len(tools.RECORDS) if tools else 0
    yield
    if tools and request.node.get_closest_marker("emulated"):
        del tools.RECORDS[count:]


@pytest.fixture
def cuda() -> "Iterator[Runtime]":
    """A GPU in the place of CuPy, driver and packages; for tests that are marked `emulated`."""
    from emulated_gpu import emulated_gpu

    with emulated_gpu() as runtime:
        yield runtime


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The file of the default model, fetched once into the user's cache."""
    from tinyvllm_cli.model.hub import find_model

    return find_model(DEFAULT_MODEL).path


@pytest.fixture(scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache folder of the module's own, no model in the environment, and the CPU on every machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINYVLLM_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.delenv("TINYVLLM_MODEL", raising=False)
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        yield


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with random weights; nobody changes it."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def loaded(model: Path) -> "Iterator[LoadedModel]":
    """The chat model of a module, loaded for one answer at a time. model: the module's own fixture."""
    from chats import load

    found = load(model)
    yield found
    found.close()


@pytest.fixture
def no_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """A benchmark starts no processes of its own."""
    from tinyvllm_cli.bench import bench
    from tinyvllm_cli.bench.start import StartTimes

    monkeypatch.setattr(bench, "time_start", lambda *arguments: StartTimes(2.5, 1.25))


@pytest.fixture
def said(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Exit code, standard output and standard error of a command."""
    from command import run_here

    def call(*args: str | Path) -> tuple[int, str, str]:
        capfd.readouterr()
        code = run_here(*args)
        return code, *capfd.readouterr()

    return call
