"""Launching kernels through the driver's cuLaunchKernelEx, for what CuPy's launch lacks.

That is clusters, and programmatic dependent launch: a kernel launched so may start while the one before it in the
stream still runs; it prefetches what never changes and waits (griddepcontrol.wait) before it touches what the other
writes. Works inside stream capture.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Sequence
from functools import cache
from typing import Any

CLUSTER_DIMENSION, PROGRAMMATIC_STREAM_SERIALIZATION = 4, 6  # CU_LAUNCH_ATTRIBUTE_...
MAX_DYNAMIC_SHARED_SIZE_BYTES = 8  # CU_FUNC_ATTRIBUTE_...
INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT: of a thread in which nothing has called CUDA's runtime yet
PROGRAMMATIC = 90  # the first compute capability that launches so


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: an id, padding to 8 bytes, a value of 64."""

    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int * 16)]


def _attribute(of: int, *value: int) -> _Attribute:
    return _Attribute(of, 0, (ctypes.c_int * 16)(*value))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    ]


@cache
def driver() -> Any:
    """The CUDA driver."""
    return ctypes.CDLL("libcuda.so.1")


def _compute_capability() -> int:
    import cupy

    return int(cupy.cuda.Device().compute_capability)


def _make_context_current() -> None:
    """Make the primary context of the thread's device current, which the runtime does by itself, the driver not."""
    from cupy.cuda import runtime

    runtime.setDevice(runtime.getDevice())


def check(status: int, problem: str) -> None:
    """RuntimeError unless a call of the driver went well."""
    if status:
        raise RuntimeError(f"{problem}: CUDA driver error {status}")


class Launch:
    """One kernel with its grid, block, dynamic shared memory and the arguments that never change.

    Everything is laid out once; a call writes its pointers and its stream into place and enters the driver: 3 us.
    """

    def __init__(
        self,
        function: Any,
        grid: int | tuple[int, int],
        block: int,
        shared: int,
        arguments: Sequence[Any],
        pointers: Any,
        count: int,
        cluster: int = 0,
        programmatic: bool = True,
    ) -> None:
        """Prepare a CuPy function and its arguments, ctypes all; `pointers` begins with the `count` that a call fills.

        cluster: CTAs that make one (compute capability 9.0), or 0. programmatic: whether the kernel waits for the one
        before it by itself (griddepcontrol.wait) and so may start while that one runs.
        """
        check(
            driver().cuFuncSetAttribute(ctypes.c_void_p(function.ptr), MAX_DYNAMIC_SHARED_SIZE_BYTES, shared),
            f"{shared} bytes of shared memory cannot be had",
        )
        across = grid if isinstance(grid, tuple) else (grid, 1)
        wanted = [_attribute(CLUSTER_DIMENSION, cluster, 1, 1)] if cluster else []
        early = programmatic and _compute_capability() >= PROGRAMMATIC
        wanted += [_attribute(PROGRAMMATIC_STREAM_SERIALIZATION, 1)] * early
        attributes = (_Attribute * len(wanted))(*wanted)
        self._config = _Config(*across, 1, block, 1, 1, shared, None, attributes, len(wanted))
        self._pointers, self._fill = pointers, struct.Struct(f"{count}P").pack_into
        addresses = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        self._keep = function, arguments, attributes
        self._stream = 0  # in the config
        self._arguments = ctypes.byref(self._config), ctypes.c_void_p(function.ptr), addresses, None
        self._enter = driver().cuLaunchKernelEx
        self._lock = threading.Lock()  # the arguments are shared, and ctypes lets other threads in

    def __call__(self, stream: int, *pointers: int) -> None:
        """Launch on a raw stream handle."""
        with self._lock:
            if stream != self._stream:
                self._config.stream = self._stream = stream
            self._fill(self._pointers, 0, *pointers)
            status = self._enter(*self._arguments)
            if status == INVALID_CONTEXT:
                _make_context_current()
                status = self._enter(*self._arguments)
        if status:
            check(status, "the launch failed")
