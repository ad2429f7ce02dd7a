"""Our CUDA kernels: found, compiled for one card and kept on disk, then launched by name."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, Literal

from tinyvllm_cli.backends.gpu.driver import (
    MAX_DYNAMIC_SHARED_SIZE_BYTES,
    SHARED_SIZE_BYTES,
    Code,
    find_driver,
)
from tinyvllm_cli.backends.gpu.launch import Launch, open_launch, parameter_formats
from tinyvllm_cli.backends.gpu.nvrtc import Nvrtc, load_nvrtc
from tinyvllm_cli.config import DtypeName, KVDtypeName
from tinyvllm_cli.errors import DeviceError

# Every kernel and the file of cuda/ that it stands in.
KERNELS = {
    "place_blocks": "block_tables.cu",
    "embed": "embed.cu",
    "rms_norm": "norm.cu",
    "rms_norm_codes": "norm.cu",
    "rope_write": "rope_write.cu",
    "silu_mul": "silu_mul.cu",
    "silu_mul_codes": "silu_mul.cu",
    "quantize_rows": "quantize.cu",
    "add_bias": "silu_mul.cu",
    "attend_prefill": "prefill.cu",
    "attend_prefix": "prefix.cu",
    "attend_tail": "tail.cu",
    "attend_decode": "decode.cu",
    "attend_ahead": "ahead.cu",
    "scan_rows": "sample.cu",
    "sample_rows": "sample.cu",
    "skinny_elem_low": "skinny.cu",
    "skinny_elem_high": "skinny.cu",
    "skinny_f32_low": "skinny.cu",
    "skinny_f32_high": "skinny.cu",
    "skinny_add_deep": "skinny.cu",
    "skinny_add_low": "skinny.cu",
    "normed_product": "normed.cu",
    "normed_silu": "normed.cu",
    "normed_qkv": "normed_qkv.cu",
    "medium_elem_1": "medium.cu",
    "medium_elem_2": "medium_wide.cu",
    "medium_add": "medium_add.cu",
    "medium_codes_1": "medium_codes.cu",
    "medium_codes_2": "medium_codes_wide.cu",
    "medium_codes_add": "medium_codes_add.cu",
    "fill_random": "random.cu",
    "sum_words": "read.cu",
}
ELEM_OPTIONS = {"bfloat16": "-DELEM_BF16", "float16": "-DELEM_FP16"}
KV_OPTIONS: dict[KVDtypeName, list[str]] = {"auto": [], "fp8": ["-DKV_FP8"]}
# Cards whose machine code may use instructions of that architecture alone (wgmma, tcgen05).
OWN_ARCHS = {(9, 0): "sm_90a", (10, 0): "sm_100a"}
# Programmatic dependent launch: the architecture from which cuda/common.cuh makes kernels wait for those before them,
# and the CUDA of the first driver whose graphs have such launches.
PROGRAMMATIC_ARCH, PROGRAMMATIC_DRIVER = 90, (12, 3)
SHARED_WITHOUT_ASKING = 48 << 10  # bytes of shared memory a block may have unless the kernel asks for more
PACKAGE = Path(__file__).parents[2]
CHECKSUM_BYTES = hashlib.sha256().digest_size


def kernels_folder(cache: Path) -> Path:
    """Where compiled kernels are kept in the user's cache folder."""
    return cache / "kernels"


def kernel_sources() -> dict[str, str]:
    """File name -> text of all .cu and .cuh files: those in the installed package, or beside it in a checkout.

    The folder is known by common.cuh: in site-packages, `cuda` beside the package is another project's.
    """
    for folder in (PACKAGE / "cuda", PACKAGE.parent / "cuda"):
        if (folder / "common.cuh").is_file():
            files = sorted(path for path in folder.iterdir() if path.suffix in (".cu", ".cuh"))
            return {path.name: path.read_text(encoding="utf-8") for path in files}
    raise DeviceError(f"the CUDA sources are missing from {PACKAGE / 'cuda'}: install tinyvllm-cli again")


