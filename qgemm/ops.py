"""y = x @ w.T on packed weights: checks what came, picks the backend, hands back an array of x's kind."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from math import prod
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from qgemm.codec.format import float_dtype, floats
from qgemm.cuda.layout.activations import DeviceActivations
from qgemm.formats.q8_1 import FORMAT as Q8_1

from .cpu import numpy as cpu
from .errors import UnsupportedError
from .tensor import Tensor

ACTIVATIONS = ("a16", "a8")
DL_CPU, DL_CUDA = 1, 2  # device types of the DLPack protocol


class Addends(NamedTuple):
    """What is added to a product: bias [N] and residual [..., N], of y's shape; None for none."""

    bias: Any = None
    residual: Any = None

    @property
    def given(self) -> bool:
        """Whether there is any."""
        return self.bias is not None or self.residual is not None


NOTHING = Addends()


def matmul(
    x: Any,
    w: Any,
    activation: str | None = None,
    *,
    bias: Any = None,
    residual: Any = None,
    out: Any = None,
    dtype: DTypeLike | None = None,
) -> Any:
    """Multiply activations by packed weights: y [..., N] = x [..., K] @ w [N, K].T + bias + residual.

    Sums are in float32, what is added included.

    x: float16, float32, float64 or bfloat16, any leading shape and strides; a NumPy array, a CuPy array, or any
    array that speaks DLPack (a torch tensor); or what `quantize_activations` prepared.
    w: a Tensor (x on the CPU) or a DeviceTensor (x on its GPU).
    activation: "a16" multiplies x as it is with the exact weights; "a8" quantizes x to Q8_1 and multiplies integer
    codes block by block. The default is "a16", for prepared activations "a8".
    bias [N], residual [..., N] of y's shape: added to y, any float dtype, on x's device. The residual may be `out`.
    out: receives y, shape [..., N], any float dtype; without it y is a new array of `dtype` (float32).

    Raises UnsupportedError (a ValueError) or TypeError that names what came and what fits.
    """
    activation = _activation(activation, x)
    addends = NOTHING if bias is None and residual is None else Addends(bias, residual)
    if not isinstance(w, Tensor) or on_cuda(x):
        return _cuda().matmul(x, w, activation, addends, out=out, dtype=dtype)
    return _on_host(x, w, activation, addends, out, dtype)


def matmul_many(
    x: Any,
    weights: Sequence[Any],
    activation: str | None = None,
    *,
    biases: Sequence[Any] | None = None,
    residuals: Sequence[Any] | None = None,
    outs: Sequence[Any] | None = None,
    dtype: DTypeLike | None = None,
) -> list[Any]:
    """Multiply the same x by several weights, such as those of Q, K and V: `matmul` of each, in their order.

    "a8" quantizes x once for all of them. On a GPU weights of one format share a launch where x has few rows.
    biases, residuals, outs: one for each of the weights, or None; of the first two any may be None.
    """
    activation = _activation(activation, x)
    count = len(weights)
    for name, given in (("biases", biases), ("residuals", residuals), ("outs", outs)):
        if given is not None and len(given) != count:
            raise UnsupportedError(f"{name} has {len(given)} entries for {count} weights")
    columns = (column or [None] * count for column in (biases, residuals))
    addends = [NOTHING if b is None and r is None else Addends(b, r) for b, r in zip(*columns, strict=True)]
    targets = outs or [None] * count
    if on_cuda(x) or not all(isinstance(w, Tensor) for w in weights):
        ys: list[Any] = _cuda().matmul_many(x, weights, activation, addends, outs=targets, dtype=dtype)
        return ys
    if activation == "a8" and not isinstance(x, Tensor):
        host = as_numpy(x)
        ys = matmul_many(
            quantize_activations(host),
            weights,
            biases=biases,
            residuals=residuals,
            outs=None if outs is None else [as_numpy(out) for out in outs],
            dtype=dtype,
        )
        return list(outs) if outs is not None else [like(x, y) for y in ys]
    return [
        _on_host(x, w, activation, added, out, dtype) for w, added, out in zip(weights, addends, targets, strict=True)
    ]


@cache
def _cuda() -> ModuleType:
    """The CUDA backend, imported at first use: an import statement takes 0.7 us even then."""
    from .cuda import backend as cuda

    return cuda


def _activation(activation: str | None, x: Any) -> str:
    if activation is None:
        return "a8" if isinstance(x, (Tensor, DeviceActivations)) else "a16"
    if activation not in ACTIVATIONS:
        raise UnsupportedError(f"activation is {' or '.join(map(repr, ACTIVATIONS))}, got {activation!r}")
    return activation


def _on_host(x: Any, w: Tensor, activation: str, addends: Addends, out: Any, dtype: Any) -> Any:
    if addends.given:
        addends = Addends(*(None if addend is None else as_numpy(addend) for addend in addends))
    if isinstance(x, Tensor):
        return _multiply(x, w, activation, addends, out, dtype)
    y = _multiply(as_numpy(x), w, activation, addends, None if out is None else as_numpy(out), dtype)
    return out if out is not None else like(x, y)


