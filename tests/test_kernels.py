"""Kernels on their way to a card, without one: found, compiled, kept on disk whole, launched with what they take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tinyvllm_cli.backends.gpu import kernels, libraries
from tinyvllm_cli.backends.gpu.driver import MAX_DYNAMIC_SHARED_SIZE_BYTES, SHARED_SIZE_BYTES, Driver
from tinyvllm_cli.backends.gpu.kernels import (
    KERNELS,
    Kernels,
    build,
    compile_options,
    kernel_sources,
    load_kernels,
    read_binary,
    target_arch,
    write_binary,
)
from tinyvllm_cli.backends.gpu.nvrtc import CompileError, load_nvrtc
from tinyvllm_cli.errors import DeviceError

SOURCES = {name: f"text of {name}" for name in (*KERNELS.values(), "common.cuh")}
OPTIONS = compile_options("sm_90a", "bfloat16", 64)
FILES = sorted(set(KERNELS.values()))


class FakeNvrtc:
    """Gives every source a binary of its own and keeps the names of what it compiled."""

    def __init__(self, version: tuple[int, int] = (13, 0)) -> None:
        self.version = version
        self.compiled: list[str] = []

    def compile(self, name: str, source: str, headers: Mapping[str, str], options: Sequence[str]) -> tuple[bytes, str]:
        assert list(headers) == ["common.cuh"]
        self.compiled.append(name)
        return f"{source} {options}".encode(), ""


def run(cache: Path | None, *, sources: dict[str, str] = SOURCES, options: list[str] = OPTIONS, version: int = 13):
    """What a start makes: (files compiled, binaries)."""
    nvrtc: Any = FakeNvrtc((version, 0))
    binaries, files = build(nvrtc, sources, options, cache)
    assert sorted(binaries) == FILES
    assert sorted(name for name, source in files.items() if source == "compiled") == sorted(nvrtc.compiled)
    return sorted(nvrtc.compiled), binaries


# ---------------------------------------------------------------- the cache


def test_the_second_start_compiles_nothing(tmp_path: Path):
    compiled, first = run(tmp_path)
    assert compiled == FILES
    assert run(tmp_path) == ([], first)


@pytest.mark.parametrize(
    "change",
    [
        {"sources": SOURCES | {"common.cuh": "another text"}},
        {"sources": SOURCES | {"norm.cu": "another text"}},
        {"options": compile_options("sm_80", "bfloat16", 64)},
        {"options": compile_options("sm_90a", "float16", 64)},
        {"options": compile_options("sm_90a", "bfloat16", 80)},
        {"version": 12},
    ],
    ids=str,
)
def test_whatever_decides_the_code_compiles_it_again(tmp_path: Path, change: dict[str, Any]):
    run(tmp_path)
    assert run(tmp_path, **change)[0] == FILES
    assert run(tmp_path)[0] == []  # and the old ones stay


@pytest.mark.parametrize("damage", [lambda c: c[:-1], lambda c: b"", lambda c: c[:40], lambda c: c[:-1] + b"?"])
def test_a_damaged_file_is_made_anew(tmp_path: Path, damage: Any):
    _, whole = run(tmp_path)
    (path,) = (tmp_path / "kernels").glob("norm-*")
    path.write_bytes(damage(path.read_bytes()))
    assert run(tmp_path) == (["norm.cu"], whole)
    assert run(tmp_path) == ([], whole)


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path):
    (tmp_path / "file").touch()
    for _ in range(2):
        assert run(tmp_path / "file")[0] == FILES
    assert run(None)[0] == FILES


def test_a_write_that_fails_half_way_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    write_binary(tmp_path / "kernels" / "a.bin", b"code")
    assert list((tmp_path / "kernels").iterdir()) == []


def test_many_writers_leave_one_whole_file(tmp_path: Path):
    path, binary = tmp_path / "kernels" / "a.bin", bytes(range(256)) * 1000
    with ThreadPoolExecutor(8) as pool:
        seen = list(pool.map(lambda _: (write_binary(path, binary), read_binary(path))[1], range(64)))
    assert set(seen) == {binary}
    assert list(path.parent.iterdir()) == [path]


# ---------------------------------------------------------------- what is compiled, and for what


@pytest.mark.parametrize(
    ("capability", "arch"),
    [
        ((8, 0), "sm_80"),
        ((8, 9), "sm_89"),
        ((9, 0), "sm_90a"),
        ((10, 0), "sm_100a"),
        ((12, 0), "sm_120"),
        ((12, 1), "compute_120"),  # younger than the compiler: PTX, which the driver translates
        ((10, 3), "compute_100"),
        ((13, 0), "compute_120"),
    ],
)
def test_the_architecture_of_a_card(capability: tuple[int, int], arch: str):
    assert target_arch(capability, [75, 80, 86, 89, 90, 100, 120]) == arch


def test_a_card_older_than_the_compiler():
    with pytest.raises(DeviceError, match=r"NVRTC cannot compile for compute capability 8\.0"):
        target_arch((8, 0), [90, 100])


def test_sources_are_those_of_the_package_or_of_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    package = tmp_path / "tinyvllm_cli"
    monkeypatch.setattr(kernels, "PACKAGE", package)
    (tmp_path / "cuda").mkdir()  # in site-packages this is the namespace of NVIDIA's Python packages
    with pytest.raises(DeviceError, match="the CUDA sources are missing"):
        kernel_sources()
    for text, folder in (("checkout", tmp_path / "cuda"), ("package", package / "cuda")):
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("common.cuh", "a.cu", "README.md"):
            (folder / name).write_text(text)
        assert kernel_sources() == {"a.cu": text, "common.cuh": text}


def test_every_kernel_of_the_table_has_a_file():
    assert set(KERNELS.values()) <= set(kernel_sources())


def test_nvrtc_gives_machine_code_or_ptx():
    nvrtc = load_nvrtc()
    source = '#include "h.cuh"\nextern "C" __global__ void f(float* x) { x[0] = VALUE; }'
    headers = {"h.cuh": "#define VALUE 3.0f"}
    assert nvrtc.compile("f.cu", source, headers, ["-arch=sm_90a"])[0].startswith(b"\x7fELF")
    assert b".target sm_90" in nvrtc.compile("f.cu", source, headers, ["-arch=compute_90"])[0]
    assert {80, 86, 89, 90, 100, 120} <= set(nvrtc.supported_archs())


def test_a_source_that_does_not_compile():
    with pytest.raises(
        CompileError, match=r"^f\.cu does not compile with -arch=sm_80: f\.cu\(1\): error: .*$"
    ) as caught:
        load_nvrtc().compile("f.cu", "__device__ int f() { return g(); }", {}, ["-arch=sm_80"])
    assert "1 error detected in" in caught.value.log


def test_a_library_that_is_not_installed():
    with pytest.raises(DeviceError, match=r"^NVIDIA's library no_such_library is not installed: run `.*pip install "):
        libraries.open_library("no_such_library", {})


# ---------------------------------------------------------------- launches


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Everything that the driver is asked for, in order; kernels have 1,000 bytes of static shared memory."""
    calls: list[tuple[Any, ...]] = []

    class Code:
        def load(self, binary: bytes) -> int:
            if binary == b"bad":
                raise RuntimeError("CUDA_ERROR_NO_BINARY_FOR_GPU")
            return 1

        def function(self, module: int, name: str) -> str:
            return name

        def attribute(self, function: str, attribute: int) -> int:
            return {SHARED_SIZE_BYTES: 1000}[attribute]

        def set_attribute(self, *arguments: Any) -> None:
            calls.append(arguments)

    monkeypatch.setattr(kernels, "Code", Code)
    monkeypatch.setattr(kernels, "open_launch", lambda: "call")
    monkeypatch.setattr(kernels, "Launch", lambda *made, **options: lambda *given: calls.append((made, options, given)))
    return calls


