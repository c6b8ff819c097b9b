"""Compiling with NVRTC, which needs no GPU: source and architecture to cubin, with ptxas' report.

By the library itself, which torch and CuPy bring: CuPy's own compiler adds -ftz=true, which would flush the subnormal
scales that a file may hold, and -arch=sm_90, which lacks wgmma.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, NamedTuple

from qgemm.cuda import toolkit
from qgemm.version import pip_install

from .sources import kernels_dir

ARCHS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120")  # compiled in CI; sm_90a is tuned
OPTIONS = (
    "--std=c++17",
    "--fmad=true",
    "--ftz=false",
    "--prec-div=true",
    "--prec-sqrt=true",
    "--device-as-default-execution-space",  # lambdas inside a kernel, for NVRTC 13.0 and before
    "--ptxas-options=-v",  # the report
)
FRONT_END = ("--fdevice-syntax-only",)  # makes no code


class CompileError(RuntimeError):
    """NVRTC refused a kernel, or is not there; the message holds its log."""


class Compiled(NamedTuple):
    """A kernel's machine code for one architecture, and what ptxas reports of it: registers, spills."""

    cubin: bytes
    report: str


def options_for(arch: str) -> tuple[str, ...]:
    """All that NVRTC is told besides where headers lie, whose text the cache knows: these are in its keys."""
    return f"--gpu-architecture={arch}", *OPTIONS


def compile_cubin(source: str, arch: str, headers: Mapping[str, str] | None = None) -> Compiled:
    """Compile a unit; headers are those made in memory, by the name in an #include. CompileError holds the log."""
    return Compiled(*_compiled(source, arch, headers or {}, ()))


def check(source: str, arch: str, headers: Mapping[str, str] | None = None) -> None:
    """The front end alone, without optimizer and ptxas: templates, static_asserts, types, operands of inline PTX."""
    _compiled(source, arch, headers or {}, FRONT_END)


def _compiled(source: str, arch: str, headers: Mapping[str, str], more: Iterable[str]) -> tuple[bytes, str]:
    """The cubin, and the log."""
    nvrtc, include = _nvrtc()
    includes = [f"--include-path={path}" for path in (kernels_dir(), include)]
    options = _strings([*options_for(arch), *more, *includes])
    names, texts, program = _strings(headers.keys()), _strings(headers.values()), ctypes.c_void_p()
    status = nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"qgemm.cu", len(headers), texts, names)
    _check(nvrtc, status, "cannot create a program")
    try:
        compiled = nvrtc.nvrtcCompileProgram(program, len(options), options)
        report = _result(nvrtc, program, "ProgramLog", "NVRTC wrote no log").rstrip(b"\0").decode(errors="replace")
        _check(nvrtc, compiled, f"compiling for {arch} failed:\n{report}")
        return _result(nvrtc, program, "CUBIN", f"no cubin for {arch}"), report
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _strings(texts: Iterable[str]) -> Any:
    """Texts as an array of C."""
    encoded = [text.encode() for text in texts]
    return (ctypes.c_char_p * len(encoded))(*encoded)


def _result(nvrtc: Any, program: ctypes.c_void_p, name: str, problem: str) -> bytes:
    """A result of a compilation, by NVRTC's name for it."""
    size = ctypes.c_size_t()
    _check(nvrtc, getattr(nvrtc, f"nvrtcGet{name}Size")(program, ctypes.byref(size)), problem)
    memory = ctypes.create_string_buffer(size.value)
    _check(nvrtc, getattr(nvrtc, f"nvrtcGet{name}")(program, memory), problem)
    return memory.raw


@cache
def nvrtc_version() -> tuple[int, int]:
    """The version of the NVRTC library; CompileError if there is none."""
    nvrtc, _ = _nvrtc()
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(nvrtc, nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), "NVRTC does not tell its version")
    return major.value, minor.value


@cache
def _nvrtc() -> tuple[Any, str]:
    """The NVRTC library and the folder of cuda_fp16.h."""
    try:
        nvrtc, folder = toolkit.library("nvrtc")
    except OSError as error:
        raise CompileError(f"the NVRTC library was not found: {pip_install('cuda13')} ({error})") from None
    nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
    include = toolkit.headers(folder)
    if include is None:
        raise CompileError(f"the CUDA headers ({toolkit.HEADER}) were not found: {pip_install('cuda13')}")
    return nvrtc, include


def _check(nvrtc: Any, status: int, problem: str) -> None:
    if status:
        raise CompileError(f"{problem} ({nvrtc.nvrtcGetErrorString(status).decode()})")


def arch_of(compute_capability: tuple[int, int]) -> str:
    """The NVRTC architecture of a GPU: (9, 0) -> sm_90a, which alone has wgmma; otherwise sm_XY."""
    name = "sm_{}{}".format(*compute_capability)
    return f"{name}a" if f"{name}a" in ARCHS else name
