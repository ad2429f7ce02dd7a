"""CUDA that starts on a thread: once, unless the CPU is asked for, and in silence where there is none."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator

import pytest

from tinyvllm_cli.backends.gpu.wake import wake_gpu


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    wake_gpu.cache_clear()
    yield
    wake_gpu.cache_clear()


class Library:
    def __init__(self, failing: str = "") -> None:
        self.calls: list[tuple[str, bool]] = []
        self.failing = failing

    def __getattr__(self, name: str) -> object:
        def call(*arguments: object) -> int:
            self.calls.append((name, threading.current_thread() is threading.main_thread()))
            return int(name == self.failing)

        return call


def woken(monkeypatch: pytest.MonkeyPatch, library: Library, *backends: str) -> list[str]:
    """The calls of the driver, none of them on this thread."""
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    for backend in backends:
        wake_gpu(backend)
    for thread in threading.enumerate():
        if thread.name == "cuda":
            thread.join(10)
    assert not any(on_main for _, on_main in library.calls)
    return [name for name, _ in library.calls]


ALL = ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"]


@pytest.mark.parametrize(("backends", "calls"), [(("cpu",), []), (("auto", "auto"), ALL), (("gpu",), ALL)])
def test_the_context_is_made_once(monkeypatch: pytest.MonkeyPatch, backends: tuple[str, ...], calls: list[str]):
    assert woken(monkeypatch, Library(), *backends) == calls


@pytest.mark.parametrize("place", [0, 1])
def test_it_ends_where_the_driver_refuses(monkeypatch: pytest.MonkeyPatch, place: int):
    assert woken(monkeypatch, Library(failing=ALL[place]), "gpu") == ALL[: place + 1]


def test_a_machine_without_a_driver_says_nothing(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    wake_gpu("auto")
    for thread in threading.enumerate():
        if thread.name == "cuda":
            thread.join(10)
    assert capfd.readouterr() == ("", "")
