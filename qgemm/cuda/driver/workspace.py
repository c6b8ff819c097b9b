"""Workspaces: memory that the kernels of a stream share from call to call, split-K partials or quantized activations.

A workspace is never freed, so that a captured graph may be replayed once the other work of its stream is done.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from qgemm.cuda.devices import allocate, check, driver, fill_zeros, make_current, new_stream, synchronize
from qgemm.locks import new_lock

RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED: this thread may allocate while a stream is captured


class Workspace(NamedTuple):
    """Bytes on a device, zero at first.

    lock: a call holds it from the launch that writes here until the launch that reads is enqueued; threads that share
    a stream would mix their calls otherwise.
    """

    pointer: int
    lock: threading.Lock


_workspaces: dict[tuple[int, int, str, int], Workspace] = {}
_allocating = new_lock()


def workspace(device: int, stream: int, use: str, nbytes: int) -> Workspace:
    """The workspace of a stream, a raw handle, of this use and size, on the current device."""
    key = device, stream, use, nbytes
    space = _workspaces.get(key)
    if space is None:
        with _allocating:
            space = _workspaces.get(key) or _workspaces.setdefault(key, _new(device, nbytes))
    return space


def address(device: int, use: str, nbytes: int, stream: int) -> int:
    """The address of the workspace of a stream; 0 for no bytes."""
    return workspace(device, stream, use, nbytes).pointer if nbytes else 0


def _new(device: int, nbytes: int) -> Workspace:
    """Zero before any kernel starts, whatever the caller's stream does, being captured included."""
    make_current(device)  # this may be the thread's first call of CUDA
    with relaxed_capture(), new_stream() as own:
        pointer = allocate(nbytes)
        fill_zeros(pointer, nbytes, own)
        synchronize(own)
    return Workspace(pointer, new_lock())


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
