"""Views of packed weights: with columns in another order than they are stored in, or times a factor.

    Reordered   stored[:, j] = W[:, columns[j]]     y = x[..., columns] @ stored.T    act-order of GPTQ
    Scaled      W = stored * factor                 y = (x @ stored.T) * factor       NVFP4's float32 scale of a tensor

Both multiply by the kernels of the stored format, and cost a pass over x or y besides.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from .arguments import Array, Epilogue, Gated, Weights, check_out
from .arrays import as_cupy, as_numpy, as_target, check_no_grad, like, on_cuda, torch_of, written
from .backend import PRODUCTS, backend
from .codec.float_types import DType
from .codec.format import float_dtype, float_name
from .errors import UnsupportedError
from .packed import Packed, multiplied
from .placement import misplaced, prepared_for
from .tensor import Tensor


class View(Packed, ABC):
    """Weights [N, K] over a packed matrix, immutable; from `qgemm.load`. All products but those by experts accept it.

    tensor: the packed matrix, a Tensor or DeviceTensor.
    """

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor
        self.format, self.shape, self.name = tensor.format, tensor.shape, tensor.name

    @property
    def nbytes(self) -> int:
        """Bytes of the packed matrix."""
        return int(self.tensor.nbytes)

    @property
    def codebook(self) -> Any:
        """The value of each code, None where codes are numbers themselves."""
        return self.format.codebook

    @abstractmethod
    def product(
        self, x: Array, activation: str | None, bias: Array | None, residual: Array | None, out: Array | None,
        dtype: DType | None,
    ) -> Any:  # fmt: skip
        """y of `qgemm.matmul` for these arguments, by a product of the packed matrix."""

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.tensor!r}>"


class Reordered(View):
    """A matrix whose columns are packed in an order in which groups that share a scale are whole.

    Each product gathers x's columns first, by x's own library on its own stream: M * K values are moved beside N * K
    weights that are read. "a8" quantizes x after that, so activations that are quantized already do not fit.

    columns: [K], where column j of the packed matrix stands in W; int32, on a GPU an array of CuPy or torch.
    """

    def __init__(self, tensor: Any, columns: Any) -> None:
        super().__init__(tensor)
        self.columns = columns
        self._torch: Any = None  # the columns as a tensor of torch, made at first use

    @property
    def nbytes(self) -> int:
        """Bytes of the packed matrix and of the order."""
        return int(self.tensor.nbytes + self.columns.nbytes)

    def dequantize(self, dtype: DType = np.float32) -> Any:
        """The weights as a new array [N, K] in W's order: exact in float32, otherwise rounded once from it."""
        return self.tensor.dequantize(dtype)[:, self.columns.argsort()]

    def to_device(self) -> Reordered:
        """This view on the current CUDA device: tiles, and the order beside them."""
        if not isinstance(self.tensor, Tensor):
            return self
        return Reordered(self.tensor.to_device(), backend("cuda").array(self.columns))

    def gathered(self, x: Any) -> Any:
        """x [..., K] in the order of the packed matrix, a new array of x's library; as it is if it has no K columns."""
        if prepared_for(x) is not None:
            reason = "its columns are in another order (act-order) than those of activations that are quantized already"
            raise UnsupportedError(f"{self!r}: {reason}; give x as floats")
        if (tuple(getattr(x, "shape", ())) or (None,))[-1] != self.shape[1]:
            return x  # the product refuses it
        torch = torch_of(x)
        if torch is not None:
            if self._torch is None or self._torch.device != x.device:
                self._torch = torch.as_tensor(self.columns, device=x.device)
            return x.detach().index_select(-1, self._torch)
        if on_cuda(x):
            return like(x, as_cupy(x).take(self.columns, axis=-1))
        moved: NDArray[Any] = np.take(as_numpy(x, "x"), self.columns, axis=-1)
        return like(x, moved)

    def product(
        self, x: Array, activation: str | None, bias: Array | None, residual: Array | None, out: Array | None,
        dtype: DType | None,
    ) -> Any:  # fmt: skip
        """y, by the product of x's columns in the other order."""
        return multiplied(self.gathered(x), self.tensor, activation, bias, residual, out, dtype)


class Scaled(View):
    """A matrix times a float32 factor, or by it: of the tensor, or of each row.

    y = (x @ stored.T) * factor + bias + residual in float32. Decoding multiplies the scale of each group by the factor,
    as quantizers do, and rounds there: W = code * float32(scale * factor), or float32(scale / factor) if it divides.

    factor: a number, or [N] float32. divides: whether it divides.
    """

    def __init__(self, tensor: Any, factor: Any, divides: bool = False) -> None:
        super().__init__(tensor)
        self.factor, self.divides = factor, divides

    def dequantize(self, dtype: DType = np.float32) -> Any:
        """The weights as a new array [N, K], exact in float32, otherwise rounded once from it."""
        if not isinstance(self.tensor, Tensor):
            raise UnsupportedError(f"{self!r}: is decoded on the host")
        blocks = self.tensor.blocks
        levels = self.format.decode_levels(blocks.reshape(-1))
        with np.errstate(all="ignore"):  # scales may be anything
            if levels.scale is None:
                values = self._times(levels.values().reshape(self.shape))
            else:
                scale = self._times(levels.scale.reshape(len(blocks), -1)).reshape(levels.scale.shape)
                values = levels._replace(scale=scale).values().reshape(self.shape)
            return values.astype(float_dtype(dtype), copy=False)

    def _times(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """Rows [N, ...] times the factor, in float32."""
        factor = np.asarray(self.factor, np.float32).reshape(-1, 1)
        return rows / factor if self.divides else rows * factor

    def to_device(self) -> Scaled:
        """This view on the current CUDA device: tiles, and the factor beside them."""
        if not isinstance(self.tensor, Tensor):
            return self
        factor = backend("cuda").array(np.asarray(self.factor, np.float32))
        return Scaled(self.tensor.to_device(), factor, self.divides)

    def product(
        self, x: Array, activation: str | None, bias: Array | None, residual: Array | None, out: Array | None,
        dtype: DType | None,
    ) -> Any:  # fmt: skip
        """y, a float32 product times the factor."""
        y = multiplied(x, self.tensor, activation)
        torch = torch_of(y)
        factor = self.factor if torch is None else torch.as_tensor(self.factor, device=y.device)
        y = y / factor if self.divides else y * factor
        for added in (bias, residual):
            if added is not None:
                y = y + _beside(y, added)
        return handed_back(y, out, dtype)


class ViewProducts:
    """`qgemm.backend.Products` by views: products of their packed matrices."""

    def product(
        self, w: View, x: Array, activation: str | None, bias: Array | None, residual: Array | None,
        out: Array | None, dtype: DType | None, gated: Gated | None = None,
    ) -> Any:  # fmt: skip
        """y of `qgemm.matmul`, or of `gated`."""
        if gated is not None:
            return gated_apart(x, w, gated, activation, bias, out, dtype)
        return w.product(x, activation, bias, residual, out, dtype)

    def products(
        self, x: Array, weights: Sequence[Weights], activation: str | None, epilogues: Sequence[Epilogue] | None,
        outs: Sequence[Array] | None, dtype: DType | None,
    ) -> None:  # fmt: skip
        """None: each view needs an x or a y of its own, so that they are multiplied one by one."""

    def moe_matmul(
        self, x: Array, w: View, ids: Array, activation: str | None, bias: Array | None, out: Array | None,
        dtype: DType | None, check_ids: bool,
    ) -> NoReturn:  # fmt: skip
        """UnsupportedError."""
        raise _no_experts(w)

    def moe(
        self, x: Array, gate_up: Weights | Sequence[Weights], down: View, ids: Array, weights: Array, activation: str,
        biases: Sequence[Array | None] | None, out: Array | None, dtype: DType | None, check_ids: bool,
    ) -> NoReturn:  # fmt: skip
        """UnsupportedError."""
        raise _no_experts(down)


PRODUCTS[Reordered] = PRODUCTS[Scaled] = ViewProducts()


def _no_experts(w: View) -> UnsupportedError:
    return UnsupportedError(f"{w!r} is a view of packed weights, which matmul, matmul_many and gated alone take")


def _beside(y: Any, added: Array) -> Any:
    """A bias or residual as float32, of y's library and on y's device."""
    torch = torch_of(y)
    if torch is not None:
        return torch.as_tensor(added, device=y.device).float()
    read = as_cupy(added, "bias") if on_cuda(y) else as_numpy(added, "bias")
    return read.astype(np.float32)


def handed_back(y: Any, out: Any, dtype: DType | None) -> Any:
    """y, float32 of any library, in `out`, or as a new array of the dtype."""
    torch = torch_of(y)
    if out is None:
        name = float_name(np.float32 if dtype is None else dtype)
        return y.astype(float_dtype(name), copy=False) if torch is None else y.to(getattr(torch, name))
    check_out(out, tuple(y.shape), dtype)
    if torch_of(out) is not None:
        check_no_grad(out)
        out.copy_(torch_of(out).as_tensor(y, device=out.device))
        return out
    if on_cuda(out):
        as_cupy(out, "out")[...] = as_cupy(y, "y")
        return out
    memory = as_target(out)
    memory[...] = as_numpy(y, "y")
    return written(out, memory)


def gated_apart(
    x: Array, gate: Packed, gated: Gated, activation: str | None, bias: Array | None, out: Array | None,
    dtype: DType | None,
) -> Any:  # fmt: skip
    """`qgemm.gated` by two products and the function of both, where one or both of the weights are views."""
    if not isinstance(gated.up, Packed):
        raise misplaced(x, gated.up)
    y_gate = multiplied(x, gate, activation, bias)
    y_up = multiplied(x, gated.up, activation, gated.bias)
    y = backend("cuda" if on_cuda(y_gate) else "cpu").gated(gated.function, y_gate, y_up)
    return handed_back(y, out, dtype)
