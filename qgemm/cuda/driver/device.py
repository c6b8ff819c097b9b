"""What CUDA there is: the state of driver, CuPy and NVRTC, and the facts of a device."""

from __future__ import annotations

from functools import cache
from typing import Any

from qgemm.backend import Status
from qgemm.cuda.jit import nvrtc
from qgemm.errors import UnsupportedError
from qgemm.version import pip_install


@cache
def require(who: str) -> None:
    """UnsupportedError unless there are CuPy and a GPU: what is missing, how to get it, and what needs it."""
    found = status()
    if not found.facts:  # without NVRTC what is cached still runs
        raise UnsupportedError(f"{who} needs a GPU and CuPy: {found.detail}")


def status() -> Status:
    """The state of the CUDA backend; looks for a GPU when called."""
    try:
        import cupy
    except ImportError:
        return Status(False, f"CuPy is not installed: {pip_install('cuda13')} (or cuda12)", {})
    try:
        count = cupy.cuda.runtime.getDeviceCount()
        properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())
        driver = cupy.cuda.runtime.driverGetVersion()
    except Exception as error:  # CuPy raises its own and the driver's errors
        return Status(False, f"no usable NVIDIA GPU: {error}", {})
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
