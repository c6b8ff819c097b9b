"""CUDA sources on the host: a C++ compiler, a shim for what NVRTC provides, a fiber for every thread of a CTA.

    Kernel("pack", fmt, ...)    a kernel, composed as for NVRTC -> a function that runs a grid of it
    Lanes(fmt)                  the functions of a format's header, lane by lane

half and bfloat16 are emulated (shim/small_float.h), intrinsics are written out (shim/cuda.h), and every function of
kernels/ptx/ that is used has a host version beside its instruction.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from qgemm.codec.format import Format
from qgemm.cuda.jit import codegen, sources

FOLDER = Path(__file__).parent
SHIM = FOLDER / "shim"
OF_TESTS = FOLDER.parent / "data" / "kernels"  # headers of tests/formats_of_tests/, and kernels of one part of a kernel
# -Og compiles faster than -O1 by an eighth, and runs nearly as fast; code from -O0 runs three times as long.
# -ffp-contract=off: a product and a sum stay two roundings, as the intrinsics that ask for them promise.
# -U_FORTIFY_SOURCE: which some systems define; longjmp from one stack to another would end the process.
OPTIONS = (
    "-std=c++17", "-Og", "-fPIC", "-shared", "-ffp-contract=off", "-fno-strict-aliasing", "-Wno-unknown-pragmas",
    "-U_FORTIFY_SOURCE",
)  # fmt: skip
# A declaration that is none in C++: shared memory is static, and nothing is both extern and static.
DYNAMIC_SMEM = re.compile(r"extern __shared__ __align__\(\d+\) unsigned char (\w+)\[\];")
LADDER = FOLDER.parents[1] / "docs" / "ladder"  # kernels for newcomers
GUARD = 64  # bytes on each side of an array that a kernel must leave alone
GUARDED = 0xA5


class HostCompileError(RuntimeError):
    """The compiler refused a translation unit; the message holds its output."""


@cache
def compiler() -> str | None:
    """$CXX, g++, c++ or clang++, whichever is found first; None if there is none."""
    names = (os.environ.get("CXX"), "g++", "c++", "clang++")
    return next((path for name in names if name and (path := shutil.which(name))), None)


@cache
def own_options() -> tuple[str, ...]:
    """GCC's own option: without it a template's static variable, here shared memory, is unique in the whole process."""
    version = subprocess.run([compiler() or "c++", "--version"], capture_output=True, text=True, check=True).stdout
    return () if "clang" in version else ("-fno-gnu-unique",)


needs_compiler = pytest.mark.skipif(compiler() is None, reason="no C++ compiler: looked for $CXX, g++, c++ and clang++")


def library(source: str, headers: Mapping[str, str] = MappingProxyType({})) -> ctypes.CDLL:
    """A translation unit in CUDA C++, and the headers made in memory -> a shared library by the host's compiler.

    Cached by the content of all that it includes, so that workers of one run share their work, and runs do.
    """
    folders = (precompiled(), SHIM, sources.kernels_dir(), OF_TESTS, LADDER)
    command = [*compilation(), "-include", "cuda.h", *(f"-I{folder}" for folder in folders if folder)]
    facts = (compilation(), own_digest(), source, sources.closure(source, {**of_tests(), **headers}))
    shared_object = kept_in() / f"{hashlib.sha256(repr(facts).encode()).hexdigest()}.so"
    with open(shared_object.with_suffix(".lock"), "w") as lock, tempfile.TemporaryDirectory(dir=kept_in()) as folder:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a second worker waits and finds the library
        if not shared_object.exists():
            for name, text in {**headers, "unit.cpp": source}.items():
                path = Path(folder) / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
            command[1:1] = [f"-I{folder}"]  # generated headers come first
            unit, partial = Path(folder) / "unit.cpp", Path(folder) / "unit.so"
            done = subprocess.run([*command, unit, "-o", partial], capture_output=True, text=True)
            if done.returncode:
                raise HostCompileError(done.stderr)
            os.replace(partial, shared_object)
    os.utime(shared_object)
    return ctypes.CDLL(str(shared_object))


def compilation() -> list[str]:
    """The compiler with its options."""
    return [compiler() or "c++", *OPTIONS, *own_options()]


@cache
def precompiled() -> Path | None:
    """A folder with the shim and the headers of C++ that it includes as GCC reads them fastest; None for others.

    Parsing these headers costs half of a small unit's compile time.
    """
    if not own_options():
        return None
    facts = (compilation(), own_digest())
    header = kept_in() / f"{hashlib.sha256(repr(facts).encode()).hexdigest()}.pch" / "cuda.h.gch"
    header.parent.mkdir(exist_ok=True)
    with open(header.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not header.exists():
            partial = header.with_suffix(".partial")
            command = [*compilation(), "-w", "-x", "c++-header", SHIM / "cuda.h", "-o", partial]
            subprocess.run([*command, f"-I{SHIM}", f"-I{sources.kernels_dir()}"], check=True, capture_output=True)
            os.replace(partial, header)
    return header.parent


@cache
def kept_in() -> Path:
    """Where libraries are kept, $QGEMM_CACHE_DIR or the temporary folder; what nobody used for a week goes."""
    chosen = os.environ.get("QGEMM_CACHE_DIR")
    folder = Path(chosen, "harness") if chosen else Path(tempfile.gettempdir()) / f"qgemm-harness-{os.getuid()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for path in folder.iterdir():
        if path.is_file() and path.stat().st_mtime < time.time() - 7 * 24 * 3600:
            path.unlink(missing_ok=True)
    return folder


def compiles_once(command: Sequence[str]) -> str:
    """A compiler of C as $CC, so that it makes a library once for all processes; itself where a path has a space."""
    words = [sys.executable, str(FOLDER / "cc_once.py"), str(kept_in()), *command]
    return " ".join(command if any(" " in word for word in words) else words)


@cache
def of_tests() -> dict[str, str]:
    """The headers of OF_TESTS and LADDER, by the name in an #include."""
    return {
        str(path.relative_to(folder)): path.read_text()
        for folder in (OF_TESTS, LADDER)
        for path in folder.rglob("*.cuh")
    }


