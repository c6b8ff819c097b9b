"""The part of CuPy that calls of products meet, over NumPy: arrays that say that they lie on a GPU, and know where.

With it tests/test_plans.py runs whole calls without a GPU, on kernels that it computes itself.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np

NAN_BYTE = 0xFF  # fills memory that nothing was written to: NaN in every type of floats


class Memory:
    """cupy.cuda.MemoryPointer: an address on a device."""

    def __init__(self, pointer: int, device: int) -> None:
        self.ptr, self.device_id, self.device = pointer, device, Device(device)


class ndarray(np.ndarray):
    """An array on the device with this number, which views share."""

    number = 0

    def __new__(cls, shape: Any, dtype: Any = float) -> ndarray:
        array = np.empty(shape, dtype).view(cls)
        if array.size:
            array.reshape(-1).view(np.uint8)[...] = NAN_BYTE
        array.number = Device.current
        return array

    def __array_finalize__(self, other: Any) -> None:
        self.number = getattr(other, "number", 0)

    @property
    def data(self) -> Memory:
        return Memory(self.__array_interface__["data"][0], self.number)

    @property
    def device(self) -> Device:
        return Device(self.number)

    def get(self) -> np.ndarray:
        return np.array(self.view(np.ndarray))

    def copy(self, order: str = "C") -> ndarray:
        array = ndarray(self.shape, self.dtype)
        array[...] = self
        return array

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self.number


class Device:
    """cupy.cuda.Device, current inside `with`."""

    current = 0
    compute_capability = "90"
    attributes = MappingProxyType({"MultiProcessorCount": 132})

    def __init__(self, number: int = 0) -> None:
        self.id = number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device) and other.id == self.id

    def __hash__(self) -> int:
        return self.id

    def __enter__(self) -> Device:
        self.before, Device.current = Device.current, self.id
        return self

    def __exit__(self, *_: object) -> None:
        Device.current = self.before


def asarray(values: Any, dtype: Any = None) -> ndarray:
    """A copy on the current device."""
    host = np.asarray(values, dtype)
    array = ndarray(host.shape, host.dtype)
    array[...] = host
    return array


def zeros(shape: Any, dtype: Any = float) -> ndarray:
    """Zeros on the current device."""
    return asarray(np.zeros(shape, dtype))


def ascontiguousarray(x: ndarray) -> ndarray:
    """x, or a copy in C order."""
    return x if x.flags.c_contiguous else x.copy()


def install(monkeypatch: Any) -> ModuleType:
    """Put a module in CuPy's place, for a test -> the module."""
    cupy = ModuleType("cupy")
    stream = SimpleNamespace(ptr=7)

    @contextmanager
    def own_stream(non_blocking: bool):
        yield SimpleNamespace(synchronize=lambda: None)

    cuda = SimpleNamespace(
        Device=Device,
        Stream=own_stream,
        get_current_stream=lambda: stream,
        runtime=SimpleNamespace(getDevice=lambda: Device.current, getDeviceCount=lambda: 2),
    )
    vars(cupy).update(
        ndarray=ndarray, empty=ndarray, zeros=zeros, asarray=asarray, ascontiguousarray=ascontiguousarray,
        may_share_memory=np.may_share_memory, exp=np.exp, cuda=cuda,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    return cupy
