"""The CUDA driver over memory of the host: contexts, copies and streams whose work is done when a call returns."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

STREAM = 70  # the handle of the first new stream
CAPABILITY, SMS = (9, 0), 132
ATTRIBUTES = {16: SMS, 75: CAPABILITY[0], 76: CAPABILITY[1]}


class Driver:
    """Stands for libcuda.so.1; every call succeeds.

    current: the device of the only thread, None for none. calls: their names, in order.
    """

    def __init__(self) -> None:
        self.current: int | None = 0
        self.calls: list[str] = []
        self.memory: list[np.ndarray] = []
        self.loaded: list[tuple[int, bytes, bytes]] = []  # device, cubin, name

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)
        self.calls.append(name)
        return lambda *arguments: 0

    def cuCtxGetDevice(self, device: Any) -> int:
        if self.current is None:
            return 201
        device._obj.value = self.current
        return 0

    def cuDeviceGet(self, handle: Any, number: int) -> int:
        handle._obj.value = number
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> int:
        context._obj.value = 1 + device.value
        return 0

    def cuCtxSetCurrent(self, context: Any) -> int:
        self.current = context.value - 1
        return 0

    def cuDeviceGetName(self, name: Any, size: int, device: Any) -> int:
        name.value = b"Stand-in"
        return 0

    def cuDeviceGetAttribute(self, value: Any, number: int, device: Any) -> int:
        value._obj.value = ATTRIBUTES[number]
        return 0

    def cuStreamCreate(self, stream: Any, flags: int) -> int:
        stream._obj.value = STREAM
        return 0

    def cuEventCreate(self, event: Any, flags: int) -> int:
        event._obj.value = 1
        return 0

    def cuMemAlloc_v2(self, pointer: Any, size: Any) -> int:
        self.memory.append(np.full(size.value + 256, 0xFF, np.uint8))
        pointer._obj.value = self.memory[-1].ctypes.data + -self.memory[-1].ctypes.data % 256
        return 0

    def cuMemsetD8Async(self, pointer: Any, value: Any, size: Any, stream: Any) -> int:
        ctypes.memset(pointer.value, value.value, size.value)
        return 0

    def cuMemcpyHtoDAsync_v2(self, pointer: Any, host: Any, size: Any, stream: Any) -> int:
        ctypes.memmove(pointer.value, host.value, size.value)
        return 0

    def cuMemcpyDtoHAsync_v2(self, host: Any, pointer: Any, size: Any, stream: Any) -> int:
        ctypes.memmove(host.value, pointer.value, size.value)
        return 0

    def cuModuleLoadData(self, module: Any, cubin: bytes) -> int:
        self.loaded.append((self.current, cubin, b""))
        module._obj.value = len(self.loaded)
        return 0

    def cuModuleGetFunction(self, function: Any, module: Any, name: bytes) -> int:
        device, cubin, _ = self.loaded[module.value - 1]
        self.loaded[module.value - 1] = device, cubin, name
        function._obj.value = 100 + module.value
        return 0


def install(monkeypatch: Any, driver: Driver | None = None) -> Driver:
    """Put a driver in place of CUDA's in all modules of qgemm, for a test -> the driver."""
    from qgemm.cuda import devices
    from qgemm.cuda.driver import graph, launch, workspace

    driver = Driver() if driver is None else driver
    for module in (devices, graph, launch, workspace):
        monkeypatch.setattr(module, "driver", lambda: driver)
    for name in ("_context", "facts"):  # caches of an earlier test
        monkeypatch.setattr(devices, name, getattr(devices, name).__wrapped__)
    return driver
