"""Packed: the base of weights on the host and on a device, and the operators by which arrays meet them.

x @ w.T         is qgemm.matmul(x, w), for arrays of NumPy, CuPy and torch
x @ w, w.dtype  say what to write instead
"""

from __future__ import annotations

from typing import Any, NoReturn

from .arguments import Array
from .backend import backend_for
from .codec.format import Format

PRIORITY = 1000.0  # above that of arrays, which then leave `@` to the operand on their right


class Packed:
    """Weights [..., N, K] packed along K in the blocks of a format: base of Tensor and DeviceTensor.

    Products by them are in backend.PRODUCTS, by the class of the weights.
    """

    __array_priority__ = PRIORITY
    format: Format
    shape: tuple[int, ...]
    name: str

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def bpw(self) -> float:
        """Bits per weight, scales included."""
        return self.format.bpw

    @property
    def T(self) -> Transposed:
        """The right operand of x @ w.T, which is `qgemm.matmul(x, w)`; nothing is moved."""
        return Transposed(self)

    @property
    def dtype(self) -> NoReturn:
        """None: AttributeError, since weights in blocks have no NumPy type."""
        reason = f"{self} has no dtype: its weights are packed in blocks of tensor.format"
        raise AttributeError(f"{reason}; tensor.dequantize(dtype) gives them as floats")

    def __matmul__(self, other: object) -> Any:
        if isinstance(other, Transposed):
            return NotImplemented  # prepared activations @ w.T
        raise TypeError(f"{self} is the right operand of a product: write x @ tensor.T, or qgemm.matmul(x, tensor)")

    def __rmatmul__(self, other: object) -> NoReturn:
        raise TypeError(f"{self} has rows along K: write x @ tensor.T, or qgemm.matmul(x, tensor)")

    def _inflated(self, *_: Any, **__: Any) -> NoReturn:
        ways = "x @ tensor.T multiplies by it, tensor.dequantize() gives its weights"
        raise TypeError(f"{self} is not inflated silently: {ways}")

    __array__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _inflated


class Transposed:
    """Packed weights as [K, N], for x @ w.T alone. `T` gives the weights back."""

    __array_priority__ = PRIORITY

    def __init__(self, w: Packed) -> None:
        self.T = w

    @property
    def shape(self) -> tuple[int, ...]:
        """(K, N)."""
        return self.T.shape[::-1]

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return self.T.ndim

    def __rmatmul__(self, x: Array) -> Any:
        return multiplied(x, self.T)

    def __matmul__(self, other: object) -> NoReturn:
        raise TypeError(f"{self} is the right operand of a product: write x @ tensor.T")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """x @ w.T of torch, which without this method spends 16 us on an error before Python asks __rmatmul__."""
        if func.__name__ == "matmul" and not kwargs and type(args[1]) is cls and type(args[0]) is not cls:
            return multiplied(args[0], args[1].T)
        uses = "they are for x @ tensor.T alone; tensor.dequantize().T is an array"
        raise TypeError(f"{func.__name__} takes no transposed weights: {uses}")

    def __array__(self, dtype: Any = None, copy: Any = None) -> NoReturn:
        raise TypeError(f"{self} is no array, it is for x @ tensor.T alone; tensor.dequantize().T is one")

    def __repr__(self) -> str:
        return f"<transposed {self.T!r}>"


def multiplied(
    x: Array, w: Packed, activation: str | None = None, bias: Array | None = None, residual: Array | None = None,
    out: Array | None = None, dtype: Any = None,
) -> Any:  # fmt: skip
    """y of `qgemm.matmul` for weights of any class."""
    products = backend_for(w)
    if products is None:
        raise TypeError(f"{type(w).__name__} has no backend that multiplies by it")
    return products.product(w, x, activation, bias, residual, out, dtype)
