"""The state of CUDA: driver, CuPy and NVRTC, and the facts of a device."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from qgemm.backend import Status
from qgemm.cuda.jit import nvrtc
from qgemm.errors import UnsupportedError
from qgemm.version import pip_install

DRIVER = "libcuda.so.1"
NO_DRIVER = f"no NVIDIA driver was found ({DRIVER})"
OLDEST_CUDA = 12  # the oldest version with an extra of this package


@cache
def require(who: str) -> None:
    """UnsupportedError unless there are CuPy and a GPU: it names the missing part, the way to get it, and `who`."""
    state = status()
    if not state.facts:  # without NVRTC cached kernels still run
        raise UnsupportedError(f"{who} needs a GPU and CuPy: {state.detail}")


def status() -> Status:
    """The state of the CUDA backend; looks for a GPU when called."""
    newest = driver_cuda()
    try:
        import cupy
    except ImportError:
        return Status(False, without_cupy(newest), {})
    try:
        count = cupy.cuda.runtime.getDeviceCount()
        properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())
        driver = cupy.cuda.runtime.driverGetVersion()
    except Exception as error:  # CuPy raises its own and the driver's errors
        why = NO_DRIVER if newest is None else f"{error} (the driver runs CUDA {newest[0]}.{newest[1]})"
        return Status(False, f"no usable NVIDIA GPU: {why}", {})
    facts: dict[str, Any] = {
        "device": properties["name"].decode(),
        "arch": nvrtc.arch_of((properties["major"], properties["minor"])),
        "driver_cuda": f"{driver // 1000}.{driver % 1000 // 10}",
        "cupy": cupy.__version__,
    }
    try:
        facts["nvrtc"] = ".".join(map(str, nvrtc.nvrtc_version()))
    except nvrtc.CompileError as error:
        return Status(False, str(error), facts)
    named = f"{count} x {facts['device']} ({facts['arch']}), CuPy {facts['cupy']}, NVRTC {facts['nvrtc']}"
    return Status(True, named, facts)


def driver_cuda() -> tuple[int, int] | None:
    """The newest CUDA that the NVIDIA driver runs, as (major, minor); None without a driver."""
    try:
        driver = ctypes.CDLL(DRIVER)
    except OSError:
        return None
    version = ctypes.c_int()
    if driver.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return None
    return version.value // 1000, version.value % 1000 // 10


def without_cupy(driver: tuple[int, int] | None) -> str:
    """The sentence where CuPy is missing: which extra is for this driver, which runs older CUDA and never newer."""
    if driver is None:
        return f"{NO_DRIVER}; beside one: {pip_install('cuda13')} (or cuda12)"
    if driver[0] < OLDEST_CUDA:
        return f"the NVIDIA driver runs CUDA {driver[0]}.{driver[1]}, and CuPy needs {OLDEST_CUDA}.0: update the driver"
    return f"CuPy is not installed: {pip_install('cuda13' if driver[0] > OLDEST_CUDA else 'cuda12')}"
