"""The launches of a call as a CUDA graph of its own, which the host enters once, whatever their number.

Launches keep their order and their overlap: capture makes programmatic dependent launches edges of the graph.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import finalize

from qgemm.cuda.devices import check, driver, new_stream

from .workspace import RELAXED, relaxed_capture

CAPTURED = 1  # status while the stream is being captured: CUDA_ERROR_INVALID_VALUE, which no graph here returns


def graph_of(launches: Sequence[tuple[Any, tuple[int, ...]]]) -> Callable[[], int]:
    """A call that enqueues launches, all on one stream, and returns the driver's status.

    launches: with their streams and pointers. Nothing is enqueued while the stream is being captured: the graph of that
    capture gets the launches themselves.
    """
    graph, executable = ctypes.c_void_p(), ctypes.c_void_p()
    with relaxed_capture(), new_stream() as own:
        check(driver().cuStreamBeginCapture_v2(ctypes.c_void_p(own), RELAXED), "a stream cannot be captured")
        try:
            for launch, args in launches:
                check(launch.bound(*args, into=own)(), "the launch cannot be captured")
        finally:
            status = driver().cuStreamEndCapture(ctypes.c_void_p(own), ctypes.byref(graph))
        check(status, "a capture cannot be ended")
        status = driver().cuGraphInstantiateWithFlags(ctypes.byref(executable), graph, ctypes.c_uint64(0))
        driver().cuGraphDestroy(graph)  # the executable graph has its own copy
        check(status, "a graph cannot be instantiated")
    stream, captured = launches[0][1][0], ctypes.c_int()
    is_captured = partial(driver().cuStreamIsCapturing, ctypes.c_void_p.from_param(stream), ctypes.byref(captured))
    handles = map(ctypes.c_void_p.from_param, (executable.value, stream))
    launch_graph = partial(driver().cuGraphLaunch, *handles)

    def enter() -> int:
        if is_captured() or captured.value:
            return CAPTURED
        status: int = launch_graph()
        return status

    finalize(enter, driver().cuGraphExecDestroy, executable).atexit = False
    return enter
