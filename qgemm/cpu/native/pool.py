"""The threads that share a product: kernels/cpu/pool.c, one pool a process, started by the first product."""

from __future__ import annotations

import atexit
import ctypes
import os
from functools import cache
from typing import Any

from qgemm import parallel
from qgemm.log import logger

from .calls import CHUNKS, POOL
from .library import library

_threads = 0  # of the pool


@cache
def pool() -> ctypes.CDLL | None:
    """The library; None where nothing can be compiled."""
    found = library(POOL)
    if found is None:
        return None
    found.qgemm_multiply.argtypes = [
        ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p,
    ]  # fmt: skip
    found.qgemm_multiply.restype = None
    found.qgemm_run.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
    found.qgemm_run.restype = None
    os.register_at_fork(after_in_child=found.qgemm_after_fork)
    atexit.register(found.qgemm_threads, 1)
    return found


def ready() -> ctypes.CDLL:
    """The library, with as many threads as are wanted now."""
    global _threads
    found, threads = pool(), parallel.threads()
    assert found is not None, "who has a library has this one"
    if threads != _threads and found.qgemm_threads(threads):
        _threads = threads
        logger.info("%d threads share a product on the CPU", threads)
    return found


def run(work: Any, argument: Any, count: int, least: int) -> None:
    """Call a C function work(argument, first, last) for all of `count` items, in chunks of a multiple of `least`."""
    found, threads = ready(), parallel.threads()
    chunk = -(-count // (CHUNKS * threads * least)) * least
    found.qgemm_run(ctypes.cast(work, ctypes.c_void_p), ctypes.byref(argument), count, chunk)
