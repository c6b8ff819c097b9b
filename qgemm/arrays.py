"""Arrays in and out: NumPy, CuPy, torch and whatever speaks DLPack.

Nothing is copied between libraries: a CUDA array becomes a CuPy array over the same memory, a host array a NumPy one.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .arguments import Array
from .codec.float_types import FLOATS, LISTED
from .errors import UnsupportedError

if TYPE_CHECKING:
    import cupy

DL_CUDA = 2  # kDLCUDA, a device type of the DLPack protocol


def on_cuda(x: object) -> bool:
    """Whether x is an array on a CUDA device."""
    if type(x) is np.ndarray:
        return False
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        return bool(x.is_cuda)  # DLPack's answer takes a microsecond
    device = getattr(x, "__dlpack_device__", None)
    return device is not None and int(device()[0]) == DL_CUDA


def torch_of(x: object) -> Any:
    """The package torch if x is a tensor of it, a Parameter included; else None."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and isinstance(x, torch.Tensor) else None


def as_numpy(x: Any, who: str) -> NDArray[Any]:
    """A host array to read from, without a copy where it is one already; bfloat16 of torch becomes float32.

    A tensor that requires grad is detached: no gradient flows through a product here. TypeError for a masked array and
    for rows of several lengths, UnsupportedError for an array on a CUDA device. who: the argument, for messages.
    """
    if isinstance(x, np.ndarray):
        return _unmasked(x, who)
    if on_cuda(x):
        raise UnsupportedError(f"{who} is on a CUDA device, the product is on the host")
    torch = torch_of(x)
    if torch is not None:
        x = x.detach()
        read: NDArray[Any] = (x.float() if x.dtype == torch.bfloat16 else x).numpy()
        return read
    if not hasattr(x, "__dlpack_device__"):
        try:
            return np.asarray(x)
        except ValueError as error:
            raise TypeError(f"{who} is no array: {error}") from error
    try:
        return np.from_dlpack(x)
    except (BufferError, RuntimeError, TypeError):  # DLPack of NumPy knows no bfloat16
        return np.asarray(x)


def as_target(out: Any) -> NDArray[Any]:
    """The memory of a host array to write into, as NumPy; float32 of its shape for bfloat16 of torch: see `written`.

    TypeError unless it is an array; UnsupportedError if it is read-only.
    """
    check_no_grad(out)
    if on_cuda(out):
        raise UnsupportedError("out is on a CUDA device, the product is on the host")
    torch = torch_of(out)
    if torch is not None:
        memory: NDArray[Any] = np.empty(out.shape, np.float32) if out.dtype == torch.bfloat16 else out.numpy()
    elif isinstance(out, np.ndarray):
        memory = _unmasked(out, "out")
    elif hasattr(out, "__dlpack_device__"):
        memory = np.from_dlpack(out)
    else:
        raise TypeError(f"out must be an array, into which y is written, got {type(out).__name__}")
    if not memory.flags.writeable:
        raise UnsupportedError("out is read-only")
    return memory


def check_no_grad(out: Any) -> None:
    """UnsupportedError for a tensor of torch that requires grad, as torch refuses to write into one."""
    if torch_of(out) is not None and out.requires_grad:
        raise UnsupportedError("out requires grad, and no gradient flows through a product here; give out.detach()")


def written(out: Any, y: NDArray[Any]) -> Any:
    """`out`, once the memory that `as_target` returned holds y: torch rounds to bfloat16 itself."""
    torch = torch_of(out)
    if torch is not None and out.dtype == torch.bfloat16:
        out.copy_(torch.from_numpy(y))
    return out


def _unmasked(x: NDArray[Any], who: str) -> NDArray[Any]:
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(f"{who} is a masked array, whose mask a product would lose; give {who}.filled(0) or {who}.data")
    return x


def as_cupy(x: Array, who: str = "x") -> cupy.ndarray:
    """A CUDA array [..., K] of floats as a CuPy array over the same memory; TypeError for a scalar or other dtypes.

    A tensor that requires grad is detached, as on the host. UnsupportedError for an array of the host.
    """
    import cupy

    if not on_cuda(x):
        raise UnsupportedError(f"{who} is on the host, the product is on a CUDA device; got {type(x).__name__}")
    if not isinstance(x, cupy.ndarray):
        x = cupy.from_dlpack(x.detach() if hasattr(x, "detach") else x)
    check_floats(x.dtype.name, x.shape, who)
    return x


def check_floats(name: str, shape: Sequence[int], who: str = "x") -> None:
    """TypeError unless an array of a type by NumPy's name and a shape is [..., K] of floats."""
    if not shape or name not in FLOATS:
        raise TypeError(f"{who} must be [..., K] of {LISTED}, got {name} of shape {tuple(shape)}")


def like(x: object, y: Array, bfloat16: bool = False) -> Any:
    """y (NumPy or CuPy) as an array of x's library, without a copy where the library takes DLPack.

    bfloat16: whether torch rounds y, float32, to bfloat16: see `rounds_itself`.
    """
    if type(x) is type(y) or isinstance(x, np.ndarray) or not hasattr(x, "__dlpack__"):
        return y
    torch = torch_of(x)
    if torch is not None:
        tensor = torch.from_dlpack(y)
        return tensor.to(torch.bfloat16) if bfloat16 else tensor
    package = sys.modules[type(x).__module__.partition(".")[0]]
    return (x.__array_namespace__() if hasattr(x, "__array_namespace__") else package).from_dlpack(y)


def rounds_itself(x: object, name: str) -> bool:
    """Whether a host y of this type is float32 to NumPy, and bfloat16 by x's library: torch needs no ml_dtypes."""
    return name == "bfloat16" and torch_of(x) is not None