@cache
def sources_digest(*names: str) -> str:
    """Of those files of cuda/ and of the compiler."""
    sources = kernel_sources()
    text = "".join(sources[name] for name in names)
    return hashlib.sha256(f"{load_nvrtc().version} {text}".encode()).hexdigest()[:12]


def compile_options(arch: str, dtype: DtypeName, head_dim: int, kv_dtype: KVDtypeName = "auto") -> list[str]:
    """What every source is compiled with; `arch` as in sm_90a or compute_90."""
    return [f"-arch={arch}", "-std=c++17", ELEM_OPTIONS[dtype], f"-DHEAD_DIM={head_dim}", *KV_OPTIONS[kv_dtype]]


def target_arch(compute_capability: tuple[int, int], supported: list[int]) -> str:
    """The architecture to compile for: the card's own, or, where the compiler is older than the card, the newest one
    that it knows below: as PTX, which the driver translates. DeviceError where there is none.
    """
    major, minor = compute_capability
    number = major * 10 + minor
    if number in supported:
        return OWN_ARCHS.get(compute_capability, f"sm_{number}")
    below = [arch for arch in supported if arch < number]
    if not below:
        raise DeviceError(f"NVRTC cannot compile for compute capability {major}.{minor}: install a newer one")
    return f"compute_{max(below)}"


class Kernels:
    """The kernels of one (card, dtype, head_dim, kv_dtype), loaded into the current CUDA context.

    counts: what was launched so far, by name; a library that launches kernels of its own counts them here too.
    """

    def __init__(
        self,
        binaries: Mapping[str, bytes],
        sources: Mapping[str, str],
        files: Mapping[str, Literal["compiled", "cached"]],
        *,
        arch: str,
        programmatic: bool,
        shared_limit: int,
    ) -> None:
        """arch: what they were compiled for, as of target_arch. programmatic: whether kernels may start before the end
        of the one before (Launch). shared_limit: bytes of shared memory that the card gives to a block."""
        self.counts: Counter[str] = Counter()
        self.arch, self.shared_limit = arch, shared_limit
        self.files = dict(files)  # .cu file -> where its machine code came from
        self._code = Code()
        self._modules: dict[str, int] = {}
        try:
            for file, binary in binaries.items():
                self._modules[file] = self._code.load(binary)
            self._functions = {name: self._code.function(self._modules[file], name) for name, file in KERNELS.items()}
        except RuntimeError as error:
            raise DeviceError(f"the driver does not load the kernels ({error}): update the NVIDIA driver") from None
        formats = {name: letters for file in binaries for name, letters in parameter_formats(sources[file]).items()}
        call = open_launch()
        self._launches = {
            name: Launch(call, name, function, formats[name], programmatic=programmatic)
            for name, function in self._functions.items()
        }
        self._shared_limits: dict[str, int] = {}  # dynamic shared memory that a kernel may be launched with

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
        """Enqueue one kernel; a grid with a 0 in it launches nothing.

        `args`: CuPy arrays, None (a null pointer), tensor maps (bytes) and numbers, in the order of the kernel's
        parameters, which say what type a number gets. `shared`: bytes of dynamic shared memory. `cluster`: blocks that
        work together, of which the grid has a multiple in x and y; more than one needs compute capability 9.0.
        DeviceError where the driver refuses.
        """
        if 0 in grid:
            return
        if shared > self._shared_limits.get(name, 0):
            self._allow_shared(name, shared)
        self._launches[name](grid, block, args, stream.ptr, shared, cluster)
        self.counts[name] += 1

    def _allow_shared(self, name: str, shared: int) -> None:
        """Static and dynamic shared memory together may exceed 48 KB only where the kernel has been told so."""
        function = self._functions[name]
        static = self._code.attribute(function, SHARED_SIZE_BYTES)
        if static + shared > SHARED_WITHOUT_ASKING:
            try:
                self._code.set_attribute(function, MAX_DYNAMIC_SHARED_SIZE_BYTES, shared)
            except RuntimeError as error:
                raise DeviceError(f"{name}: {static + shared} bytes of shared memory are too many: {error}") from None
        self._shared_limits[name] = shared

    def close(self) -> None:
        """Once none of them runs any more. Quiet on a card that has failed, which the process's end frees."""
        with contextlib.suppress(RuntimeError):
            for module in self._modules.values():
                self._code.unload(module)


