"""Launches reach the driver with every parameter of its own type in its own place, read as the driver reads them."""

from __future__ import annotations

import ctypes
import re
import struct
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tinyvllm_cli.backends.gpu import launch
from tinyvllm_cli.backends.gpu.kernels import KERNELS, compile_options, kernel_sources
from tinyvllm_cli.backends.gpu.launch import Launch, parameter_formats
from tinyvllm_cli.backends.gpu.nvrtc import load_nvrtc
from tinyvllm_cli.errors import DeviceError

SOURCES = kernel_sources()
PARAMETER = re.compile(r"\.param (?:\.align 64 )?\.(\w+) (?:\.ptr [^,\n]*?)?(\w+)_param_(\d+)")
PTX_TYPES = {"u64": "P", "u32": "i", "f32": "f", "b8": "T"}  # what the compiler made of a parameter


class Attribute(ctypes.Structure):
    """CUlaunchAttribute of cuda.h, its value as the two that are used: one number, or those of clusters (4)."""

    _fields_ = (
        ("id", ctypes.c_int),
        ("pad", ctypes.c_char * 4),
        ("value", ctypes.c_int * 3),
        ("rest", ctypes.c_char * 52),
    )


class Config(ctypes.Structure):
    """CUlaunchConfig of cuda.h."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


class FakeDriver:
    """Reads a launch as cuLaunchKernelEx does: `letters` say the types of the kernel's parameters."""

    def __init__(self, letters: str, status: int = 0) -> None:
        self.launched: list[tuple[Any, ...]] = []
        types: dict[str, Any] = {
            "T": ctypes.c_char * 128,
            "P": ctypes.c_uint64,
            "i": ctypes.c_int,
            "I": ctypes.c_uint,
            "q": ctypes.c_int64,
            "f": ctypes.c_float,
        }
        pointers = ctypes.POINTER(ctypes.c_void_p)
        prototype = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(Config), ctypes.c_uint64, pointers, ctypes.c_void_p)

        def call(config: Any, function: int, parameters: Any, extra: Any) -> int:
            read = config.contents
            attributes = [read.attributes[i] for i in range(read.num_attributes)]
            values = [types[letter].from_address(parameters[i]).value for i, letter in enumerate(letters)]
            settings = (tuple(read.grid), tuple(read.block), read.shared, read.stream)
            self.launched.append(
                (
                    function,
                    settings,
                    [(a.id, *a.value) if a.id == 4 else (a.id, a.value[0]) for a in attributes],
                    values,
                    extra,
                )
            )
            return status

        self._callback = prototype(call)  # kept for the address
        # As of a library: without argument types, what it is given must be what C reads.
        self.call = ctypes.PYFUNCTYPE(ctypes.c_int)(ctypes.cast(self._callback, ctypes.c_void_p).value or 0)


def array(address: int) -> Any:
    return SimpleNamespace(data=SimpleNamespace(ptr=address))


def compiled_parameters(file: str) -> dict[str, str]:
    """Kernel -> the types of its parameters, as NVRTC has compiled them."""
    headers = {name: text for name, text in SOURCES.items() if name.endswith(".cuh")}
    ptx, _ = load_nvrtc().compile(file, SOURCES[file], headers, compile_options("compute_90", "bfloat16", 64))
    found: dict[str, str] = {}
    for kind, kernel, number in PARAMETER.findall(ptx.decode()):
        letters = found.setdefault(kernel, "")
        assert len(letters) == int(number)
        found[kernel] = letters + PTX_TYPES[kind]
    return found


@pytest.mark.parametrize("file", sorted(set(KERNELS.values())))
def test_every_parameter_arrives_as_the_compiler_wants_it(file: str):
    wanted = compiled_parameters(file)
    assert set(wanted) == {name for name, of in KERNELS.items() if of == file}
    found = parameter_formats(SOURCES[file])
    for kernel, letters in wanted.items():
        driver = FakeDriver(letters)
        values = {"P": lambda i: 2**40 + i, "T": lambda i: bytes(range(i + 1, i + 128))}
        numbers = [values.get(letter, lambda i: i - 3)(i) for i, letter in enumerate(letters)]
        args = tuple(array(n) if letter == "P" else n for n, letter in zip(numbers, letters, strict=True))
        Launch(driver.call, kernel, 2**47 + 1, found[kernel], programmatic=True)((3, 2), 128, args, 2**46 + 5, 77)
        settings = (3, 2, 1), (128, 1, 1), 77, 2**46 + 5
        assert driver.launched == [(2**47 + 1, settings, [(6, 1)], numbers, None)], kernel


def test_a_launch_after_another_keeps_nothing_of_it():
    driver = FakeDriver("PifqP")
    kernel = Launch(driver.call, "k", 1, "PifqP", programmatic=False)
    kernel((5,), 64, (array(9), np.int32(-8), np.float32(0.5), np.int64(2**40), array(7)), 11, 1 << 20)
    kernel((1, 2, 3), 32, (None, 3, 0.25, -1, None), 0, 0)
    assert driver.launched == [
        (1, ((5, 1, 1), (64, 1, 1), 1 << 20, 11), [], [9, -8, 0.5, 2**40, 7], None),
        (1, ((1, 2, 3), (32, 1, 1), 0, None), [], [0, 3, 0.25, -1, 0], None),
    ]


@pytest.mark.parametrize("programmatic", [True, False])
def test_a_launch_in_clusters_says_so_and_the_next_does_not(programmatic: bool):
    driver = FakeDriver("P")
    kernel = Launch(driver.call, "k", 1, "P", programmatic=programmatic)
    kernel((4, 8), 64, (None,), 0, 0, (2, 4))
    kernel((4, 8), 64, (None,), 0, 0)
    early = [(6, 1)] * programmatic
    assert [attributes for _, _, attributes, *_ in driver.launched] == [[(4, 2, 4, 1), *early], early]


@pytest.mark.parametrize("args", [(), (None,), (None, 1, 2), (1, 1), (None, None), (None, 2**31), (None, 0.5)])
def test_arguments_that_a_kernel_does_not_take(args: tuple[Any, ...]):
    driver = FakeDriver("Pi")
    with pytest.raises((ValueError, AttributeError, struct.error)):
        Launch(driver.call, "k", 1, "Pi", programmatic=False)((1,), 32, args, 0, 0)
    assert not driver.launched


def test_a_launch_that_the_driver_refuses(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(launch, "error_name", lambda status: f"CUDA error {status} (NAME)")
    driver = FakeDriver("", status=701)
    kernel = Launch(driver.call, "k", 1, "", programmatic=False)
    with pytest.raises(DeviceError, match=r"^the kernel k cannot be launched: CUDA error 701 \(NAME\)$"):
        kernel((1,), 2048, (), 0, 0)


def test_a_driver_without_the_call(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(launch.ctypes, "PyDLL", lambda name: SimpleNamespace())
    with pytest.raises(DeviceError, match=r"^the NVIDIA driver cannot launch kernels \(.*cuLaunchKernelEx.*\): update"):
        launch.open_launch()


def test_parameters_of_a_source():
    source = """
        extern "C" __global__ void __launch_bounds__(f(2)) one(const float* __restrict__ x, // i32 [T], rows
                                                               u64 seed, u32 n) {}
        extern "C" __global__ void two(elem *y, i64 stride, float eps) {}"""
    assert parameter_formats(source) == {"one": "PQI", "two": "Pqf"}
