"""Every kernel compiles for every architecture, without a GPU: no spills, no stack, little shared memory."""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product

import pytest

from tinyvllm_cli.backends.gpu import medium, skinny
from tinyvllm_cli.backends.gpu.attention import ahead_shared, decode_shared, prefill_shared, prefix_shared, tail_shared
from tinyvllm_cli.backends.gpu.kernels import (
    ELEM_OPTIONS,
    KERNELS,
    KV_OPTIONS,
    compile_options,
    kernel_sources,
)
from tinyvllm_cli.backends.gpu.launch import parameter_formats
from tinyvllm_cli.backends.gpu.nvrtc import CompileError, Nvrtc, load_nvrtc
from tinyvllm_cli.config import DtypeName, KVDtypeName

WHOLE = "sm_90a"  # gets all variants of a file, the others some each
ARCHS = ("sm_80", "sm_86", "sm_89", "sm_100a", "sm_120", WHOLE)
DTYPES: tuple[DtypeName, ...] = ("bfloat16", "float16")
HEAD_DIMS = (64, 80, 96, 128, 256)
SHARED_LIMIT = 99 << 10  # bytes of a block on sm_86, 89 and 120, the least of all
# Products go through cublasLt where a card has less than an sm_80; what needs still more is asked of an sm_90 alone.
SKINNY_SHARED_LIMIT, HOPPER_SHARED_LIMIT = 163 << 10, 227 << 10

SOURCES = kernel_sources()
HEADERS = {name: text for name, text in SOURCES.items() if name.endswith(".cuh")}
FILES = sorted(name for name in SOURCES if name.endswith(".cu"))
ENTRY = re.compile(r"Compiling entry function '(\w+)'")
STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
SHARED = re.compile(r"(\d+) bytes smem")


@dataclass(frozen=True)
class Usage:
    """What the assembler says of one kernel."""

    stack: int  # bytes a thread
    spills: int  # bytes stored and loaded
    shared: int  # static, bytes a block


def included(name: str) -> set[str]:
    """A source and all headers that it includes, directly or not."""
    found = {name}
    for header in re.findall(r'#include "([^"]+)"', SOURCES[name]):
        found |= included(header)
    return found


def head_dims(name: str) -> tuple[int, ...]:
    """Those that make a difference to the file: one stands for all where it does not name the macro."""
    return HEAD_DIMS if any("HEAD_DIM" in SOURCES[file] for file in included(name)) else HEAD_DIMS[:1]


def kv_dtypes(name: str) -> tuple[KVDtypeName, ...]:
    """Likewise."""
    return tuple(KV_OPTIONS) if any("KV_FP8" in SOURCES[file] for file in included(name)) else ("auto",)


def variants(name: str, arch: str) -> list[tuple[DtypeName, int, KVDtypeName]]:
    """Elements, head sizes and KV caches to compile a file for. An architecture gets every fourth, from another one on
    than its neighbours: what differs between them is a few instructions."""
    every = list(product(DTYPES, head_dims(name), kv_dtypes(name)))
    step = 1 if arch == WHOLE else min(4, len(every))
    return every[ARCHS.index(arch) % step :: step]


def dynamic_shared(kernel: str, head_dim: int, kv_dtype: KVDtypeName) -> int:
    """Bytes that a launch adds to what the assembler sees."""
    if kernel.startswith("skinny_"):
        tiling, rows = {
            "deep": (skinny.DEEP, skinny.DEEP_ROWS),
            "low": (skinny.LOW, skinny.MAX_ROWS),
            "high": (skinny.HIGH, skinny.MAX_ROWS),
        }[kernel.rpartition("_")[2]]
        return tiling.shared_bytes(rows)
    if kernel.startswith("normed_"):
        tiling = skinny.HIGH if kernel == "normed_silu" else skinny.LOW
        return skinny.normed_shared_bytes(tiling, skinny.MAX_NORMED_ROWS, skinny.MAX_NORMED_COLUMNS)
    if kernel.startswith("medium_"):  # a launch takes no more, whatever the shape
        return medium.RING_BYTES
    sizes = {
        "attend_prefill": prefill_shared,
        "attend_prefix": prefix_shared,
        "attend_tail": tail_shared,
        "attend_decode": decode_shared,
        "attend_ahead": ahead_shared,  # not launched where it is more than the card has
    }
    return min(sizes[kernel](head_dim, kv_dtype), HOPPER_SHARED_LIMIT) if kernel in sizes else 0


def usages(log: str) -> dict[str, Usage]:
    """Kernel -> what it uses, from the log of --ptxas-options=-v."""
    found = {}
    for part in re.split(r"(?=Compiling entry function)", log)[1:]:
        entry, stack, shared = ENTRY.search(part), STACK.search(part), SHARED.search(part)
        assert entry and stack, log
        frame, stores, loads = map(int, stack.groups())
        found[entry[1]] = Usage(frame, stores + loads, int(shared[1]) if shared else 0)
    return found


def compile_variant(
    nvrtc: Nvrtc, name: str, arch: str, dtype: DtypeName, head_dim: int, kv_dtype: KVDtypeName
) -> dict[str, Usage]:
    options = [*compile_options(arch, dtype, head_dim, kv_dtype), "--ptxas-options=-v"]
    binary, log = nvrtc.compile(name, SOURCES[name], HEADERS, options)
    assert binary.startswith(b"\x7fELF"), f"{name}: no machine code"
    return usages(log)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", FILES)
def test_every_kernel_compiles_without_spills(name: str, arch: str):
    nvrtc = load_nvrtc()
    chosen = variants(name, arch)
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        found = [pool.submit(compile_variant, nvrtc, name, arch, *variant) for variant in chosen]
    wrong = []
    for (dtype, head_dim, kv_dtype), future in zip(chosen, found, strict=True):
        try:
            kernels = future.result()
        except CompileError as error:
            pytest.fail(f"{error}\n{error.log}", pytrace=False)
        assert set(kernels) == set(parameter_formats(SOURCES[name]))
        for kernel, usage in kernels.items():
            dynamic = dynamic_shared(kernel, head_dim, kv_dtype)
            limit = SKINNY_SHARED_LIMIT if kernel.startswith(("skinny_", "normed_")) else SHARED_LIMIT
            is_for_hopper = kernel.endswith("_deep") or kernel.startswith("medium_") or kernel == "attend_ahead"
            limit = HOPPER_SHARED_LIMIT if is_for_hopper else limit
            if usage.spills or usage.stack or usage.shared + dynamic > limit:
                wrong.append(
                    f"{kernel}, {dtype}, head_dim {head_dim}, KV {kv_dtype}: {usage}, dynamic shared memory {dynamic}"
                )
    assert not wrong, "\n".join(wrong)


def test_the_table_of_kernels_is_what_the_files_define():
    assert {kernel: name for name in FILES for kernel in parameter_formats(SOURCES[name])} == KERNELS
    # None is missing because it is written in a way that parameter_formats does not know.
    assert sum(text.count('extern "C"') for text in SOURCES.values()) == len(KERNELS)


def test_sources_include_nothing_of_cuda():
    """Only our own headers: the wheel of the runtime, where CUDA's lie, is not needed to compile."""
    assert not {file for text in SOURCES.values() for file in re.findall(r"#include\s+(<[^>]*>)", text)}
    assert all(included(name) <= set(SOURCES) for name in FILES)


def test_both_kinds_of_elements_are_compiled():
    assert set(DTYPES) == set(ELEM_OPTIONS)
