"""Whether this machine and this environment can run the CUDA backend, and the one command that mends it if not."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Sequence

from tinyvllm_cli.backends.gpu.driver import Driver
from tinyvllm_cli.errors import DeviceError

# What the extras cuda12 and cuda13 of pyproject.toml install (a test holds them equal).
EXTRAS = {
    12: (
        "cupy-cuda12x>=14.2",
        "nvidia-cublas-cu12>=12.9",
        "nvidia-cuda-nvrtc-cu12>=12.9",
        "nvidia-cuda-runtime-cu12>=12.9",
    ),
    13: (
        "cupy-cuda13x>=14.2",
        "nvidia-cublas>=13.0",
        "nvidia-cuda-nvrtc>=13.0",
        "nvidia-cuda-runtime>=13.0",
    ),
}
CUPY_NAMES = ("cupy", "cupy-cuda11x", "cupy-cuda12x", "cupy-cuda13x")  # `cupy`: built from source, or conda's
CUPY_NEEDED = (14, 2)
CUDA_NEEDED = (12, 0)
CAPABILITY_NEEDED = (8, 0)  # bf16 mma.sync and cp.async came with Ampere


def require_packages(driver: Driver) -> None:
    """Raise a DeviceError, with the command that mends it, unless CuPy can be used with this driver."""
    name, mend = check_packages(driver)
    try:
        # CuPy's bindings of CUDA, without the rest of it, whose import takes longer than all else of a start.
        importlib.import_module("cupy_backends.cuda.api.runtime")
    except Exception as error:  # whatever is broken in there, a traceback of CuPy's helps nobody
        cause = error.__cause__ or error  # CuPy puts a banner and a long text around it
        reason = next(iter(str(cause).strip().splitlines()), type(cause).__name__)
        raise DeviceError(f"{name} cannot be imported ({reason}): {mend}") from None


def check_packages(driver: Driver) -> tuple[str, str]:
    """The same without importing CuPy, which takes a while: CuPy with its version, and what mends it."""
    if driver.problem is not None:
        raise DeviceError(f"the NVIDIA driver cannot be used: {driver.problem}")
    if driver.cuda_version < CUDA_NEEDED:
        raise DeviceError(
            f"the NVIDIA driver is too old: it runs CUDA {_dotted(driver.cuda_version)}, "
            f"wanted {_dotted(CUDA_NEEDED)} or later: install driver 525 or later"
        )
    installed, newer = installed_cupy(), _newer_than(driver)
    unwanted = list(installed | newer)
    commands = [_uninstall_command(unwanted)] if unwanted else []
    commands.append(install_command(EXTRAS[13 if driver.cuda_version >= (13, 0) else 12]))
    mend = f"run `{' && '.join(commands)}`"
    if not installed:
        raise DeviceError(f"CuPy is not installed: {mend}")
    if len(installed) > 1:
        raise DeviceError(f"{' and '.join(installed)} are installed, CuPy may stand only once: {mend}")
    if newer:
        raise DeviceError(
            f"{' and '.join(newer)} need{'s' * (len(newer) == 1)} a driver for CUDA 13 and this one runs CUDA "
            f"{_dotted(driver.cuda_version)}: {mend}"
        )
    ((name, version),) = installed.items()
    if _numbers(version) < CUPY_NEEDED:
        raise DeviceError(f"{name} {version} is too old, wanted {_dotted(CUPY_NEEDED)} or later: {mend}")
    return f"{name} {version}", mend


def require_capability(major: int, minor: int, name: str) -> None:
    """Raise a DeviceError unless the card's compute capability is at least 8.0; `name` is the card's."""
    if (major, minor) < CAPABILITY_NEEDED:
        raise DeviceError(
            f"{name} has compute capability {major}.{minor}, "
            f"wanted {_dotted(CAPABILITY_NEEDED)} or later (Ampere): use another card, or --backend cpu"
        )


def installed_cupy() -> dict[str, str]:
    """The installed distributions that provide CuPy, with their versions."""
    return _installed(CUPY_NAMES)


def _newer_than(driver: Driver) -> dict[str, str]:
    """What is installed for a newer CUDA than the driver runs: of two versions of a library the newer one is loaded."""
    if driver.cuda_version >= (13, 0):
        return {}
    return _installed(re.split("[^a-z0-9-]", requirement)[0] for requirement in EXTRAS[13])


def _installed(names: Iterable[str]) -> dict[str, str]:
    """Those that are installed, with their versions: 0 where an installation that broke off left no version."""
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name) or "0"
        except KeyError:
            found[name] = "0"
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def required_packages() -> tuple[str, ...]:
    """The requirements that go with the installed CuPy; those for CUDA 12, which every driver runs, without one."""
    return EXTRAS[13 if "cupy-cuda13x" in installed_cupy() else 12]


def install_command(requirements: Sequence[str]) -> str:
    """A shell command that installs `requirements` into this environment."""
    return shlex.join([*_installer("install"), *requirements])


def _uninstall_command(names: Sequence[str]) -> str:
    command = _installer("uninstall")
    return shlex.join([*command, *(["-y"] if "-m" in command else []), *names])


def _installer(action: str) -> list[str]:
    if importlib.util.find_spec("pip") is None and shutil.which("uv"):  # environments made by uv have no pip
        return ["uv", "pip", action, "--python", sys.executable]
    return [sys.executable, "-m", "pip", action]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
