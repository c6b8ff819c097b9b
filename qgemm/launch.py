"""Launching kernels through the driver's cuLaunchKernelEx, for what CuPy's launch lacks: programmatic dependent launch.

A kernel launched so may start while the one before it in the stream still runs; it prefetches what never changes and
waits (griddepcontrol.wait) before it touches what the other writes. Works inside stream capture.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_...
MAX_DYNAMIC_SHARED_SIZE_BYTES = 8  # CU_FUNC_ATTRIBUTE_...


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: an id, padding to 8 bytes, a value of 64."""

    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int * 16)]


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    ]


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _check(status: int, problem: str) -> None:
    if status:
        raise RuntimeError(f"{problem}: CUDA driver error {status}")


class Launch:
    """One kernel with its grid, block and dynamic shared memory; called with its arguments on a stream."""

    def __init__(self, function: Any, grid: int, block: int, shared: int, *kinds: Any) -> None:
        """Of a CuPy function; `kinds` are the ctypes of its arguments, c_void_p for pointers."""
        self.function = ctypes.c_void_p(function.ptr)
        self.keep = function
        status = _driver().cuFuncSetAttribute(self.function, MAX_DYNAMIC_SHARED_SIZE_BYTES, shared)
        _check(status, f"{shared} bytes of shared memory cannot be had")
        self.attribute = _Attribute(PROGRAMMATIC_STREAM_SERIALIZATION, 0, (ctypes.c_int * 16)(1))
        self.config = (grid, 1, 1, block, 1, 1, shared)
        self.kinds = kinds

    def __call__(self, stream: int, *arguments: int) -> None:
        """Launch on a raw stream handle."""
        config = _Config(*self.config, stream, ctypes.pointer(self.attribute), 1)
        values = [kind(value) for kind, value in zip(self.kinds, arguments, strict=True)]
        addresses = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        status = _driver().cuLaunchKernelEx(ctypes.byref(config), self.function, addresses, None)
        _check(status, "the launch failed")
