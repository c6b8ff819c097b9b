"""Launching kernels through the driver's cuLaunchKernelEx, for what CuPy's launch lacks, and tensor maps of x.

That is clusters, and programmatic dependent launch: a kernel launched so may start while the one before it in the
stream still runs; it prefetches what never changes and waits (griddepcontrol.wait) before it touches what the other
writes. Works inside stream capture.

A tensor map says how the tensor memory accelerator of sm_90 finds a box of x; the driver encodes it.
"""

from __future__ import annotations

import ctypes
import struct
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, lru_cache, partial
from typing import Any

from qgemm.cuda.jit import twins
from qgemm.cuda.problem import EIGHT_BITS

CLUSTER_DIMENSION, PROGRAMMATIC_STREAM_SERIALIZATION = 4, 6  # CU_LAUNCH_ATTRIBUTE_...
MAX_DYNAMIC_SHARED_SIZE_BYTES = 8  # CU_FUNC_ATTRIBUTE_...
INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT: of a thread in which nothing has called CUDA's runtime yet
PROGRAMMATIC = 90  # the first compute capability that launches so
MAP_TYPES = {"half": 6, "bf16": 9, EIGHT_BITS: 0}  # CU_TENSOR_MAP_DATA_TYPE_...; of bytes without a sign
NO_INTERLEAVE, SWIZZLE_128B, PROMOTE_256B, FILL_ZEROS = 0, 3, 3, 0
MAP_ITEMSIZE = {"half": 2, "bf16": 2, EIGHT_BITS: 1}
BOX_BYTES = 128  # of a row: what the swizzle permutes
MAX_MAPS = 16  # tensor maps of a launch: x mostly lies where it lay before


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

        self._room = room
        self._fill = struct.Struct(f"PPQ{count}P").pack_into, ctypes.addressof(attributes), len(wanted)
        self.enter = _entering(room, struct.Struct(f"PPQ{count}P").pack_into, ctypes.addressof(attributes), len(wanted))

    def bound(self, stream: int, *pointers: int, into: int | None = None) -> Callable[[], int]:
        """A call that launches with this stream and these pointers, without writing them again: the driver's status.

        into: the stream that is launched on, where it is another one: that of a capture (graph.py).
        """
        memory, arguments = self._room()
        fill, attributes, count = self._fill
        fill(memory, STREAM, stream if into is None else into, attributes, count, *pointers)
        found = partial(driver().cuLaunchKernelEx, *arguments)
        vars(found)["launch"] = self  # which keeps the arguments that lie elsewhere
        return found

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


class TensorMap(twins.TensorMap):
    """A CUtensorMap that the driver encodes."""

    @classmethod
    def aligned(cls) -> TensorMap:
        """A new one at an aligned address."""
        room = ctypes.create_string_buffer(ctypes.sizeof(cls) + cls.ALIGNMENT)
        found = cls.from_buffer(room, -ctypes.addressof(room) % cls.ALIGNMENT)
        return found

    def encode(self, pointer: int, kind: str, rows: int, columns: int, box_rows: int) -> None:
        """Encode a row-major matrix of numbers at a multiple of 16; boxes of 128 bytes a row, swizzled for wgmma."""
        of_shape = _of_shape(MAP_ITEMSIZE[kind], rows, columns, box_rows)
        status = driver().cuTensorMapEncodeTiled(
            ctypes.byref(self), MAP_TYPES[kind], 2, ctypes.c_void_p(pointer), *of_shape
        )
        check(status, f"no tensor map for x [{rows}, {columns}] of {kind} at {pointer:#x}")


@lru_cache
def _of_shape(itemsize: int, rows: int, columns: int, box_rows: int) -> tuple[Any, ...]:
    """The arguments of the encoder behind the pointer: sizes, strides, box and modes."""
    sizes, strides = (ctypes.c_uint64 * 2)(columns, rows), (ctypes.c_uint64 * 1)(columns * itemsize)
    box, steps = (ctypes.c_uint32 * 2)(BOX_BYTES // itemsize, box_rows), (ctypes.c_uint32 * 2)(1, 1)
    return sizes, strides, box, steps, NO_INTERLEAVE, SWIZZLE_128B, PROMOTE_256B, FILL_ZEROS


def by_tensor_map(
    box: Any, partials: Callable[[int], int], function: Any, arguments: Sequence[Any], *of_launch: Any
) -> Callable[..., None]:
    """A call of a kernel whose first argument is the tensor map of x, with a raw stream handle, x, w and more pointers.

    box: of the map, behind the pointer. partials: stream -> the address of its workspace. function, arguments (behind
    the map), of_launch (grid, block, shared, pointers, count, cluster): of Launch, whose pointers are the workspace, w
    and those behind w.

    A launch is taken by the x that its map was encoded for, and put back: threads never share one.
    """
    grid, block, shared, *filled = of_launch
    launches = OrderedDict[int, tuple[TensorMap, Callable[..., None]]]()  # by x
    partials_of: dict[int, int] = {}  # by stream

    def encoded(x: int) -> tuple[TensorMap, Callable[..., None]]:
        tensor_map = None
        if len(launches) >= MAX_MAPS:
            with suppress(KeyError):  # other threads have taken all
                _, (tensor_map, launch) = launches.popitem(last=False)
        if tensor_map is None:
            tensor_map = TensorMap.aligned()
            launch = Launch(function, grid, block, shared, (tensor_map, *arguments), *filled).enter
        tensor_map.encode(x, *box)
        return tensor_map, launch

    def enter(stream: int, x: int, w: int, *others: int) -> None:
        room = partials_of.get(stream)
        if room is None:
            room = partials_of[stream] = partials(stream)
        mine = launches.pop(x, None) or encoded(x)
        mine[1](stream, room, w, *others)
        launches[x] = mine

    return enter
