"""The CUDA backend: CuPy arrays, or others through DLPack, on the caller's stream; kernels compiled by NVRTC.

Importing it needs no GPU and no CuPy, which is imported when a device is touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from qgemm.arguments import (
    NO_EPILOGUE,
    Epilogue,
    check_apart,
    check_elements,
    check_epilogue,
    check_out,
    check_shapes,
    check_weights,
    output_dtype,
)
from qgemm.arrays import as_cupy, check_no_grad, like, on_cuda, stream_of
from qgemm.backend import Status
from qgemm.codec.format import Format
from qgemm.errors import UnsupportedError
from qgemm.tensor import Tensor

from . import encode, planes
from .activations import DeviceActivations, quantized
from .driver.device import require, status
from .launch_cache import clash, remember, try_cached, try_cached_many
from .problem import C_TYPES
from .products import Product, multiply
from .tensor import DeviceTensor


class CudaBackend:
    """`qgemm.backend.Backend` on NVIDIA GPUs."""

    def matmul(self, x: Any, w: Any, activation: str, epilogue: Epilogue, out: Any, dtype: DTypeLike | None) -> Any:
        """y in `out`, or as a new array of x's library."""
        if epilogue is NO_EPILOGUE and type(w) is DeviceTensor and dtype is None and try_cached(x, w, activation, out):
            return out
        return self.matmul_many(x, [w], activation, [epilogue], [out], dtype)[0]

    def matmul_many(
        self,
        x: Any,
        weights: Sequence[Any],
        activation: str,
        epilogues: Sequence[Epilogue],
        outs: Sequence[Any],
        dtype: DTypeLike | None,
    ) -> list[Any]:
        """`matmul` by each of the weights; those of one format and few rows of x share a launch."""
        if not weights:
            return []
        cached = dtype is None and type(weights[0]) is DeviceTensor
        if cached and try_cached_many(x, weights, activation, epilogues, outs):
            return list(outs)
        _check(x, weights, activation)
        source = x.like if isinstance(x, DeviceActivations) else x
        with stream_of(source, [w.data.device for w in weights]):
            values = x if isinstance(x, DeviceActivations) else as_cupy(x)
            for w in weights:
                check_shapes(values.shape, w)
            shapes = [(*values.shape[:-1], w.shape[0]) for w in weights]
            ys = [_output(out, shape, dtype) for out, shape in zip(outs, shapes, strict=True)]
            check_apart([y for y, out in zip(ys, outs, strict=True) if out is not None])
            added = [_contiguous(epilogue, y, ys) for epilogue, y in zip(epilogues, ys, strict=True)]
            launch = multiply(values, [Product(*p) for p in zip(weights, ys, added, strict=True)], activation)
            if launch is not None:
                remember(launch, values, weights, activation, added, ys)
            return [like(source, y) if out is None else out for y, out in zip(ys, outs, strict=True)]

    def quantize_activations(self, x: Any) -> DeviceActivations:
        """x [..., K] as Q8_1 blocks on its device."""
        require("an array on a CUDA device")
        with stream_of(x):
            return quantized(as_cupy(x), x)

    def quantize(self, x: Any, fmt: Format) -> DeviceTensor | planes.Planes:
        """Values on a device -> a DeviceTensor of a matrix or, of kbit formats, Planes of any shape."""
        require("an array on a CUDA device")
        return planes.quantize(x, fmt) if fmt.bit_planes else encode.quantize(x, fmt)

    def upload(self, tensor: Tensor) -> DeviceTensor:
        """Blocks of the host -> tiles on the current device."""
        return DeviceTensor.pack(tensor)

    def status(self) -> Status:
        """What GPU, driver, CuPy and NVRTC are there, or what is missing."""
        return status()


BACKEND = CudaBackend()


def _check(x: Any, weights: Sequence[Any], activation: str) -> None:
    for w in weights:
        check_weights(w)
    if isinstance(x, DeviceActivations) and activation != "a8":
        raise UnsupportedError(f"prepared activations are Q8_1 for activation 'a8', got {activation!r}")


def _output(out: Any, shape: tuple[int, ...], dtype: DTypeLike | None) -> Any:
    import cupy

    if out is None:
        return cupy.empty(shape, output_dtype(dtype))
    if not on_cuda(out):
        raise UnsupportedError(f"out must be on the CUDA device of w, got {type(out).__name__}")
    check_no_grad(out)
    check_out(out, shape, dtype)
    out = as_cupy(out, "out")
    check_elements(out)
    return out


def _contiguous(epilogue: Epilogue, y: Any, outs: Sequence[Any]) -> Epilogue:
    """Bias and residual as contiguous CuPy arrays that no output overwrites too early."""
    if not epilogue.given:
        return epilogue
    names = zip(epilogue, Epilogue._fields, strict=True)
    arrays = Epilogue(*(None if added is None else as_cupy(added, name) for added, name in names))
    check_epilogue(arrays, y.shape)
    return Epilogue(*(None if added is None else _fetched(added, y, outs) for added in arrays))


def _fetched(added: Any, y: Any, outs: Sequence[Any]) -> Any:
    import cupy

    if added.dtype.name not in C_TYPES:
        added = added.astype(np.float32)
    added = cupy.ascontiguousarray(added)
    return added.copy() if clash(added, y, outs) else added
