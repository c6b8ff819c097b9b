"""The state of CUDA: driver, CuPy or torch, NVRTC, and the facts of a device."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from qgemm.backend import Status
from qgemm.cuda import devices
from qgemm.cuda.devices import LIBRARY, driver_cuda
from qgemm.cuda.jit import nvrtc
from qgemm.errors import UnsupportedError
from qgemm.version import pip_install

NO_DRIVER = f"no NVIDIA driver was found ({LIBRARY})"
OLDEST_CUDA = 12  # the oldest version with an extra of this package


@cache
def require(who: str) -> None:
    """UnsupportedError unless there are a GPU and a library for its arrays; it names `who`, the missing part, and
    how to install that.
    """
    state = status()
    if not state.facts:  # without NVRTC cached kernels still run
        raise UnsupportedError(f"{who} needs a GPU and CuPy or torch: {state.detail}")


def status() -> Status:
    """The state of the CUDA backend; looks for a GPU when called."""
    newest = driver_cuda()
    library = array_library(newest is not None)
    if library is None:
        return Status(False, without_library(newest), {})
    try:
        count, gpu = library.devices(), devices.facts(devices.current_device())
    except Exception as error:  # libraries raise their own and the driver's errors
        reason = NO_DRIVER if newest is None else f"{error} (the driver runs CUDA {newest[0]}.{newest[1]})"
        return Status(False, f"no usable NVIDIA GPU: {reason}", {})
    assert newest is not None
    facts: dict[str, Any] = {
        "device": gpu.name,
        "arch": nvrtc.arch_of(gpu.capability),
        "driver_cuda": "{}.{}".format(*newest),
        library.name.lower(): library.version,
    }
    try:
        facts["nvrtc"] = ".".join(map(str, nvrtc.nvrtc_version()))
    except nvrtc.CompileError as error:
        return Status(False, str(error), facts)
    named = f"{count} x {facts['device']} ({facts['arch']}), {library.name} {library.version}, NVRTC {facts['nvrtc']}"
    return Status(True, named, facts)


class ArrayLibrary(NamedTuple):
    """A package for arrays on a GPU. devices: the number of devices that it can use, or an error."""

    name: str
    version: str
    devices: Callable[[], int]


def array_library(has_driver: bool) -> ArrayLibrary | None:
    """The library of arrays that no caller brings: CuPy, else torch; see libraries.default_library.

    has_driver: without a driver torch is not imported, which takes seconds.
    """
    try:
        import cupy
    except ImportError:
        pass
    else:
        return ArrayLibrary("CuPy", cupy.__version__, cupy.cuda.runtime.getDeviceCount)
    if not has_driver:
        return None
    try:
        import torch
    except ImportError:
        return None

    def count() -> int:
        torch.cuda.init()  # raises where this torch cannot use the driver
        return int(torch.cuda.device_count())

    return None if torch.version.cuda is None else ArrayLibrary("torch", torch.__version__, count)


def without_library(driver: tuple[int, int] | None) -> str:
    """The sentence where CuPy and torch are missing: which extra is for this driver, which runs older CUDA alone."""
    if driver is None:
        return f"{NO_DRIVER}; beside one: {pip_install('cuda13')} (or cuda12)"
    if driver[0] < OLDEST_CUDA:
        return f"the NVIDIA driver runs CUDA {driver[0]}.{driver[1]}, and CuPy needs {OLDEST_CUDA}.0: update the driver"
    return f"neither CuPy nor a torch with CUDA is installed: {pip_install(extra_for(driver))}"


def extra_for(driver: tuple[int, int]) -> str:
    """The extra with CuPy for a driver."""
    return "cuda13" if driver[0] > OLDEST_CUDA else "cuda12"


def reason_without_cupy(state: Status, who: str) -> str:
    """Why `who`, which needs CuPy besides a GPU, cannot use one; "" if it can."""
    if not state.available or "cupy" in state.facts:
        return "" if state.available else state.detail
    driver = driver_cuda()
    assert driver is not None
    return f"{who} needs CuPy, torch alone multiplies: {pip_install(extra_for(driver))}"
