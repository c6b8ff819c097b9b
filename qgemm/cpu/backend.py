"""The CPU as a backend: for each method of the protocol the function of this package that serves it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from qgemm.arguments import Activation, Array, check_not_scalar
from qgemm.arrays import as_numpy, like
from qgemm.backend import PRODUCTS, Status, Tuned
from qgemm.codec import search
from qgemm.codec.float_types import DType
from qgemm.codec.format import Blocks, Format, floats
from qgemm.errors import UnsupportedError
from qgemm.gating import gated_by
from qgemm.parallel import threads
from qgemm.tensor import Tensor

from . import decode, experts, fast_path, native, reference


class CpuBackend:
    """`qgemm.backend.Backend` on the host."""

    product = staticmethod(fast_path.product)
    products = staticmethod(fast_path.products)
    moe_matmul = staticmethod(experts.matmul)
    moe = staticmethod(experts.feed_forward)

    def quantize_activations(self, x: Array, activation: Activation) -> Tensor:
        """x [..., K] -> a Tensor of activations."""
        return reference.prepared(check_not_scalar(floats(as_numpy(x, "x"))), activation)

    def quantize(self, x: Array, fmt: Format, importance: ArrayLike | None = None) -> Tensor:
        """Values [..., K] -> a Tensor."""
        values = floats(as_numpy(x, "x"))
        blocks = fmt.quantize(values) if importance is None else search.quantize(fmt, values, importance)
        return Tensor(fmt, values.shape, blocks)

    def dequantize(self, w: Tensor, dtype: DType) -> NDArray[Any]:
        """The weights [..., N, K] as numbers."""
        return decode.dequantize(w, dtype)

    def rows(self, w: Tensor, index: NDArray[np.int64], dtype: DType) -> NDArray[Any]:
        """Rows of a matrix as numbers [*index.shape, K]."""
        return decode.gather(w, index, dtype)

    def preparation(
        self, tensors: Sequence[Any], rows: Sequence[int] | None, activations: Sequence[str], dtypes: Sequence[str]
    ) -> list[Callable[[], bool]]:
        """A library for each format, and the one that quantizes activations; none where NumPy multiplies."""
        formats = {w.format: None for w in tensors if w.ndim > 1}
        return native.preparation(list(formats), activations)

    def from_bytes(self, rows: Array, fmt: Format, shape: tuple[int, ...], name: str) -> Tensor:
        """A Tensor over the memory of bytes; over a copy where the bytes of a row lie apart."""
        memory = as_numpy(rows, "bytes")
        blocks = (memory if memory.strides[-1] == 1 else np.ascontiguousarray(memory)).view(fmt.dtype)
        blocks.flags.writeable = False
        return Tensor(fmt, shape, blocks, name)

    def array(self, values: NDArray[Any]) -> NDArray[Any]:
        """The values themselves."""
        return values

    def gated(self, function: str, gate: Array, up: Array) -> Any:
        """y = function(gate) * up of two products."""
        return like(gate, gated_by(function, as_numpy(gate, "y"), as_numpy(up, "y")))

    def tune(self, *_: object) -> Tuned:
        """UnsupportedError: products on a CPU have no configs to choose from."""
        raise UnsupportedError("only products on a GPU are tuned")

    def check_upload(self, fmt: Format, shape: tuple[int, ...], who: str) -> None:
        """Nothing to check: the host holds tensors of any format and shape."""

    def upload(self, tensor: Tensor, blocks: Blocks) -> Tensor:
        """A Tensor with an interleaved copy of its weights; the Tensor itself where products have no use for one."""
        copy = native.interleaved(tensor, blocks)
        return tensor if copy is None else tensor.with_interleaved(copy)

    def status(self) -> Status:
        """Always available."""
        reason = native.reason()
        code = f"NumPy alone: {reason}" if reason else native.origin()
        facts = {"numpy": np.__version__, "threads": threads(), "compiled": not reason}
        return Status(True, f"NumPy {np.__version__}, {threads()} threads, {code}", facts)


BACKEND = CpuBackend()
PRODUCTS[Tensor] = BACKEND
