"""Compiling with NVRTC, which needs no GPU: source and architecture to cubin, with ptxas' report.

By ourselves, not by CuPy: CuPy adds -ftz=true, which would flush the subnormal scales that a file may hold, and
-arch=sm_90, which lacks wgmma.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, NamedTuple

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
    encoded = [option.encode() for option in (*options_for(arch), *more, *includes)]
    names, texts = ([text.encode() for text in items] for items in (headers.keys(), headers.values()))
    status, program = nvrtc.nvrtcCreateProgram(source.encode(), b"qgemm.cu", len(names), texts, names)
    _check(nvrtc, status, "cannot create a program")
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
        _, size = nvrtc.nvrtcGetProgramLogSize(program)
        log = bytearray(size)
        nvrtc.nvrtcGetProgramLog(program, log)
        report = log.rstrip(b"\0").decode(errors="replace")
        _check(nvrtc, status, f"compiling for {arch} failed:\n{report}")
        status, size = nvrtc.nvrtcGetCUBINSize(program)
        _check(nvrtc, status, f"no cubin for {arch}")
        cubin = bytearray(size)
        nvrtc.nvrtcGetCUBIN(program, cubin)
        return bytes(cubin), report
    finally:
        nvrtc.nvrtcDestroyProgram(program)


@cache
def nvrtc_version() -> tuple[int, int]:
    """The version of the NVRTC library; CompileError if there is none."""
    nvrtc, _ = _nvrtc()
    status, major, minor = nvrtc.nvrtcVersion()
    _check(nvrtc, status, "NVRTC does not tell its version")
    return major, minor


@cache
def _nvrtc() -> tuple[Any, str]:
    """The NVRTC binding and the folder of cuda_fp16.h."""
    try:
        from cuda.bindings import nvrtc
        from cuda.pathfinder import find_nvidia_header_directory
    except ImportError as error:
        raise CompileError(f"compiling kernels needs cuda-bindings: {pip_install('cuda13')} ({error})") from None
    try:
        nvrtc.nvrtcVersion()
    except RuntimeError as error:  # the binding is there, the library is not
        raise CompileError(f"the NVRTC library was not found: {pip_install('cuda13')} ({error})") from None
    include = find_nvidia_header_directory("cudart")
    if include is None:
        raise CompileError(f"the CUDA headers (cuda_fp16.h) were not found: {pip_install('cuda13')}")
    return nvrtc, include


def _check(nvrtc: Any, status: Any, problem: str) -> None:
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise CompileError(f"{problem} ({status.name})")


def arch_of(compute_capability: tuple[int, int]) -> str:
    """The NVRTC architecture of a GPU: (9, 0) -> sm_90a, which alone has wgmma; otherwise sm_XY."""
    name = "sm_{}{}".format(*compute_capability)
    return f"{name}a" if f"{name}a" in ARCHS else name