def quantize_activations(x: Any) -> Any:
    """Prepare x [..., K] for several "a8" products: Q8_1 blocks along K, which must be a multiple of 32.

    NaN and infinity become NaN in the outputs of their own row. On the CPU the result is a Tensor.
    """
    if on_cuda(x):
        return _cuda().quantize_activations(x)
    return cpu.quantize_activations(_activations(floats(as_numpy(x))))


def _multiply(
    x: NDArray[Any] | Tensor, w: Tensor, activation: str, addends: Addends, out: NDArray[Any] | None, dtype: Any
) -> Any:
    check_weights(w)
    if isinstance(x, Tensor) and (activation != "a8" or x.format is not Q8_1):
        raise UnsupportedError(f"prepared activations are Q8_1 for activation 'a8', got {x!r} for {activation!r}")
    if not isinstance(x, Tensor):
        x = _activations(floats(x))
    check_shapes(x.shape, w)
    y = check_out(out, (*x.shape[:-1], w.shape[0]), dtype)
    check_addends(addends, y.shape)
    m = prod(x.shape[:-1])
    if 0 in (m, w.shape[0]):
        return y
    direct = y.flags.c_contiguous and not addends.given
    flat = y.reshape(m, w.shape[0]) if direct else np.empty((m, w.shape[0]), np.float32 if addends.given else y.dtype)
    if w.shape[1] == 0:
        flat[...] = 0  # an empty sum
    elif activation == "a8":
        prepared = x if isinstance(x, Tensor) else cpu.quantize_activations(x)
        cpu.multiply_a8(prepared.blocks.reshape(m, -1), w, flat)
    else:
        assert not isinstance(x, Tensor)
        if out is not None and np.may_share_memory(x, out):
            x = x.copy()
        cpu.multiply_a16(x.reshape(m, w.shape[1]), w, flat)
    if not direct:
        total = flat.reshape(y.shape)
        with np.errstate(over="ignore", invalid="ignore"):  # NaN and infinity are data
            for addend in addends:
                if addend is not None:
                    total += addend.astype(np.float32, copy=False)
            y[...] = total
    return y


def _activations(x: NDArray[Any]) -> NDArray[Any]:
    if x.ndim == 0:
        raise UnsupportedError("x is a scalar; it needs the shape [..., K]")
    return x


def check_weights(w: Any) -> None:
    """UnsupportedError unless w is a matrix of a format that can be decoded."""
    if w.ndim != 2:
        raise UnsupportedError(f"w must be a matrix (N, K), got {w!r}; index its leading axes first")
    if w.format.levels is None:
        raise UnsupportedError(f"{w!r}: {w.format} has no decoder, so it cannot be multiplied")


def check_shapes(x: tuple[int, ...], w: Any) -> None:
    """UnsupportedError unless x [..., K] fits w [N, K]."""
    if x[-1] != w.shape[1]:
        raise UnsupportedError(f"x has rows of {x[-1]}, {w!r} needs K = {w.shape[1]} (x is {x}, w is (N, K))")


def check_addends(addends: Addends, shape: tuple[int, ...]) -> None:
    """UnsupportedError unless bias and residual fit y of this shape; TypeError for what is not an array of floats."""
    for name, addend, fitting in (("bias", addends.bias, shape[-1:]), ("residual", addends.residual, shape)):
        if addend is None:
            continue
        if addend.shape != fitting:
            raise UnsupportedError(f"{name} has shape {addend.shape}, y needs {fitting}")
        if addend.dtype.kind != "f" and addend.dtype.name != "bfloat16":
            raise TypeError(f"{name} must be of float16, float32, float64 or bfloat16, got {addend.dtype}")


def check_out(out: NDArray[Any] | None, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """`out` if it fits, or a new array of `dtype` (float32 by default)."""
    if out is None:
        return np.empty(shape, float_dtype(np.float32 if dtype is None else dtype))
    if out.shape != shape:
        raise UnsupportedError(f"out has shape {out.shape}, y has {shape}")
    if dtype is not None and float_dtype(dtype) != out.dtype:
        raise UnsupportedError(f"out is {out.dtype}, dtype asks for {float_dtype(dtype)}; give one of them")
    if not out.flags.writeable:
        raise UnsupportedError("out is read-only")
    return floats(out)


def on_cuda(x: Any) -> bool:
    """True if x lives on a CUDA device."""
    if isinstance(x, (np.ndarray, Tensor)):
        return False
    device = getattr(x, "__dlpack_device__", None)
    return device is not None and int(device()[0]) == DL_CUDA


def as_numpy(x: Any) -> NDArray[Any]:
    """A host array as NumPy, without a copy where x is an array already."""
    if isinstance(x, np.ndarray):
        return x
    device = getattr(x, "__dlpack_device__", None)
    return np.asarray(x) if device is None else np.from_dlpack(x)


def like(x: Any, y: Any) -> Any:
    """y (NumPy or CuPy) as an array of x's library, without a copy where the library takes DLPack."""
    if type(x) is type(y) or not hasattr(x, "__dlpack__"):
        return y
    namespace = x.__array_namespace__() if hasattr(x, "__array_namespace__") else sys.modules[type(x).__module__]
    return namespace.from_dlpack(y)
