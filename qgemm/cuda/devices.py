"""GPUs by the CUDA driver alone: the current device, its facts, streams, memory, and kernels as functions.

CuPy and torch work in the primary context of a device, and so does this module: it shares their memory, their streams
and the current device of a thread with them, and needs neither of them.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple
from weakref import finalize

import numpy as np

LIBRARY = "libcuda.so.1"
OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
MULTIPROCESSORS, MAJOR, MINOR = 16, 75, 76  # CU_DEVICE_ATTRIBUTE_...
NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
DISABLE_TIMING = 2  # CU_EVENT_DISABLE_TIMING
LONGEST_NAME = 256  # bytes


@cache
def driver() -> Any:
    """The CUDA driver."""
    return ctypes.CDLL(LIBRARY)


def check(status: int, problem: str) -> None:
    """RuntimeError unless a call of the driver went well."""
    if status:
        raise RuntimeError(f"{problem}: CUDA driver error {status}")


def driver_cuda() -> tuple[int, int] | None:
    """The newest CUDA that the NVIDIA driver runs, as (major, minor); None without a driver."""
    version = ctypes.c_int()
    try:
        if driver().cuDriverGetVersion(ctypes.byref(version)):
            return None
    except OSError:
        return None
    return version.value // 1000, version.value % 1000 // 10


# ---------------------------------------------------------------- devices


class Facts(NamedTuple):
    """A device: its name, compute capability and number of multiprocessors."""

    name: str
    capability: tuple[int, int]
    sms: int


@cache
def facts(device: int) -> Facts:
    """The facts of a device."""
    handle, name, value = _handle(device), ctypes.create_string_buffer(LONGEST_NAME), ctypes.c_int()
    check(driver().cuDeviceGetName(name, LONGEST_NAME, handle), f"cuda:{device} has no name")

    def attribute(number: int) -> int:
        check(driver().cuDeviceGetAttribute(ctypes.byref(value), number, handle), f"cuda:{device} has no attributes")
        return value.value

    return Facts(name.value.decode(), (attribute(MAJOR), attribute(MINOR)), attribute(MULTIPROCESSORS))


def _handle(device: int) -> ctypes.c_int:
    handle = ctypes.c_int()
    check(driver().cuInit(0), "CUDA cannot be initialised")
    check(driver().cuDeviceGet(ctypes.byref(handle), device), f"there is no cuda:{device}")
    return handle


@cache
def _context(device: int) -> ctypes.c_void_p:
    """The primary context of a device, kept for the life of the process."""
    context = ctypes.c_void_p()
    check(driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), _handle(device)), f"cuda:{device} has no context")
    return context


def make_current(device: int) -> None:
    """Make the context of a device current in this thread, which the runtime does by itself, the driver not."""
    if _current() != device:
        check(driver().cuCtxSetCurrent(_context(device)), f"cuda:{device} cannot be made current")


def current_device() -> int:
    """The current device of this thread; 0, as in CUDA's runtime, where the thread has none yet."""
    return _current() or 0


def _current() -> int | None:
    device = ctypes.c_int()
    return None if driver().cuCtxGetDevice(ctypes.byref(device)) else device.value


# ---------------------------------------------------------------- streams, events, memory


@contextmanager
def new_stream() -> Iterator[int]:
    """The raw handle of a stream of its own, which waits for no other."""
    handle = ctypes.c_void_p()
    check(driver().cuStreamCreate(ctypes.byref(handle), NON_BLOCKING), "a stream cannot be created")
    try:
        assert handle.value is not None
        yield handle.value
    finally:
        driver().cuStreamDestroy_v2(handle)


def synchronize(stream: int) -> None:
    """Wait until all work of a stream is done."""
    check(driver().cuStreamSynchronize(ctypes.c_void_p(stream)), "the work of a stream failed")


def is_capturing(stream: int) -> bool:
    """Whether a graph captures the work of a stream."""
    status = ctypes.c_int()
    check(driver().cuStreamIsCapturing(ctypes.c_void_p(stream), ctypes.byref(status)), "a stream cannot be asked")
    return status.value != 0


