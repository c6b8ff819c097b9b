"""The threads that share a product: kernels/cpu/pool.c, one pool a process, started by the first product."""

from __future__ import annotations

import atexit
import ctypes
import sys
from contextlib import suppress
from typing import Any

from qgemm import parallel
from qgemm.log import logger
from qgemm.system.process import after_fork, loaded_libraries

from .calls import CHUNKS, POOL
from .library import Loader, library, start
from .sources import Source

_threads = 0  # threads of the pool
_knows_torch = False  # whether torch was imported before a product
OPENMP = "GOMP_parallel", "omp_get_max_threads"
TORCH = ("libtorch_cpu.",)  # torch's library, which is linked with a runtime of OpenMP


@Loader
def pool() -> ctypes.CDLL | None:
    """The library; None where nothing can be compiled."""
    code = library(POOL)
    if code is None:
        return None
    code.qgemm_multiply.argtypes = [
        ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p,
    ]  # fmt: skip
    code.qgemm_multiply.restype = None
    for replay in (code.qgemm_replay, code.qgemm_replay_experts):
        replay.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    code.qgemm_experts_bytes.argtypes, code.qgemm_experts_bytes.restype = [ctypes.c_void_p], ctypes.c_int64
    code.qgemm_run.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
    code.qgemm_run.restype = None
    after_fork(code.qgemm_after_fork)
    atexit.register(code.qgemm_threads, 1)
    return code


def pooled(source: Source) -> ctypes.CDLL | None:
    """The library of a source whose functions run on the pool; None where there is not both. Both compile at once."""
    start(POOL)
    code = library(source)
    return None if code is None or pool() is None else code


def ready() -> ctypes.CDLL:
    """The library, with the number of threads that is set now."""
    code = pool()
    assert code is not None, "`pooled` says so"
    if parallel.threads() != _threads or (not _knows_torch and "torch" in sys.modules):
        _adopt(code, parallel.threads())
    return code


def _adopt(code: ctypes.CDLL, threads: int) -> None:
    """Set the number of threads, and use torch's own threads once it is imported."""
    global _threads, _knows_torch
    if not _knows_torch and "torch" in sys.modules:
        _knows_torch = True
        _use_openmp(code)
    if threads != _threads and code.qgemm_threads(threads):
        _threads = threads
        logger.info("%d threads share a product on the CPU", threads)


def _use_openmp(code: ctypes.CDLL) -> None:
    """Let products run on the threads of torch: two sets of threads that spin would take the cores from each other."""
    for path in loaded_libraries(TORCH):
        for scope in (None, path):  # as torch is linked: with a global runtime, e.g. of LD_PRELOAD, before its own
            with suppress(OSError, AttributeError):
                runtime = ctypes.CDLL(scope)
                code.qgemm_use_openmp(*(ctypes.cast(getattr(runtime, name), ctypes.c_void_p) for name in OPENMP))
                logger.info("products run on the threads of torch")
                return


def run(work: Any, argument: Any, count: int, least: int) -> None:
    """Call a C function work(argument, first, last) for all of `count` items, in chunks of a multiple of `least`."""
    code, threads = ready(), parallel.threads()
    chunk = -(-count // (CHUNKS * threads * least)) * least
    code.qgemm_run(ctypes.cast(work, ctypes.c_void_p), ctypes.byref(argument), count, chunk)
