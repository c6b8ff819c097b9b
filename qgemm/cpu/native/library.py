"""Shared libraries of kernels/cpu/: prebuilt, or compiled at first use and cached by content; loaded from memory."""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
import threading
import warnings
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import cache
from time import perf_counter

from qgemm.errors import QgemmError
from qgemm.files.compiled import CODE, load, load_or_make
from qgemm.locks import new_lock
from qgemm.log import logger
from qgemm.once import Once
from qgemm.system.process import after_fork, cpu, load_library, machine, setting
from qgemm.version import pip_install

from . import prebuilt
from .calls import POOL
from .compiler import FLAGS, NATIVE, CompileError, Compiler, CompilerStopped, compiled, compiler, stamp, stamped
from .sources import Source, digest

MODE = "QGEMM_CPU"  # =numpy: no compiled code; =blocks: layers make no copies of their weights
NUMPY, BLOCKS = "numpy", "blocks"
NEEDED = {"x86_64": {"avx2", "fma", "f16c"}, "aarch64": {"asimd"}}  # features of the CPUs that kernels/cpu/vec/ serves

ATTEMPTS = 3  # runs of a compiler that are stopped before it counts as broken

_read_mode = setting(MODE)
_loaded: Once[ctypes.CDLL | None] = Once()
_warning = new_lock()
_compiled = threading.local()  # count: libraries that this thread has compiled
_failed: list[str] = []  # the reason of the first failure, once there was one
_stopped: list[CompilerStopped] = []  # compilers that were stopped, which is no failure up to ATTEMPTS
_started: dict[Source, Future[tuple[bytes, int]] | None] = {}  # libraries of `start`, None once `library` has one
after_fork(_started.clear)  # a child has none of the threads


def reason() -> str:
    """Why there is no compiled code, "" if there may be; the compiler is not run."""
    text = _read_mode()
    if text == NUMPY:
        return f"{MODE}={NUMPY}"
    if text not in ("", BLOCKS):
        raise ValueError(f"{MODE} is {text!r}, and must be {NUMPY}, {BLOCKS} or not be set")
    return _failed[0] if _failed else lacking()


def by_blocks_alone() -> bool:
    """Whether layers multiply by the blocks of their weights, without a copy in the order of the CPU's vectors."""
    return _read_mode() == BLOCKS


@cache
def lacking() -> str:
    """What this machine lacks for compiled code, "" for nothing."""
    if sys.byteorder != "little":
        return "compiled code needs a little-endian machine"
    if not set(cpu().split()) >= NEEDED.get(machine(), {"code for this CPU"}):
        return "compiled code is for CPUs with AVX2, FMA and F16C, and for 64-bit ARM"
    if compiler() is None and not prebuilt.has(POOL):
        return f"no C compiler (cc) was found, which makes products many times faster; {pip_install('cpu')} brings one"
    return ""


def origin() -> str:
    """Where the libraries come from, for a person."""
    cc, target = compiler(), prebuilt.target()
    if target is not None and not _own(cc):
        return f"compiled code built for {target.name}"
    return "compiled code" if cc is None else f"code compiled by {os.path.basename(cc.command[0])} for this CPU"


def library(source: Source) -> ctypes.CDLL | None:
    """The library of a source, None where there is none. The first failure warns, and disables all compiled code.

    A compiler that was stopped is no failure: the next call runs it again, up to ATTEMPTS times in a process.
    """
    try:
        return _loaded.get(source, lambda: None if reason() else _library(source))
    except CompilerStopped:
        return None


def start(source: Source) -> None:
    """Begin to compile a library in another thread, once in a process; `library` waits for it, and has its errors."""
    cc = compiler()
    if cc is None or source in _started or source in _loaded.values or _stopped or reason() or not _own(cc):
        return
    future: Future[tuple[bytes, int]] = Future()

    def work() -> None:
        try:
            future.set_result((built(cc, source, NATIVE, cpu()), _count()))
        except BaseException as error:
            if isinstance(error, CompilerStopped):  # counts at once, also where nobody waits for this library
                _stopped.append(error)
            future.set_exception(error)

    if _started.setdefault(source, future) is future:
        try:
            threading.Thread(target=work, name=f"qgemm compiles {source.name}").start()
        except RuntimeError:  # no more threads: `library` compiles
            _started[source] = None


def at_hand(source: Source) -> bool:
    """Whether `library` needs no compiler: the library is loaded, in the package or in the cache, or there is none."""
    cc = compiler()
    if source in _loaded.values or cc is None or not _own(cc):
        return True
    return load(_entry(cc, source, NATIVE, cpu()), CODE) is not None


class Loader:
    """A function that returns a library, with a cache, but no cached None while another call may succeed."""

    def __init__(self, load: Callable[..., ctypes.CDLL | None]) -> None:
        @cache
        def load_once(*key: Hashable) -> ctypes.CDLL | None:
            code = load(*key)
            if code is None and not reason():
                raise _NotYet
            return code

        self._load_once, self.cache_clear = load_once, load_once.cache_clear

    def __call__(self, *key: Hashable) -> ctypes.CDLL | None:
        try:
            return self._load_once(*key)
        except _NotYet:
            return None


class _NotYet(Exception):
    """There is no library now; functools.cache keeps no exception."""


def built(cc: Compiler, source: Source, march: Sequence[str], cpu_facts: str = "") -> bytes:
    """A library for the CPUs of the words `march`, or for one CPU: from the cache, or compiled, and stored there."""
    entry = _entry(cc, source, march, cpu_facts)
    return load_or_make(entry, lambda: stamp(_compile(cc, source, march), entry), lambda code: stamped(code, entry))


def _entry(cc: Compiler, source: Source, march: Sequence[str], cpu_facts: str) -> str:
    """The name of a library in the cache, by all that the compiler reads: sources, macros and flags for a CPU."""
    facts = (*source, digest(), FLAGS, *march, cc.identity, cc.command[1:], cpu_facts)
    return f"{hashlib.sha256(repr(facts).encode()).hexdigest()}.so"


def compiles(load: Callable[[], object]) -> bool:
    """Load a library; whether the compiler ran for it."""
    before = _count()
    load()
    return _count() > before


def _count() -> int:
    return getattr(_compiled, "count", 0)


def _compile(cc: Compiler, source: Source, march: Sequence[str]) -> bytes:
    _compiled.count = _count() + 1
    start, code = perf_counter(), compiled(cc, source.file, [*march, *source.words])
    logger.info("%s: compiled in %.2f s", _title(source), perf_counter() - start)
    return code


def _title(source: Source) -> str:
    """The library's name in the log: its C file, and the format that it is for."""
    formats = [word.partition("=")[2] for word in source.words if word.startswith("-DFORMAT_NAME=")]
    return " ".join([f"{source.name}.c", *formats])


def _own(cc: Compiler | None) -> bool:
    """Whether libraries are compiled here: without prebuilt ones, or where those leave instructions unused."""
    return cc is not None and (prebuilt.outdone() or not prebuilt.has(POOL))


def _library(source: Source) -> ctypes.CDLL | None:
    cc = compiler()
    code = None if _own(cc) else prebuilt.code(source)
    logger.info("%s: from %s", _title(source), "the cache or the compiler" if code is None else "the package")
    if code is not None:
        with suppress(OSError):  # built for another C library: compile here, where possible
            return load_library(code)
    try:
        if cc is None:
            raise CompileError(f"no prebuilt library of {source.name}.c, and no C compiler")
        pending, _started[source] = _started.get(source), None
        code, compilations = (built(cc, source, NATIVE, cpu()), 0) if pending is None else pending.result()
        _compiled.count = _count() + compilations
        return load_library(code)
    except (QgemmError, OSError) as error:
        with _warning:
            if isinstance(error, CompilerStopped):
                if error not in _stopped:
                    _stopped.append(error)
                if len(_stopped) < ATTEMPTS:
                    text = f"this product is slow, by NumPy, and the next one compiles again: {error}"
                    warnings.warn(text, RuntimeWarning, stacklevel=4)  # shown once, whichever library it is
                    raise
            if not _failed:
                problem = "there is" if cc is None else "the C compiler failed:"
                _failed.append(f"{problem} {str(error).splitlines()[0]}")
                warnings.warn(f"products on the CPU stay slow, by NumPy: {error}", RuntimeWarning, stacklevel=5)
        return None
