"""Launching kernels through the driver's cuLaunchKernelEx, and tensor maps of x.

It has clusters and programmatic dependent launch, by which a kernel may start while the one before it in the stream
still runs: it prefetches constant data and waits (griddepcontrol.wait) before it touches memory that the other writes.
Works inside stream capture.

A tensor map tells the tensor memory accelerator of sm_90 where a box of x lies; the driver encodes it.
"""

from __future__ import annotations

import ctypes
import struct
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any

from qgemm.cuda.devices import check, driver, facts, make_current
from qgemm.cuda.jit import twins
from qgemm.cuda.layout import scaled_rows
from qgemm.cuda.problem import EIGHT_BITS, SCALED_ROWS

CLUSTER_DIMENSION, PROGRAMMATIC_STREAM_SERIALIZATION = 4, 6  # CU_LAUNCH_ATTRIBUTE_...
MAX_DYNAMIC_SHARED_SIZE_BYTES = 8  # CU_FUNC_ATTRIBUTE_...
INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT, in a thread that has not called CUDA's runtime yet
PROGRAMMATIC = 9, 0  # the first compute capability that launches so
MAP_TYPES = {"half": 6, SCALED_ROWS: 6, EIGHT_BITS: 0}  # CU_TENSOR_MAP_DATA_TYPE_...; bytes count as unsigned
NO_INTERLEAVE, SWIZZLE_128B, PROMOTE_256B, FILL_ZEROS = 0, 3, 3, 0
MAP_ITEMSIZE = {"half": 2, SCALED_ROWS: 2, EIGHT_BITS: 1}
BOX_BYTES = 128  # bytes of a row in a box, which the swizzle permutes
MAX_MAPS = 16  # tensor maps of a launch: x mostly lies at one of few addresses


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: an id, padding to 8 bytes, a value of 64."""

    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int * 16)]


def _attribute(number: int, *value: int) -> _Attribute:
    return _Attribute(number, 0, (ctypes.c_int * 16)(*value))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    ]


SIZE, STREAM = ctypes.sizeof(_Config), _Config.stream.offset


class Launch:
    """One kernel with its grid, block, dynamic shared memory and constant arguments.

    Everything is laid out once; a call writes its stream and pointers into place and enters the driver: 3 us.
    enter: launches on a raw stream handle and pointers. Python calls a function faster than an object.
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
        """Prepare a loaded function and its arguments, all ctypes; a call fills the first `count` of `pointers`.

        Arguments may lie inside of `pointers`, which is copied now. cluster: CTAs of a cluster (compute capability
        9.0), or 0. programmatic: whether the kernel waits for the one before it by itself (griddepcontrol.wait) and so
        may start while that one runs.
        """
        make_current(function.device)  # this may be the thread's first call of CUDA
        check(
            driver().cuFuncSetAttribute(ctypes.c_void_p(function.ptr), MAX_DYNAMIC_SHARED_SIZE_BYTES, shared),
            f"{shared} bytes of shared memory cannot be had",
        )
        across = grid if isinstance(grid, tuple) else (grid, 1)
        several = [_attribute(CLUSTER_DIMENSION, cluster, 1, 1)] if cluster else []
        early = programmatic and facts(function.device).capability >= PROGRAMMATIC
        several += [_attribute(PROGRAMMATIC_STREAM_SERIALIZATION, 1)] * early
        attributes = (_Attribute * len(several))(*several)
        config = _Config(*across, 1, block, 1, 1, shared, None, attributes, len(several))
        self._owned = function, arguments, attributes
        handle = ctypes.c_void_p.from_param(function.ptr)  # converted once, not at every call

        def buffer() -> Buffer:
            memory = (ctypes.c_char * (SIZE + ctypes.sizeof(pointers))).from_buffer_copy(
                bytes(config) + bytes(pointers)
            )
            first, start = ctypes.addressof(pointers), ctypes.addressof(memory) + SIZE
            inside = range(first, first + ctypes.sizeof(pointers))
            addresses = [a - first + start if a in inside else a for a in map(ctypes.addressof, arguments)]
            table = (ctypes.c_void_p * len(addresses))(*addresses)
            return memory, (ctypes.byref(memory), handle, ctypes.byref(table), None)

        self._buffer, self._fill = buffer, struct.Struct(f"PPQ{count}P").pack_into
        self._attributes = ctypes.addressof(attributes), len(several)
        self.enter = _entering(function.device, buffer, self._fill, *self._attributes)

    def bound(self, stream: int, *pointers: int, into: int | None = None) -> Callable[[], int]:
        """A call that launches with this stream and these pointers, written once, and returns the driver's status.

        into: the stream to launch on instead, that of a capture (graph.py).
        """
        memory, arguments = self._buffer()
        self._fill(memory, STREAM, stream if into is None else into, *self._attributes, *pointers)
        launch = partial(driver().cuLaunchKernelEx, *arguments)
        vars(launch)["launch"] = self  # it owns the arguments that lie elsewhere
        return launch

    def __call__(self, stream: int, *pointers: int) -> None:
        """Launch on a raw stream handle."""
        self.enter(stream, *pointers)