def load_kernels(
    compute_capability: tuple[int, int],
    dtype: DtypeName,
    head_dim: int,
    kv_dtype: KVDtypeName,
    cache: Path | None,
    *,
    shared_limit: int,
    jitter: bool = False,
) -> Kernels:
    """Compile what is not in `cache` yet, in threads, and load it. `cache` is the user's cache folder.

    shared_limit: as of Kernels. jitter: for tests, kernels that stand still here and there (cuda/common.cuh). Needs a
    current CUDA context.
    DeviceError where NVRTC is missing, a source does not compile, or it does not load.
    """
    nvrtc = load_nvrtc()
    arch = target_arch(compute_capability, nvrtc.supported_archs())
    options = compile_options(arch, dtype, head_dim, kv_dtype) + ["-DJITTER"] * jitter
    sources = kernel_sources()
    binaries, files = build(nvrtc, sources, options, cache)
    driver = find_driver()
    programmatic = (
        _number(arch) >= PROGRAMMATIC_ARCH and driver is not None and driver.cuda_version >= PROGRAMMATIC_DRIVER
    )
    return Kernels(binaries, sources, files, arch=arch, programmatic=programmatic, shared_limit=shared_limit)


def _number(arch: str) -> int:
    """Of sm_90a: 90."""
    return int("".join(filter(str.isdigit, arch)))


def build(
    nvrtc: Nvrtc, sources: Mapping[str, str], options: list[str], cache: Path | None
) -> tuple[dict[str, bytes], dict[str, Literal["compiled", "cached"]]]:
    """The machine code of every .cu file in KERNELS, from the cache or compiled now, and which of the two it was."""
    headers = {name: text for name, text in sources.items() if name.endswith(".cuh")}
    names = sorted(set(KERNELS.values()))
    digest = _digest(nvrtc.version, sources, options)
    paths = {name: kernels_folder(cache) / f"{Path(name).stem}-{digest}.bin" for name in names} if cache else {}
    cached = {name: binary for name, path in paths.items() if (binary := read_binary(path)) is not None}
    missing = [name for name in names if name not in cached]

    def compile_one(name: str) -> bytes:
        binary, _ = nvrtc.compile(name, sources[name], headers, options)
        if name in paths:
            write_binary(paths[name], binary)
        return binary

    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        compiled = dict(zip(missing, pool.map(compile_one, missing), strict=True))
    return cached | compiled, {name: "cached" if name in cached else "compiled" for name in names}


def _digest(version: tuple[int, int], sources: Mapping[str, str], options: list[str]) -> str:
    """Over all that decides the machine code. Every source counts: a header may be included by any of them."""
    digest = hashlib.sha256(repr((version, options, sorted(sources.items()))).encode())
    return digest.hexdigest()[:32]


def read_binary(path: Path) -> bytes | None:
    """What write_binary left; None where there is nothing, or nothing whole."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    checksum, binary = content[:CHECKSUM_BYTES], content[CHECKSUM_BYTES:]
    return binary if checksum == hashlib.sha256(binary).digest() else None


def write_binary(path: Path, binary: bytes) -> None:
    """Keep `binary` behind its checksum. Written under another name first: many processes may start at once, and
    none may see half a file. A folder that cannot be written is no error: the next start compiles again.
    """
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f"{path.stem}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(binary).digest() + binary)
            Path(temporary).replace(path)
        except OSError:
            Path(temporary).unlink(missing_ok=True)
            raise
