"""Run the kernels of cuda/ on the processor: their sources, compiled as C++ over tests/emulator/cuda.hpp.

What that shows: wrong indices, layouts, formulas, borders, orders of sums, what a kernel reads though nobody wrote it,
or though its asynchronous copy was not waited for: it is done no earlier. What it cannot show: the threads of a block
take turns, blocks but those of a cluster run one after another and the device functions in PTX are replaced; so no
races, no wait for a kernel before that comes too late, nothing of a compiler or a card.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from tinyvllm_cli.backends.gpu.kernels import ELEM_OPTIONS, KERNELS, KV_OPTIONS
from tinyvllm_cli.backends.gpu.launch import DEFINITION
from tinyvllm_cli.config import DtypeName, KVDtypeName

CUDA = Path(__file__).parent.parent / "cuda"
SHIMS = Path(__file__).parent / "emulator"
FUNCTION = re.compile(r"^(?:template <[^>]*>\n)?__device__[^;{]*\{", re.MULTILINE)
SCALARS = {"int": ctypes.c_int, "float": ctypes.c_float, "u32": ctypes.c_uint, "u64": ctypes.c_uint64}
# Rounded as written: CUDA contracts a * b + c where it likes, and the kernels say where it must not matter. Fibers jump
# between stacks, which the fortified longjmp takes for an attack.
OPTIONS = ["-std=c++17", "-O2", "-shared", "-fPIC", "-march=native", "-ffp-contract=off", "-U_FORTIFY_SOURCE", "-w"]
RUNNING = Lock()  # the fibers of one grid at a time


def compiler() -> str | None:
    """The C++ compiler, where the emulation can run: its fibers are those of Linux."""
    return (shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")) if sys.platform == "linux" else None


class Emulator:
    """The kernels of one .cu file for one kind of element, one head size and one kind of KV cache."""

    def __init__(self, file: str | Path, dtype: DtypeName, head_dim: int, kv_dtype: KVDtypeName = "auto") -> None:
        """file: a name in cuda/, or a path of another file that may include its headers."""
        included: set[str] = set()
        source = _source(str(file), included)
        self._types = {
            name: [_type(p) for p in parameters.split(",")] for name, parameters in DEFINITION.findall(source)
        }
        assert self._types, f"{file} has no kernels"
        entries = "\n".join(_entry(name, types) for name, types in self._types.items())
        shim = SHIMS / ("hopper.hpp" if "wgmma.cuh" in included else "cuda.hpp")
        code = f'#include "{shim}"\n{source}\n{entries}\n'
        macros = [ELEM_OPTIONS[dtype], f"-DHEAD_DIM={head_dim}", *KV_OPTIONS[kv_dtype]]
        self._library = ctypes.CDLL(str(_compile(code, macros)))

    def prepare(
        self,
        name: str,
        grid: tuple[int, ...],
        block: int,
        args: tuple[Any, ...],
        shared: int = 0,
        cluster: tuple[int, int] = (1, 1),
    ) -> Callable[[], None]:
        """A launch that is to come. Numbers and addresses are taken now, what lies there is read and written then."""
        types, function = self._types[name], self._library[f"emulate_{name}"]
        assert len(args) == len(types), f"{name} takes {len(types)} arguments, not {len(args)}"
        values = [_argument(value, kind) for value, kind in zip(args, types, strict=True)]
        sizes = (ctypes.c_int * 5)(*grid, *[1] * (3 - len(grid)), *cluster)
        assert all(blocks % size == 0 for blocks, size in zip(grid, cluster, strict=False)), (grid, cluster)

        def run() -> None:
            if 0 not in grid:
                with RUNNING:
                    function(sizes, block, shared, (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values)))

        return run

    def launch(self, name: str, grid: tuple[int, ...], block: int, args: tuple[Any, ...], shared: int = 0) -> None:
        self.prepare(name, grid, block, args, shared)()


@functools.cache
def emulator(file: str, dtype: DtypeName, head_dim: int, kv_dtype: KVDtypeName) -> Emulator:
    return Emulator(file, dtype, head_dim, kv_dtype)


class EmulatedKernels:
    """The Kernels of backends/gpu/kernels.py, over arrays in the processor's memory; a launch is done on return."""

    shared_limit = 227 << 10  # of Hopper

    def __init__(self, dtype: DtypeName, head_dim: int, kv_dtype: KVDtypeName = "auto") -> None:
        self._of_file = functools.partial(emulator, dtype=dtype, head_dim=head_dim, kv_dtype=kv_dtype)
        self.files = dict.fromkeys(KERNELS.values(), "compiled")
        self.counts: Counter[str] = Counter()

    def prepare(
        self,
        name: str,
        grid: tuple[int, ...],
        block: int,
        args: tuple[Any, ...],
        shared: int,
        cluster: tuple[int, int] = (1, 1),
    ) -> Callable[[], None]:
        self.counts[name] += 0 not in grid
        return self._of_file(KERNELS[name]).prepare(name, grid, block, args, shared, cluster)

    def launch(
        self,
        name: str,
        grid: tuple[int, ...],
        block: int,
        args: tuple[Any, ...],
        *,
        stream: Any,
        shared: int = 0,
        cluster: tuple[int, int] = (1, 1),
    ) -> None:
        self.prepare(name, grid, block, args, shared, cluster)()


