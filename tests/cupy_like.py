"""The part of CuPy that calls of products meet, over NumPy: arrays that say that they lie on a GPU, and know where.

With it tests/test_plans.py runs whole calls without a GPU, on kernels that it computes itself.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any

import driver_like
import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

NAN_BYTE = 0xFF  # fills memory that nothing was written to: NaN in every type of floats
PROPERTIES = ("shape", "dtype", "ndim", "size", "nbytes", "itemsize", "strides", "flags")
METHODS = ("astype", "reshape", "view", "ravel", "transpose", "swapaxes", "any", "all", "sum", "max", "min", "mean")


class Memory:
    """cupy.cuda.MemoryPointer: an address on a device."""

    def __init__(self, pointer: int, device: int) -> None:
        self.ptr, self.device_id, self.device = pointer, device, Device(device)


class ndarray(NDArrayOperatorsMixin):
    """An array on the device with this number. Like CuPy's, it is no NumPy array, and NumPy does not convert it.

    tests/cupy_refusals.py has the list of refusals, which tests/gpu/test_cupy_like.py compares with CuPy.
    """

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, shape: Any, dtype: Any = float) -> None:
        self._host = np.empty(shape, dtype)
        if self._host.size:
            self._host.reshape(-1).view(np.uint8)[...] = NAN_BYTE
        self.number = Device.current

    def _like(self, host: Any) -> ndarray:
        """An array over memory of the host, on the same device."""
        array = object.__new__(ndarray)
        array._host, array.number = np.asanyarray(host), self.number
        return array

    def __getattr__(self, name: str) -> Any:
        """A property of the memory, or a method that returns a view or a new array on the device."""
        if name in PROPERTIES:
            return getattr(self._host, name)
        if name not in METHODS:
            raise AttributeError(f"'cupy.ndarray' object has no attribute {name!r}")
        method = getattr(self._host, name)
        return lambda *args, **kwargs: self._like(method(*map(on_host, args), **kwargs))

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {**self._host.__array_interface__, "version": 3}

    @property
    def data(self) -> Memory:
        return Memory(self._host.__array_interface__["data"][0], self.number)

    @property
    def device(self) -> Device:
        return Device(self.number)

    @property
    def T(self) -> ndarray:
        return self._like(self._host.T)

    def get(self) -> np.ndarray:
        return self._host.copy()

    def copy(self, order: str = "C") -> ndarray:
        return self._like(self._host.copy())

    def fill(self, value: Any) -> None:
        self._host.fill(on_host(value))

    def item(self, *index: int) -> Any:
        return self._host.item(*index)

    def tolist(self) -> Any:
        return self._host.tolist()

    def __getitem__(self, key: Any) -> ndarray:
        return self._like(self._host[on_host(key, index=True)])

    def __setitem__(self, key: Any, value: Any) -> None:
        if isinstance(value, np.ndarray) and value.ndim:
            raise ValueError("non-scalar numpy.ndarray cannot be used for fill")
        self._host[on_host(key, index=True)] = on_host(value)

    def __len__(self) -> int:
        return len(self._host)

    def __iter__(self) -> Iterator[ndarray]:
        return iter([self._like(row) for row in self._host])

    def __bool__(self) -> bool:
        return bool(self._host)

    def __int__(self) -> int:
        return int(self._host)

    def __index__(self) -> int:
        return self._host.__index__()

    def __float__(self) -> float:
        return float(self._host)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self.number

    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray:
        raise TypeError("Implicit conversion to a NumPy array is not allowed. Please use `.get()` to construct one.")

    def __array_ufunc__(self, function: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> ndarray:
        outs = kwargs.pop("out", ())
        if not all(isinstance(out, ndarray) for out in outs):
            raise TypeError("Unsupported type of out")
        if outs:
            kwargs["out"] = tuple(out._host for out in outs)
        result = self._like(getattr(function, method)(*map(on_host, inputs), **kwargs))
        return outs[0] if outs else result

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        raise TypeError(f"{function} of NumPy is not for arrays on a GPU")


def on_host(value: Any, index: bool = False) -> Any:
    """The memory of an array, and scalars as they are; an index may also have NumPy arrays in it."""
    if isinstance(value, ndarray):
        return value._host
    if isinstance(value, tuple) and index:
        return tuple(on_host(part, index) for part in value)
    if isinstance(value, np.ndarray) and value.ndim and not index:
        raise TypeError(f"Unsupported type {type(value)}")
    return value


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


class Driver(driver_like.Driver):
    """A driver that shares the current device with CuPy."""

    @property
    def current(self) -> int:
        return Device.current

    @current.setter
    def current(self, number: int) -> None:
        Device.current = number


def asarray(values: Any, dtype: Any = None) -> ndarray:
    """A copy on the current device."""
    host = np.asarray(values.get() if isinstance(values, ndarray) else values, dtype)
    array = ndarray(host.shape, host.dtype)
    array._host[...] = host
    return array


def zeros(shape: Any, dtype: Any = float) -> ndarray:
    """Zeros on the current device."""
    return asarray(np.zeros(shape, dtype))


def ascontiguousarray(x: ndarray) -> ndarray:
    """x, or a copy in C order."""
    return x if x.flags.c_contiguous else x.copy()


def may_share_memory(first: ndarray, second: ndarray) -> bool:
    """Whether the bounds of two arrays overlap."""
    return np.may_share_memory(first._host, second._host)


def install(monkeypatch: Any) -> ModuleType:
    """Put a module in CuPy's place and a driver in CUDA's, for a test -> the module."""
    cupy, driver = ModuleType("cupy"), driver_like.install(monkeypatch, Driver())
    stream = SimpleNamespace(ptr=7)
    cuda = SimpleNamespace(
        Device=Device,
        alloc_pinned_memory=bytearray,
        driver=driver,
        get_current_stream=lambda: stream,
        runtime=SimpleNamespace(getDevice=lambda: Device.current, getDeviceCount=lambda: 2),
    )
    vars(cupy).update(
        ndarray=ndarray, empty=ndarray, zeros=zeros, asarray=asarray, ascontiguousarray=ascontiguousarray,
        may_share_memory=may_share_memory, exp=np.exp, cuda=cuda,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    return cupy