# Memory that one call at a time writes, a copy of config and pointers in one piece; the arguments of the driver's call.
Buffer = tuple[Any, tuple[Any, ...]]


def _entering(
    device: int, buffer: Callable[[], Buffer], fill: Callable[..., None], attributes: int, count: int
) -> Callable[..., None]:
    """A call that writes the end of a config, from its stream on, then the pointers, and enters the driver.

    It takes a free buffer from a list and puts it back: threads never share one, and none waits for another.
    """
    launch, free = driver().cuLaunchKernelEx, [buffer()]
    take, put = free.pop, free.append

    def enter(stream: int, *pointers: int) -> None:
        try:
            memory, arguments = pair = take()
        except IndexError:
            memory, arguments = pair = buffer()
        fill(*((memory, STREAM, stream, attributes, count) + pointers))  # noqa: RUF005  faster than to unpack them
        status = launch(*arguments)
        if status:
            if status == INVALID_CONTEXT:
                make_current(device)
                status = launch(*arguments)
            check(status, "the launch failed")
        put(pair)

    return enter


class TensorMap(twins.TensorMap):
    """A CUtensorMap that the driver encodes."""

    @classmethod
    def aligned(cls) -> TensorMap:
        """A new one at an aligned address."""
        memory = ctypes.create_string_buffer(ctypes.sizeof(cls) + cls.ALIGNMENT)
        return cls.from_buffer(memory, -ctypes.addressof(memory) % cls.ALIGNMENT)

    def encode(self, pointer: int, kind: str, rows: int, columns: int, box_rows: int) -> None:
        """Encode a row-major matrix of numbers at a multiple of 16; boxes of 128 bytes a row, swizzled for wgmma."""
        pitch = scaled_rows.pitch(columns) if kind == SCALED_ROWS else columns
        sizes = _map_sizes(MAP_ITEMSIZE[kind], rows, columns, pitch, box_rows)
        status = driver().cuTensorMapEncodeTiled(
            ctypes.byref(self), MAP_TYPES[kind], 2, ctypes.c_void_p(pointer), *sizes
        )
        check(status, f"no tensor map for x [{rows}, {columns}] of {kind} at {pointer:#x}")


@lru_cache
def _map_sizes(itemsize: int, rows: int, columns: int, pitch: int, box_rows: int) -> tuple[Any, ...]:
    """The arguments of the encoder after the pointer: sizes, strides, box and modes."""
    sizes, strides = (ctypes.c_uint64 * 2)(columns, rows), (ctypes.c_uint64 * 1)(pitch * itemsize)
    box, steps = (ctypes.c_uint32 * 2)(BOX_BYTES // itemsize, box_rows), (ctypes.c_uint32 * 2)(1, 1)
    return sizes, strides, box, steps, NO_INTERLEAVE, SWIZZLE_128B, PROMOTE_256B, FILL_ZEROS


def by_tensor_map(
    box: Any, partials: Callable[[int], int], function: Any, arguments: Sequence[Any], *launch_arguments: Any
) -> Callable[..., None]:
    """A call of a kernel whose first argument is the tensor map of x, on a raw stream handle, x, w and more pointers.

    box: arguments of TensorMap.encode after the pointer. partials: stream -> the address of its workspace. function,
    arguments (those after the map), launch_arguments (grid, block, shared, pointers, count, cluster): see Launch, whose
    pointers are the workspace, w and those after w.

    A call takes the launch whose map was encoded for its x, and puts it back: threads never share one.
    """
    grid, block, shared, *filled = launch_arguments
    launches = OrderedDict[int, tuple[TensorMap, Callable[..., None]]]()  # by x
    partials_of: dict[int, int] = {}  # by stream

    def encoded(x: int) -> tuple[TensorMap, Callable[..., None]]:
        tensor_map = None
        if len(launches) >= MAX_MAPS:
            with suppress(KeyError):  # other threads have them all
                _, (tensor_map, launch) = launches.popitem(last=False)
        if tensor_map is None:
            tensor_map = TensorMap.aligned()
            launch = Launch(function, grid, block, shared, (tensor_map, *arguments), *filled).enter
        tensor_map.encode(x, *box)
        return tensor_map, launch

    def enter(stream: int, x: int, w: int, *others: int) -> None:
        space = partials_of.get(stream)
        if space is None:
            space = partials_of[stream] = partials(stream)
        entry = launches.pop(x, None) or encoded(x)
        entry[1](stream, space, w, *others)
        launches[x] = entry

    return enter
