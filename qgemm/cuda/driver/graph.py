"""The launches of a call as a CUDA graph of its own, which the host enters once, whatever their number.

Launches keep their order and their overlap: capture makes programmatic dependent launches edges of the graph.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from .launch import check, driver
from .workspace import relaxed_capture

CAPTURED = 1  # status while the stream is being captured: CUDA_ERROR_INVALID_VALUE, which no graph here returns


def graph_of(launches: Sequence[tuple[Any, tuple[int, ...]]]) -> Callable[[], int]:
    """A call that enqueues launches, all on one stream, and returns the driver's status.

    launches: with their streams and pointers. Nothing is enqueued while the stream is being captured: the graph of that
    capture gets the launches themselves.
    """
    import cupy

    with relaxed_capture(), cupy.cuda.Stream(non_blocking=True) as own:
        own.begin_capture()
        try:
            for launch, args in launches:
                check(launch.bound(*args, into=own.ptr)(), "the launch cannot be captured")
        finally:
            graph = own.end_capture()
    stream, captured = launches[0][1][0], ctypes.c_int()
    is_captured = partial(driver().cuStreamIsCapturing, ctypes.c_void_p.from_param(stream), ctypes.byref(captured))
    handles = map(ctypes.c_void_p.from_param, (graph.graphExec, stream))
    launch_graph = partial(driver().cuGraphLaunch, *handles)
    vars(launch_graph)["graph"] = graph  # which owns it

    def enter() -> int:
        if is_captured() or captured.value:
            return CAPTURED
        status: int = launch_graph()
        return status

    return enter
