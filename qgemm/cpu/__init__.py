"""The CPU backend: arrays of the host, checked and shaped, multiplied by the NumPy kernels (qgemm/cpu/numpy.py)."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from qgemm.arguments import (
    Epilogue,
    check_epilogue,
    check_not_scalar,
    check_out,
    check_shapes,
    check_weights,
    output_dtype,
)
from qgemm.arrays import as_numpy, like
from qgemm.backend import Status
from qgemm.codec import activations
from qgemm.codec.format import Format, floats
from qgemm.errors import UnsupportedError
from qgemm.formats.q8_1 import FORMAT as Q8_1
from qgemm.parallel import workers
from qgemm.tensor import Tensor

from . import numpy as kernels


class CpuBackend:
    """`qgemm.backend.Backend` on the host."""

    def matmul(self, x: Any, w: Tensor, activation: str, epilogue: Epilogue, out: Any, dtype: DTypeLike | None) -> Any:
        """y in `out`, or as an array of x's library."""
        if epilogue.given:
            epilogue = Epilogue(*(None if array is None else as_numpy(array) for array in epilogue))
        values = x if isinstance(x, Tensor) else as_numpy(x)
        y = _multiply(values, w, activation, epilogue, None if out is None else as_numpy(out), dtype)
        return out if out is not None else like(x, y)

    def matmul_many(
        self,
        x: Any,
        weights: Sequence[Tensor],
        activation: str,
        epilogues: Sequence[Epilogue],
        outs: Sequence[Any],
        dtype: DTypeLike | None,
    ) -> list[Any]:
        """`matmul` by each of the weights; "a8" quantizes x once."""
        prepared = x
        if activation == "a8" and not isinstance(x, Tensor) and weights:
            prepared = self.quantize_activations(x)
        products = zip(weights, epilogues, outs, strict=True)
        ys = [self.matmul(prepared, w, activation, epilogue, out, dtype) for w, epilogue, out in products]
        return [y if out is not None else like(x, y) for y, out in zip(ys, outs, strict=True)]

    def quantize_activations(self, x: Any) -> Tensor:
        """x [..., K] -> a Tensor of activations."""
        return kernels.quantize_activations(check_not_scalar(floats(as_numpy(x))))

    def quantize(self, x: Any, fmt: Format) -> Tensor:
        """Values [..., K] -> a Tensor."""
        values = floats(x)
        return Tensor(fmt, values.shape, fmt.quantize(values))

    def upload(self, tensor: Tensor) -> Tensor:
        """The Tensor itself: the host multiplies blocks as they are."""
        return tensor

    def status(self) -> Status:
        """Always available."""
        return Status(
            True, f"NumPy {np.__version__}, {workers()} threads", {"numpy": np.__version__, "threads": workers()}
        )


BACKEND = CpuBackend()


def _multiply(
    x: NDArray[Any] | Tensor, w: Tensor, activation: str, epilogue: Epilogue, out: NDArray[Any] | None, dtype: Any
) -> Any:
    check_weights(w)
    if isinstance(x, Tensor) and (activation != "a8" or x.format not in (activations.FORMAT, Q8_1)):
        raise UnsupportedError(f"prepared activations are Q8_1 for activation 'a8', got {x!r} for {activation!r}")
    if not isinstance(x, Tensor):
        x = check_not_scalar(floats(x))
    check_shapes(x.shape, w)
    y = _output(out, (*x.shape[:-1], w.shape[0]), dtype)
    check_epilogue(epilogue, y.shape)
    m = prod(x.shape[:-1])
    if 0 in (m, w.shape[0]):
        return y
    direct = y.flags.c_contiguous and not epilogue.given
    flat = y.reshape(m, w.shape[0]) if direct else np.empty((m, w.shape[0]), np.float32 if epilogue.given else y.dtype)
    if w.shape[1] == 0:
        flat[...] = 0  # an empty sum
    elif activation == "a8":
        prepared = x if isinstance(x, Tensor) else kernels.quantize_activations(x)
        blocks = prepared.blocks.reshape(m, -1)
        kernels.multiply_a8(activations.of_q8_1(blocks) if prepared.format == Q8_1 else blocks, w, flat)
    else:
        assert not isinstance(x, Tensor)
        if out is not None and np.may_share_memory(x, out):
            x = x.copy()
        kernels.multiply_a16(x.reshape(m, w.shape[1]), w, flat)
    if not direct:
        total = flat.reshape(y.shape)
        with np.errstate(over="ignore", invalid="ignore"):  # NaN and infinity are data
            for added in epilogue:
                if added is not None:
                    total += added.astype(np.float32, copy=False)
            y[...] = total
    return y


def _output(out: NDArray[Any] | None, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """`out` if it fits, or a new array."""
    if out is None:
        return np.empty(shape, output_dtype(dtype))
    check_out(out, shape, dtype)
    if not out.flags.writeable:
        raise UnsupportedError("out is read-only")
    return floats(out)