STREAM = SimpleNamespace(ptr=11)


def loaded(binary: bytes = b"good", *, programmatic: bool = True) -> Kernels:
    return Kernels(
        dict.fromkeys(FILES, binary),
        kernel_sources(),
        {},
        arch="sm_90a",
        programmatic=programmatic,
        shared_limit=227 << 10,
    )


@pytest.mark.parametrize("programmatic", [True, False])
def test_a_launch_hands_over_what_it_is_given(launches: list[tuple[Any, ...]], programmatic: bool):
    some, args = loaded(programmatic=programmatic), (object(), None, 3)
    some.launch("add_bias", (2, 5), 128, args, stream=STREAM, shared=64)
    made = ("call", "add_bias", "add_bias", "PPii")
    assert launches == [(made, {"programmatic": programmatic}, ((2, 5), 128, args, 11, 64, (1, 1)))]


@pytest.mark.usefixtures("launches")
def test_launches_are_counted_by_name():
    some = loaded()
    for name, grid in (("embed", (2,)), ("rms_norm", (1, 3)), ("embed", (1,)), ("embed", (0,))):
        some.launch(name, grid, 128, (), stream=STREAM)
    assert some.counts == {"embed": 2, "rms_norm": 1}


def test_more_shared_memory_than_the_card_has_is_an_error_of_that_kernel(
    launches: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
):
    """Not of CUDA, after which nothing could be trusted: tuning leaves such a candidate out."""
    some = loaded()

    def refuse(*arguments: Any) -> None:
        raise RuntimeError("CUDA_ERROR_INVALID_VALUE")

    monkeypatch.setattr(kernels.Code, "set_attribute", refuse)
    with pytest.raises(DeviceError, match="embed: 101000 bytes of shared memory"):
        some.launch("embed", (1,), 128, (), stream=STREAM, shared=100_000)
    assert not launches and not some.counts


