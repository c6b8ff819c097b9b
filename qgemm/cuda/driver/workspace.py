"""Workspaces: memory that the kernels of a stream share from call to call, split-K partials or quantized activations.

A workspace is never freed, so that a captured graph may be replayed whenever its stream's other work is done.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from .launch import check, driver

RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED: this thread may allocate while a stream is captured


class Workspace(NamedTuple):
    """Bytes on a device, zero at first.

    lock: held from the launch that writes what a later launch of the same call reads until that one is enqueued;
    threads that share a stream would mix their calls otherwise.
    """

    pointer: int
    lock: threading.Lock
    memory: Any


_made: dict[tuple[int, int, str, int], Workspace] = {}
_making = threading.Lock()


def workspace(device: int, stream: int, use: str, nbytes: int) -> Workspace:
    """The workspace of a stream, a raw handle, of this use and size, on the current device."""
    key = device, stream, use, nbytes
    found = _made.get(key)
    if found is None:
        with _making:
            found = _made.get(key) or _made.setdefault(key, _new(nbytes))
    return found


def address(device: int, use: str, nbytes: int, stream: int) -> int:
    """Where the workspace of a stream lies; 0 of no bytes."""
    return workspace(device, stream, use, nbytes).pointer if nbytes else 0


def _new(nbytes: int) -> Workspace:
    """Zero before any kernel starts, whatever the caller's stream does, being captured included."""
    import cupy

    with relaxed_capture(), cupy.cuda.Stream(non_blocking=True) as own:
        memory = cupy.zeros(nbytes, "uint8")
        own.synchronize()
    return Workspace(memory.data.ptr, threading.Lock(), memory)


@contextmanager
def relaxed_capture() -> Iterator[None]:
    """Allocations are allowed in this thread, also where it captures a stream in CUDA's strict mode, as torch does."""
    mode = ctypes.c_int(RELAXED)
    exchange = driver().cuThreadExchangeStreamCaptureMode
    check(exchange(ctypes.byref(mode)), "the capture mode of the thread cannot be set")
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))
