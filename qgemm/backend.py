"""Which backends work here, and why not."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .parallel import workers


class Backend(NamedTuple):
    """Whether a backend can be used, one line that says with what or why not, and the facts behind it."""

    available: bool
    detail: str
    facts: dict[str, Any]


def backends() -> dict[str, Backend]:
    """The state of the backends "cpu" and "cuda" on this machine; looks for a GPU when called."""
    cpu = {"numpy": np.__version__, "threads": workers()}
    return {"cpu": Backend(True, f"NumPy {np.__version__}, {workers()} threads", cpu), "cuda": _cuda()}


def _cuda() -> Backend:
    try:
        import cupy
    except ImportError:
        return Backend(False, "CuPy is not installed: pip install 'qgemm[cuda13]' (or cuda12)", {})
    try:
        count = cupy.cuda.runtime.getDeviceCount()
        properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())
        driver = cupy.cuda.runtime.driverGetVersion()
    except Exception as error:  # CuPy raises its own and the driver's errors
        return Backend(False, f"no usable NVIDIA GPU: {error}", {})
    from qgemm.cuda.jit import nvrtc

    facts: dict[str, Any] = {
        "device": properties["name"].decode(),
        "arch": nvrtc.arch_of((properties["major"], properties["minor"])),
        "driver_cuda": f"{driver // 1000}.{driver % 1000 // 10}",
        "cupy": cupy.__version__,
    }
    try:
        facts["nvrtc"] = ".".join(map(str, nvrtc.nvrtc_version()))
    except nvrtc.CompileError as error:
        return Backend(False, str(error), facts)
    return Backend(
        True, f"{count} x {facts['device']} ({facts['arch']}), CuPy {facts['cupy']}, NVRTC {facts['nvrtc']}", facts
    )