@cache
def own_digest() -> str:
    """The SHA-256 of the shim and of the units of this folder."""
    digest = hashlib.sha256()
    for path in sorted(path for path in FOLDER.rglob("*") if path.suffix in (".h", ".cpp")):
        digest.update(f"{path.name}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def device_array(shape: Any, dtype: Any = np.uint8) -> np.ndarray:
    """Zeros, aligned as the driver aligns memory, between guards: `guards` of it are to stay as they are."""
    dtype = np.dtype(dtype)
    size = int(np.prod(shape)) * dtype.itemsize
    raw = np.full(size + 2 * GUARD + 256, GUARDED, np.uint8)
    start = -(raw.ctypes.data + GUARD) % 256 + GUARD
    raw[start : start + size] = 0
    return raw[start : start + size].view(dtype.base).reshape(*np.atleast_1d(shape), *dtype.shape)


def to_device(array: np.ndarray, size: int = 0) -> np.ndarray:
    """The bytes of an array in a device array of at least this size."""
    array_on_device = device_array(max(size, array.nbytes))
    array_on_device[: array.nbytes] = np.frombuffer(array.tobytes(), np.uint8)
    return array_on_device


def check_guards(array: np.ndarray) -> None:
    """AssertionError if something was written beside a device array."""
    base = array
    while isinstance(base.base, np.ndarray):
        base = base.base
    start = array.ctypes.data - base.ctypes.data
    end = start + array.nbytes
    assert (base[start - GUARD : start] == GUARDED).all(), "written before an array"
    assert (base[end : end + GUARD] == GUARDED).all(), "written behind an array"


class Kernel:
    """One kernel of kernels/, OF_TESTS or LADDER for a format and template on the host: `kernel(grid, threads, *args)`.

    Arguments: device arrays, int, float, ctypes structs. Every call runs the grid; backwards: the last thread of a CTA
    first, which changes the outcome where a barrier is missing. cluster: CTAs of a cluster.
    """

    def __init__(self, name: str, fmt: Format | None = None, **template: str | int) -> None:
        own = [path for folder in (OF_TESTS, LADDER) if (path := folder / f"{name}.cu").exists()]
        text = own[0].read_text() if own else sources.kernel_text(name)
        file = {sources.kernel_path(name): DYNAMIC_SMEM.sub(r"auto& \1 = host_dynamic_smem;", text)}
        source = codegen.compose(name, fmt, **template)
        entry = f'#include "run.h"\nextern "C" {{ auto* grid_of_kernel = Run<::{name}>::grid; }}\n'
        self.library = library(f"{source}\n{entry}", {**codegen.headers(fmt), **file})
        self.entry = ctypes.c_void_p.in_dll(self.library, "grid_of_kernel").value

    def __call__(
        self, grid: tuple[int, int] | int, threads: int, *arguments: Any, backwards: bool = False, cluster: int = 1
    ) -> None:
        x, y = grid if isinstance(grid, tuple) else (grid, 1)
        passed = [argument_of(value) for value in arguments]
        sizes = ctypes.c_uint, ctypes.c_uint, ctypes.c_int, ctypes.c_bool, ctypes.c_uint
        types = (*sizes, *(type(value) for value in passed))
        ctypes.CFUNCTYPE(None, *types)(self.entry)(x, y, threads, backwards, cluster, *passed)
        for value in arguments:
            if isinstance(value, np.ndarray):
                check_guards(value)


def argument_of(value: Any) -> Any:
    """A Python value as a kernel's argument: an address, 64 bits of an integer, a float, a struct as it is."""
    if isinstance(value, np.ndarray):
        return ctypes.c_void_p(value.ctypes.data)
    if isinstance(value, int):
        return ctypes.c_longlong(value)
    return ctypes.c_float(value) if isinstance(value, float) else value


class Lanes:
    """The functions of a format's header, lane by lane; see lanes.cpp for the order of their outputs."""

    FACTS = (
        "ZERO", "HAS_MINIMUM", "GROUP_SIZE", "SUPER_BLOCK", "SCALE_FACTORS", "CODE_BIAS", "CODE_EXPONENT",
        "HIGH_ROW_SHIFT", "CODES_ARE_LEVELS", "TABLE_BYTES", "TILE_SIZE", "FIELDS_SIZE", "CODES_SIZE",
    )  # fmt: skip

    def __init__(self, fmt: Format, changed: Mapping[str, str] = MappingProxyType({})) -> None:
        """changed: headers to compile in the place of those of kernels/."""
        self.library = library(
            f'{codegen.config(fmt)}#include "{FOLDER / "lanes.cpp"}"\n', {**codegen.headers(fmt), **changed}
        )

    @property
    def facts(self) -> dict[str, int]:
        values = (ctypes.c_int * len(self.FACTS)).in_dll(self.library, "facts")
        return dict(zip(self.FACTS, values, strict=True))

    def call(self, name: str, m16_tiles: int, tile: np.ndarray, *outputs: np.ndarray, **unit: float) -> None:
        """Fill outputs by function `name` of the header for this number of 16-row groups, from one tile."""
        entry = ctypes.c_void_p.in_dll(self.library, f"{name}_{m16_tiles}").value
        passed = [argument_of(value) for value in (tile, *outputs, *unit.values())]
        ctypes.CFUNCTYPE(None, *(type(value) for value in passed))(entry)(*passed)
        for value in outputs:
            check_guards(value)
