"""Launching kernels through the driver's cuLaunchKernelEx, for what CuPy's launch lacks.

That is clusters, and programmatic dependent launch: a kernel launched so may start while the one before it in the
stream still runs; it prefetches what never changes and waits (griddepcontrol.wait) before it touches what the other
writes. Works inside stream capture.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
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


SIZE, STREAM = ctypes.sizeof(_Config), _Config.stream.offset


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

    Everything is laid out once; a call writes its stream and pointers into place and enters the driver: 3 us.
    enter: a call, with a raw stream handle and the pointers. A function is called faster than an object.
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

        Arguments may lie inside of `pointers`, which is copied now. cluster: CTAs that make one (compute capability
        9.0), or 0. programmatic: whether the kernel waits for the one before it by itself (griddepcontrol.wait) and so
        may start while that one runs.
        """
        _make_context_current()  # a thread may need a launch more before it has launched anything
        check(
            driver().cuFuncSetAttribute(ctypes.c_void_p(function.ptr), MAX_DYNAMIC_SHARED_SIZE_BYTES, shared),
            f"{shared} bytes of shared memory cannot be had",
        )
        across = grid if isinstance(grid, tuple) else (grid, 1)
        wanted = [_attribute(CLUSTER_DIMENSION, cluster, 1, 1)] if cluster else []
        early = programmatic and _compute_capability() >= PROGRAMMATIC
        wanted += [_attribute(PROGRAMMATIC_STREAM_SERIALIZATION, 1)] * early
        attributes = (_Attribute * len(wanted))(*wanted)
        config = _Config(*across, 1, block, 1, 1, shared, None, attributes, len(wanted))
        self._keep = function, arguments, attributes
        handle = ctypes.c_void_p.from_param(function.ptr)  # converted once, not at each call

        def room() -> tuple[Any, Any]:
            """Memory that one call at a time writes: a copy of config and pointers, in one piece; what it enters."""
            made = (ctypes.c_char * (SIZE + ctypes.sizeof(pointers))).from_buffer_copy(bytes(config) + bytes(pointers))
            first, start = ctypes.addressof(pointers), ctypes.addressof(made) + SIZE
            inside = range(first, first + ctypes.sizeof(pointers))
            found = [at - first + start if at in inside else at for at in map(ctypes.addressof, arguments)]
            return made, (ctypes.byref(made), handle, ctypes.byref((ctypes.c_void_p * len(found))(*found)), None)

        self.enter = _entering(room, struct.Struct(f"PPQ{count}P").pack_into, ctypes.addressof(attributes), len(wanted))

    def __call__(self, stream: int, *pointers: int) -> None:
        """Launch on a raw stream handle."""
        self.enter(stream, *pointers)


def _entering(room: Callable[[], Any], fill: Callable[..., None], attributes: int, count: int) -> Callable[..., None]:
    """What writes the end of a config, from its stream on, and the pointers behind it, and enters the driver.

    A room that no call has is taken from a list, and put back: threads never share one, and none waits for another.
    """
    launch, rooms = driver().cuLaunchKernelEx, [room()]
    take, put = rooms.pop, rooms.append

    def enter(stream: int, *pointers: int) -> None:
        try:
            memory, arguments = mine = take()
        except IndexError:
            memory, arguments = mine = room()
        fill(*((memory, STREAM, stream, attributes, count) + pointers))  # noqa: RUF005  faster than to unpack them
        status = launch(*arguments)
        if status:
            if status == INVALID_CONTEXT:
                _make_context_current()
                status = launch(*arguments)
            check(status, "the launch failed")
        put(mine)

    return enter
