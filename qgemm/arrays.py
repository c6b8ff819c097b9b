"""Arrays in and out: NumPy, CuPy, torch and whatever speaks DLPack, on the stream that their library works on.

Nothing is copied between libraries: a CUDA array becomes a CuPy array over the same memory, a host array a NumPy one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import UnsupportedError

DL_CUDA = 2  # kDLCUDA, a device type of the DLPack protocol


def on_cuda(x: Any) -> bool:
    """True if x lives on a CUDA device; False for what is no array."""
    if isinstance(x, np.ndarray):
        return False
    device = getattr(x, "__dlpack_device__", None)
    return device is not None and int(device()[0]) == DL_CUDA


def as_numpy(x: Any) -> NDArray[Any]:
    """A host array as NumPy, without a copy where x is an array already."""
    if isinstance(x, np.ndarray):
        return x
    device = getattr(x, "__dlpack_device__", None)
    return np.asarray(x) if device is None else np.from_dlpack(x)


def as_cupy(x: Any) -> Any:
    """A CUDA array [..., K] of floats as a CuPy array over the same memory; TypeError for a scalar or other dtypes."""
    import cupy

    if not isinstance(x, cupy.ndarray):
        x = cupy.from_dlpack(x.detach() if hasattr(x, "detach") else x)
    if x.ndim == 0 or (x.dtype.kind != "f" and x.dtype.name != "bfloat16"):
        raise TypeError(f"expected [..., K] of float16, float32, float64 or bfloat16, got {x.dtype} of shape {x.shape}")
    return x


def like(x: Any, y: Any) -> Any:
    """y (NumPy or CuPy) as an array of x's library, without a copy where the library takes DLPack."""
    if type(x) is type(y) or not hasattr(x, "__dlpack__"):
        return y
    namespace = x.__array_namespace__() if hasattr(x, "__array_namespace__") else sys.modules[type(x).__module__]
    return namespace.from_dlpack(y)


def current_stream() -> int:
    """The handle of CuPy's current stream."""
    import cupy

    handle: int = cupy.cuda.get_current_stream().ptr
    return handle


@contextmanager
def stream_of(x: Any, devices: Sequence[Any] = ()) -> Iterator[None]:
    """Make x's device and the stream of its library current: torch's own stream, else CuPy's.

    Other libraries order their stream with ours themselves, when DLPack hands the array over. UnsupportedError unless
    all of `devices` (cupy.cuda.Device) are x's device.
    """
    import cupy

    at = cupy.cuda.Device(int(x.__dlpack_device__()[1]))
    for device in devices:
        if at != device:
            raise UnsupportedError(f"x is on cuda:{at.id}, w on cuda:{device.id}; they must share a device")
    torch = sys.modules.get("torch")
    with at:
        if torch is not None and isinstance(x, torch.Tensor):
            with cupy.cuda.Stream.from_external(_TorchStream(torch.cuda.current_stream(x.device).cuda_stream)):
                yield
        else:
            yield


class _TorchStream:
    """A raw stream handle behind the CUDA stream protocol, which older torch streams do not speak themselves."""

    def __init__(self, handle: int) -> None:
        self.handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle
