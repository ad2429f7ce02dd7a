"""NVRTC, NVIDIA's run-time compiler, through ctypes: CUDA C++ text in, machine code out, without a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from tinyvllm_cli.backends.gpu.libraries import open_library
from tinyvllm_cli.errors import DeviceError

_Program = ctypes.c_void_p
_Size = ctypes.POINTER(ctypes.c_size_t)
_Int = ctypes.POINTER(ctypes.c_int)
_Strings = ctypes.POINTER(ctypes.c_char_p)
SIGNATURES = {  # nvrtc.h
    "nvrtcVersion": (_Int, _Int),
    "nvrtcGetNumSupportedArchs": (_Int,),
    "nvrtcGetSupportedArchs": (_Int,),
    "nvrtcCreateProgram": (
        ctypes.POINTER(_Program), ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int, _Strings, _Strings,
    ),
    "nvrtcCompileProgram": (_Program, ctypes.c_int, _Strings),
    "nvrtcDestroyProgram": (ctypes.POINTER(_Program),),
    "nvrtcGetProgramLogSize": (_Program, _Size),
    "nvrtcGetProgramLog": (_Program, ctypes.c_char_p),
    "nvrtcGetCUBINSize": (_Program, _Size),
    "nvrtcGetCUBIN": (_Program, ctypes.c_char_p),
    "nvrtcGetPTXSize": (_Program, _Size),
    "nvrtcGetPTX": (_Program, ctypes.c_char_p),
}  # fmt: skip


class CompileError(DeviceError):
    """A CUDA source that does not compile; `log` is all that the compiler said."""

    def __init__(self, message: str, log: str) -> None:
        super().__init__(message)
        self.log = log


class Nvrtc:
    """One loaded NVRTC. Safe to use from several threads: every call works on a program of its own."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        self.version = (major.value, minor.value)

    def supported_archs(self) -> list[int]:
        """The architectures it compiles for, ascending: 90 stands for sm_90 and compute_90."""
        count = ctypes.c_int()
        self._check("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        archs = (ctypes.c_int * count.value)()
        self._check("nvrtcGetSupportedArchs", archs)
        return list(archs)

    def compile(self, name: str, source: str, headers: Mapping[str, str], options: Sequence[str]) -> tuple[bytes, str]:
        """(binary, log) of one source. `headers` are what its #include lines may name; no folder is searched.

        The binary is a cubin for -arch=sm_XY and PTX text for -arch=compute_XY. CompileError with the log.
        """
        with self._program(name, source, headers) as program:
            status = self._library.nvrtcCompileProgram(program, len(options), _strings(options))
            log = self._read(program, "nvrtcGetProgramLog").rstrip(b"\0").decode(errors="replace").strip()
            if status:
                reason = next((line for line in log.splitlines() if "error" in line), f"NVRTC error {status}")
                raise CompileError(f"{name} does not compile with {' '.join(options)}: {reason.strip()}", log)
            binary = self._read(program, "nvrtcGetCUBIN") or self._read(program, "nvrtcGetPTX")
            return binary, log

    @contextmanager
    def _program(self, name: str, source: str, headers: Mapping[str, str]) -> Iterator[_Program]:
        program = _Program()
        texts, names = _strings(list(headers.values())), _strings(list(headers))
        self._check(
            "nvrtcCreateProgram",
            ctypes.byref(program), source.encode(), name.encode(), len(headers), texts, names,
        )  # fmt: skip
        try:
            yield program
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _read(self, program: _Program, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(f"{what}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        if size.value:
            self._check(what, program, buffer)
        return buffer.raw

    def _check(self, function: str, *arguments: object) -> None:
        status = getattr(self._library, function)(*arguments)
        if status:
            raise DeviceError(f"{function} failed with NVRTC error {status}")


def load_nvrtc() -> Nvrtc:
    """NVRTC as it is installed. DeviceError where it is not."""
    return Nvrtc(open_library("nvrtc", SIGNATURES))


def _strings(texts: Sequence[str]) -> ctypes.Array[ctypes.c_char_p]:
    return (ctypes.c_char_p * len(texts))(*(text.encode() for text in texts))