class Event:
    """The point that a stream had reached when `record` was last called."""

    def __init__(self) -> None:
        self._handle = ctypes.c_void_p()
        check(driver().cuEventCreate(ctypes.byref(self._handle), DISABLE_TIMING), "an event cannot be created")
        finalize(self, driver().cuEventDestroy_v2, self._handle).atexit = False

    def record(self, stream: int) -> None:
        """Move the event to the end of the stream's work."""
        check(driver().cuEventRecord(self._handle, ctypes.c_void_p(stream)), "an event cannot be recorded")

    def synchronize(self) -> None:
        """Wait for the work before the event."""
        check(driver().cuEventSynchronize(self._handle), "the work before an event failed")


def allocate(nbytes: int) -> int:
    """The address of new memory of the current device that no library manages and that is never freed."""
    pointer, size = ctypes.c_uint64(), ctypes.c_size_t(max(1, nbytes))
    status = driver().cuMemAlloc_v2(ctypes.byref(pointer), size)
    if status == OUT_OF_MEMORY:  # libraries keep memory that they do not use
        cupy, torch = sys.modules.get("cupy"), sys.modules.get("torch")
        if cupy is not None:
            cupy.get_default_memory_pool().free_all_blocks()
        if torch is not None:
            torch.cuda.empty_cache()
        status = driver().cuMemAlloc_v2(ctypes.byref(pointer), size)
    check(status, f"{nbytes} bytes cannot be allocated")
    return pointer.value


def fill_zeros(pointer: int, nbytes: int, stream: int) -> None:
    """Zero memory, on a stream."""
    arguments = ctypes.c_uint64(pointer), ctypes.c_ubyte(0), ctypes.c_size_t(nbytes), ctypes.c_void_p(stream)
    check(driver().cuMemsetD8Async(*arguments), "memory cannot be zeroed")


def copy_to_device(pointer: int, host: int, nbytes: int, stream: int) -> None:
    """Begin to copy memory of the host, by its address, to the device; pageable memory may change once this returns."""
    arguments = ctypes.c_uint64(pointer), ctypes.c_void_p(host), ctypes.c_size_t(nbytes), ctypes.c_void_p(stream)
    check(driver().cuMemcpyHtoDAsync_v2(*arguments), "memory cannot be copied to the device")


def copy_to_host(host: int, pointer: int, nbytes: int, stream: int) -> None:
    """Copy memory of the device to the host once the work of a stream is done, and wait for it."""
    arguments = ctypes.c_void_p(host), ctypes.c_uint64(pointer), ctypes.c_size_t(nbytes), ctypes.c_void_p(stream)
    check(driver().cuMemcpyDtoHAsync_v2(*arguments), "memory cannot be copied to the host")
    synchronize(stream)


# ---------------------------------------------------------------- kernels


class Function:
    """A kernel that is loaded on a device. ptr: the driver's handle."""

    def __init__(self, cubin: bytes, name: str, device: int) -> None:
        """Load machine code on a device, which becomes the current one."""
        make_current(device)
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        check(driver().cuModuleLoadData(ctypes.byref(module), cubin), f"{name} cannot be loaded on cuda:{device}")
        check(driver().cuModuleGetFunction(ctypes.byref(function), module, name.encode()), f"there is no {name}")
        self.ptr, self.device = function.value, device

    def __call__(self, grid: tuple[int, ...], block: tuple[int], arguments: Sequence[Any], stream: int = 0) -> None:
        """Launch on a raw stream handle. arguments: addresses, arrays of a CUDA library and scalars of NumPy."""
        values = [_argument(value) for value in arguments]
        table = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        x, y = (*grid, 1)[:2]
        sizes = (ctypes.c_uint(size) for size in (x, y, 1, *block, 1, 1, 0))
        status = driver().cuLaunchKernel(ctypes.c_void_p(self.ptr), *sizes, ctypes.c_void_p(stream), table, None)
        check(status, "the launch failed")


def _argument(value: Any) -> Any:
    """An argument of a kernel as ctypes."""
    if isinstance(value, np.generic):
        return (ctypes.c_char * value.itemsize).from_buffer_copy(value.tobytes())
    return ctypes.c_void_p(value if isinstance(value, int) else value.__cuda_array_interface__["data"][0])
