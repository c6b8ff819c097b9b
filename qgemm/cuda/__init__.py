"""The CUDA backend: CuPy arrays, or others through DLPack, on the caller's stream; kernels compiled by NVRTC.

Importing it needs no GPU and no CuPy, which is imported when a device is touched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from qgemm.arguments import (
    NO_EPILOGUE,
    Activation,
    Epilogue,
    Gated,
    check_apart,
    check_elements,
    check_epilogue,
    check_gated,
    check_out,
    check_prepared,
    check_shapes,
    check_weights,
    output_dtype,
)
from qgemm.arrays import as_cupy, check_no_grad, like, on_cuda, stream_of
from qgemm.backend import Status
from qgemm.codec.format import Format
from qgemm.errors import UnsupportedError
from qgemm.tensor import Tensor

from . import encode, experts, planes, prepare
from .activations import DeviceActivations, quantized
from .driver.device import require, status
from .driver.workspace import relaxed_capture
from .experts import DeviceExperts
from .kernels.needed import ROWS
from .libraries import Library, cupy_library, library_of
from .plan import with_outputs
from .plan_cache import again, again_many, remember
from .problem import C_TYPES
from .products import Product, multiply, multiply_gated
from .tensor import DeviceTensor


class CudaBackend:
    """`qgemm.backend.Backend` on NVIDIA GPUs."""

    def matmul(self, x: Any, w: Any, activation: str, epilogue: Epilogue, out: Any, dtype: DTypeLike | None) -> Any:
        """y in `out`, or as a new array of x's library."""
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
        _check(x, weights, activation)
        source = x.like if isinstance(x, DeviceActivations) else x
        library = library_of(source)
        with relaxed_capture(), stream_of(source, [w.data.device for w in weights]):
            values = x if isinstance(x, DeviceActivations) else as_cupy(x)
            for w in weights:
                check_shapes(values.shape, w)
            shapes, name = [(*values.shape[:-1], w.shape[0]) for w in weights], output_dtype(dtype).name
            made = [
                _new(shape, name, library, w.device) if out is None else out
                for out, shape, w in zip(outs, shapes, weights, strict=True)
            ]
            ys = [_target(y, shape, dtype) for y, shape in zip(made, shapes, strict=True)]
            check_apart([y for y, out in zip(ys, outs, strict=True) if out is not None])
            added = [_contiguous(epilogue, y, ys) for epilogue, y in zip(epilogues, ys, strict=True)]
            products = [Product(*p) for p in zip(weights, ys, added, strict=True)]
            plan = multiply(values, products, activation, library or cupy_library())
            if library is not None and plan is not None and len(products) == len(plan.y_nbytes):
                plan = with_outputs(plan, library, weights[0].device, shapes, name)
                remember(plan, x, weights, activation, epilogues, outs, dtype, library)
            if library is not None:
                return made
            return [like(source, y) if out is None else out for y, out in zip(ys, outs, strict=True)]

    def gated(
        self, x: Any, gate: Any, gated: Gated, activation: str, bias: Any, out: Any, dtype: DTypeLike | None
    ) -> Any:
        """function(x @ gate.T + bias) * (x @ up.T + its bias), in `out` or as a new array of x's library."""
        _check(x, [gate, gated.up], activation)
        check_gated(gate, gated.up)
        source = x.like if isinstance(x, DeviceActivations) else x
        library = library_of(source)
        with relaxed_capture(), stream_of(source, [w.data.device for w in (gate, gated.up)]):
            values = x if isinstance(x, DeviceActivations) else as_cupy(x)
            check_shapes(values.shape, gate)
            shape, name = (*values.shape[:-1], gate.shape[0]), output_dtype(dtype).name
            made = _new(shape, name, library, gate.device) if out is None else out
            y = _target(made, shape, dtype)
            added = [NO_EPILOGUE if one is None else _contiguous(Epilogue(one), y, [y]) for one in (bias, gated.bias)]
            first = Product(gate, y, added[0])
            what = gated._replace(bias=added[1].bias)
            plan = multiply_gated(values, first, what, activation, library or cupy_library())
            if library is None:
                return like(source, y) if out is None else out
            if plan is not None:
                plan = with_outputs(plan, library, gate.device, [shape], name)
                given = NO_EPILOGUE if bias is None else Epilogue(bias)
                remember(plan, x, [gate], activation, [given], [out], dtype, library, gated)
            return made

    def moe_matmul(
        self, x: Any, w: Any, ids: Any, activation: str, bias: Any, out: Any, dtype: DTypeLike | None
    ) -> Any:
        """y [T, top_k, N], in `out` or as a new array of x's library."""
        if activation != "a16":
            raise UnsupportedError("products by experts on a GPU are of activations as they are ('a16')")
        return experts.matmul(x, w, ids, bias, out, dtype)

    def moe(
        self, x: Any, gate_up: Any, down: Any, ids: Any, weights: Any, activation: str, biases: Sequence[Any] | None,
        out: Any, dtype: DTypeLike | None,
    ) -> Any:  # fmt: skip
        """y [T, K], in `out` or as a new array of x's library; a call like an earlier one by its launches."""
        return experts.feed_forward(x, gate_up, down, ids, weights, activation, biases, out, dtype)

    def quantize_activations(self, x: Any, activation: Activation) -> DeviceActivations:
        """x [..., K] as blocks of codes on its device."""
        require("an array on a CUDA device")
        return quantized(x, activation)

    def quantize(self, x: Any, fmt: Format, importance: Any = None) -> DeviceTensor | planes.Planes:
        """Values on a device -> a DeviceTensor of a matrix or, of kbit formats, Planes of any shape."""
        require("an array on a CUDA device")
        return planes.quantize(x, fmt) if fmt.bit_planes else encode.quantize(x, fmt, importance)

    def preparation(
        self, tensors: Sequence[Any], rows: Sequence[int] | None, activations: Sequence[str], dtypes: Sequence[str]
    ) -> list[Callable[[], bool]]:
        """Kernels for the current device, compiled and loaded there."""
        require("preparing kernels")
        return prepare.tasks(tensors, ROWS if rows is None else rows, activations, dtypes)

    def upload(self, tensor: Tensor) -> DeviceTensor | DeviceExperts:
        """Blocks of the host -> tiles on the current device; of experts if there are three axes."""
        return DeviceExperts.pack(tensor) if tensor.ndim == 3 else DeviceTensor.pack(tensor)

    def status(self) -> Status:
        """What GPU, driver, CuPy and NVRTC are there, or what is missing."""
        return status()


BACKEND = CudaBackend()
DeviceTensor.again = again
DeviceTensor.again_many = staticmethod(again_many)


def _check(x: Any, weights: Sequence[Any], activation: str) -> None:
    for w in weights:
        check_weights(w)
    check_prepared(x, activation)


def _new(shape: tuple[int, ...], name: str, library: Library | None, device: int) -> Any:
    """An array for y, of the library if that is read without DLPack, else CuPy's."""
    by = library or cupy_library()
    return by.new(shape, by.dtype(name), device)()


def _target(out: Any, shape: tuple[int, ...], dtype: DTypeLike | None) -> Any:
    """An array for y as CuPy's, over the same memory."""
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
    return added.copy() if _clash(added, y, outs) else added


def _clash(added: Any, y: Any, outs: Sequence[Any]) -> bool:
    """Whether an output would overwrite a bias or residual before it is read; a residual may be its own y."""
    import cupy

    same = added.data.ptr == y.data.ptr and added.dtype == y.dtype and added.shape == y.shape
    return any(cupy.may_share_memory(added, other) for other in outs if not (same and other is y))