# ---------------------------------------------------------------- a .cu file as C++


def _source(file: str, included: set[str]) -> str:
    """A file with its headers in place, each once, without the functions that hold PTX: the shim has them."""
    text = (CUDA / file).read_text().replace("#pragma once\n", "")
    text = re.sub(r"extern __shared__[^;]*?(\w+) (\w+)\[\];", r"\1* \2 = (\1*)dynamic_shared;", text)

    def include(match: re.Match[str]) -> str:
        if match[1] in included:
            return ""
        included.add(match[1])
        return _source(match[1], included)

    text = re.sub(r"^DEFINE_MULTIPLY_ADD\(.*\n", "", text, flags=re.MULTILINE)  # of PTX too
    return re.sub(r'#include "(\w+\.cuh)"', include, _without_ptx(text))


def _without_ptx(text: str) -> str:
    kept, at = [], 0
    for match in FUNCTION.finditer(text):
        depth, end = 1, match.end()
        while depth:
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        if re.search(r"\basm\b|__cvta", text[match.start() : end]):
            kept.append(text[at : match.start()])
            at = end
    return "".join(kept) + text[at:]


def _type(parameter: str) -> str:
    words = parameter.replace("__restrict__", " ").replace("*", " * ").split()
    return "pointer" if "*" in words else next(word for word in words if word not in ("const", "__grid_constant__"))


def _entry(name: str, types: list[str]) -> str:
    """A C function that runs a kernel's grid; args are the addresses of its arguments, as cuLaunchKernel takes them."""
    casts = ", ".join(f"*({'AnyPointer' if kind == 'pointer' else kind}*)args[{i}]" for i, kind in enumerate(types))
    return (
        f'extern "C" void emulate_{name}(const int* grid, int block, int shared, void** args) '
        f"{{ run_grid(grid, block, shared, [](void** args) {{ {name}({casts}); }}, args); }}"
    )


def _argument(value: Any, kind: str) -> Any:
    if kind == "pointer":
        return ctypes.c_void_p(0 if value is None else value.ctypes.data)
    if kind == "TensorMap":
        return (ctypes.c_ubyte * len(value))(*value)
    number = SCALARS[kind](value.item() if isinstance(value, np.generic) else value)
    assert kind == "float" or number.value == value, f"{value} for {kind}"
    return number


def _compile(code: str, macros: list[str]) -> Path:
    """The shared library of this code, compiled once for all runs of the tests of a user."""
    command = compiler()
    assert command is not None, "no C++ compiler"
    digest = hashlib.sha256(
        "\0".join([code, *(path.read_text() for path in sorted(SHIMS.iterdir())), command, *OPTIONS, *macros]).encode()
    ).hexdigest()
    folder = Path(tempfile.gettempdir()) / f"tinyvllm-emulator-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    library = folder / f"{digest[:24]}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:  # several processes may be at it
            source, part = Path(scratch) / "kernels.cpp", Path(scratch) / "kernels.so"
            source.write_text(code)
            subprocess.run([command, *OPTIONS, *macros, "-o", str(part), str(source)], check=True)
            part.replace(library)
    return library