@pytest.mark.parametrize(
    ("capability", "programmatic"), [((8, 0), False), ((8, 9), False), ((9, 0), True), ((10, 3), True)]
)
@pytest.mark.usefixtures("launches")
def test_kernels_start_early_where_they_were_compiled_to_wait(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], programmatic: bool
):
    """A compiler older than the card makes code for an older one, which knows nothing of waiting; the graphs of an
    older driver know nothing of such launches.
    """
    known = [80, 86, 89, 90, 100]
    monkeypatch.setattr(kernels, "find_driver", lambda: Driver((12, 3), 1))
    monkeypatch.setattr(kernels, "load_nvrtc", lambda: SimpleNamespace(supported_archs=lambda: known))
    monkeypatch.setattr(kernels, "build", lambda *given: (dict.fromkeys(FILES, b"good"), {}))
    monkeypatch.setattr(kernels, "Kernels", lambda *made, **options: options["programmatic"])
    assert load_kernels(capability, "bfloat16", 64, "auto", None, shared_limit=99 << 10) is programmatic
    monkeypatch.setattr(kernels, "find_driver", lambda: Driver((12, 2), 1))
    assert load_kernels(capability, "bfloat16", 64, "auto", None, shared_limit=99 << 10) is False
    monkeypatch.setattr(kernels, "find_driver", lambda: Driver((12, 3), 1))
    known[:] = [80, 86, 89]
    assert load_kernels(capability, "bfloat16", 64, "auto", None, shared_limit=99 << 10) is False


@pytest.mark.parametrize("grid", [(0,), (3, 0), (0, 2, 2)])
def test_an_empty_grid_launches_nothing(launches: list[tuple[Any, ...]], grid: tuple[int, ...]):
    loaded().launch("embed", grid, 128, (), stream=STREAM)
    assert launches == []


def test_shared_memory_is_asked_for_once_where_it_exceeds_48_kb(launches: list[tuple[Any, ...]]):
    some = loaded()
    fits, too_much = (48 << 10) - 1000, (48 << 10) - 999
    for shared in (fits, too_much, too_much, 90_000, fits, 90_000):
        some.launch("attend_decode", (1,), 32, (), stream=STREAM, shared=shared)
    some.launch("attend_prefill", (1,), 32, (), stream=STREAM, shared=too_much)
    asked = [(call[0], call[2]) for call in launches if call[1] == MAX_DYNAMIC_SHARED_SIZE_BYTES]
    assert asked == [("attend_decode", too_much), ("attend_decode", 90_000), ("attend_prefill", too_much)]


@pytest.mark.usefixtures("launches")
def test_code_that_the_driver_refuses():
    with pytest.raises(DeviceError, match=r"^the driver does not load the kernels \(CUDA_ERROR_NO_BINARY_FOR_GPU\)"):
        loaded(b"bad")
