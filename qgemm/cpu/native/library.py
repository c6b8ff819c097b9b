"""Shared libraries of kernels/cpu/: compiled at first use, cached by content, loaded from memory."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import sys
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

from qgemm.errors import QgemmError
from qgemm.files.compiled import kept
from qgemm.once import Once

from .compiler import FLAGS, Compiler, compiled, compiler, cpu

DISABLED = "QGEMM_CPU"  # =numpy: no compiled code
NEEDED = {"x86_64": {"avx2", "fma", "f16c"}, "aarch64": {"asimd"}}  # of CPUs that kernels/cpu/vec/ has instructions for

_loaded: Once[ctypes.CDLL | None] = Once()
_warning = threading.Lock()
_compiled = threading.local()  # count: of libraries that this thread has compiled
_failed: list[str] = []  # the reason, once one was


def folder() -> Path:
    """kernels/cpu: beside the package in a checkout, inside it in an installed wheel."""
    package = Path(__file__).parents[2]
    inside = package / "kernels"
    return (inside if inside.is_dir() else package.parent / "kernels") / "cpu"


def reason() -> str:
    """Why there is no compiled code, "" if there may be; asks nothing of the compiler."""
    if os.environ.get(DISABLED) == "numpy":
        return f"{DISABLED}=numpy"
    return _failed[0] if _failed else lacking()


@cache
def lacking() -> str:
    """What this machine lacks for compiled code, "" for nothing."""
    if sys.byteorder != "little" or not hasattr(os, "memfd_create"):
        return "compiled code needs a little-endian Linux"
    if not set(cpu().split()) >= NEEDED.get(platform.machine(), {"code for this CPU"}):
        return "compiled code is for CPUs with AVX2, FMA and F16C, and for 64-bit ARM"
    return "" if compiler() is not None else "no C compiler (cc) was found, which makes products many times faster"


def library(name: str, definitions: Mapping[str, str] = {}, flags: Sequence[str] = ()) -> ctypes.CDLL | None:
    """The library of kernels/cpu/NAME.c with these macros and, after FLAGS, flags; None without one.

    The first failure warns, and is the last.

    The key of the cache is everything that the compiler reads: all sources of the folder, macros, flags, the compiler,
    the CPU.
    """
    words = [*(f"-D{macro}={text}" for macro, text in definitions.items()), *flags]
    return _loaded.get((name, *words), lambda: None if reason() else _library(name, words))


def compiles(load: Callable[[], object]) -> bool:
    """Load a library; whether that took the compiler."""
    before = _count()
    load()
    return _count() > before


def _count() -> int:
    return getattr(_compiled, "count", 0)


def _made(by: Compiler, source: Path, words: list[str]) -> bytes:
    _compiled.count = _count() + 1
    return compiled(by, source, words)


def _library(name: str, words: list[str]) -> ctypes.CDLL | None:
    by = compiler()
    assert by is not None, "asked before"
    facts = (name, words, _sources(), FLAGS, by.identity, by.command[1:], cpu())
    entry = f"{hashlib.sha256(repr(facts).encode()).hexdigest()}.so"
    try:
        return _load(kept(entry, lambda: _made(by, folder() / f"{name}.c", words)))
    except (QgemmError, OSError) as error:
        with _warning:
            if not _failed:
                _failed.append(f"the C compiler failed: {str(error).splitlines()[0]}")
                warnings.warn(f"products on the CPU stay slow, by NumPy: {error}", RuntimeWarning, stacklevel=5)
        return None


@cache
def _sources() -> str:
    """The hash of all sources."""
    found = hashlib.sha256()
    root = folder()
    for path in sorted(root.rglob("*.[ch]")):
        found.update(repr((path.relative_to(root).as_posix(), path.read_bytes())).encode())
    return found.hexdigest()


def _load(code: bytes) -> ctypes.CDLL:
    """A library from its bytes: a file in memory has no name under which others could swap it.

    Its descriptor stays open: another library under the same number would be taken for this one by dlopen.
    """
    fd = os.memfd_create("qgemm", os.MFD_CLOEXEC)
    with open(fd, "wb", closefd=False) as file:
        file.write(code)
    return ctypes.CDLL(f"/proc/self/fd/{fd}")
