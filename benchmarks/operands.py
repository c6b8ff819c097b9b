"""Random operands of GPU products, x, dense and packed weights, and the check of a product against float64."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import hypot, log, sqrt
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qgemm.cli.timing import ROTATE, Call, Cublas, Loop, copies_of, rotation
from qgemm.cli.weights import random_blocks, repeated, repeated_rows
from qgemm.codec.float_types import float_dtype
from qgemm.codec.format import Format
from qgemm.codec.group_activations import E4M3, INTEGER
from qgemm.cuda.tensor import DeviceTensor
from qgemm.errors import UnsupportedError
from qgemm.tensor import Tensor

from . import baselines

__all__ = ["ROTATE", "Matrix", "Operands", "check", "dense_copies", "matrix", "products", "tolerance", "wide"]

BASE_ROWS = 512  # random rows packed on the host; a larger matrix repeats them
SAMPLE = 256  # columns of y that are compared with float64
FRACTION_BITS = {"float16": 10, "bfloat16": 7}
# Relative RMS error of rounding random numbers, uniform in half a unit of the last place, with mantissas in [1, 2)
# that are uniform in their logarithm: their mean square is 3 / (2 ln 2).
ROUNDING = {name: 2.0 ** -(bits + 1) / sqrt(3) / sqrt(1.5 / log(2)) for name, bits in FRACTION_BITS.items()}
# A product rounds W and y, a K-quant scale and minimum of W as well: 1.4 to 2.1 roundings in all by random blocks, and
# 3.8 by blocks of models.
ROUNDINGS = 5
# Relative RMS error of rounding x to eight bits, x and W to eight bits, both to the 3 bits of e4m3's fraction.
QUANTIZED = {"a16": 0.0, "a8": 2e-2, **dict.fromkeys(INTEGER, 2e-2), E4M3: 3e-2}

Product = Callable[[Any, DeviceTensor, Any], Any]  # x, w, y: y = x @ w.T


def tolerance(activation: str, x: str) -> float:
    """The largest relative RMS error of a right product, by its activation and the type of x and y."""
    return hypot(QUANTIZED[activation], ROUNDINGS * ROUNDING[x])


class Matrix(NamedTuple):
    """The packed weights of one format and shape: rotating copies, and sampled rows of the first in float64."""

    copies: list[DeviceTensor]
    rows: NDArray[np.int64]
    sample: Any
    read: Loop
    packed: int  # bytes of the blocks, without padding


class Operands:
    """The data that products of one shape share: x of most rows, dense weights by type, packed weights by format.

    failures: a line for each format that could not be packed; it has no matrix.
    """

    def __init__(
        self, stream: Any, shape: tuple[int, int], formats: Iterable[Format], types: Iterable[str], m: int, rotate: int
    ) -> None:
        import cupy

        self.shape, rng = shape, np.random.default_rng(0)
        self._x = cupy.asarray(rng.standard_normal((m, shape[1]), np.float32))
        self.dense = {x: dense_copies(shape, rng, rotate, x) for x in types}
        self.matrices: dict[str, Matrix] = {}
        self.failures: list[str] = []
        self.read_us: dict[str, float] = {}  # by format, once it was measured
        for fmt in formats:
            try:
                self.matrices[fmt.name] = matrix(stream, fmt, shape, rng, rotate)
            except Exception as error:  # a format that fails costs its rows alone
                self.failures.append(f"{fmt} N={shape[0]} K={shape[1]}: {error}")

    def x(self, m: int, dtype: str) -> Any:
        """The first m rows of x in a type."""
        return self._x[:m].astype(float_dtype(dtype))


def matrix(stream: Any, fmt: Format, shape: tuple[int, int], rng: np.random.Generator, rotate: int) -> Matrix:
    """Random packed weights. Copies hold the same rows in different orders, so that no two reads are alike."""
    import cupy

    n, k = shape
    base_rows = min(n, BASE_ROWS)
    if n % base_rows:
        raise UnsupportedError(f"N = {n} is not a multiple of {BASE_ROWS}, the rows that a large matrix repeats")
    base = Tensor(fmt, (base_rows, k), random_blocks(fmt, base_rows, k, rng)).to_device()
    packed = n * k // fmt.weights * fmt.block_bytes
    copies = [repeated_rows(base, shape, shift) for shift in range(copies_of(packed, rotate))]
    picked = np.sort(rng.choice(n, min(n, SAMPLE), replace=False))
    sample = copies[0].dequantize(np.float32)[cupy.asarray(picked)].astype(np.float64)
    cupy.cuda.Device().synchronize()
    return Matrix(copies, picked, sample, baselines.read(stream, [copy.data for copy in copies]), packed)


def dense_copies(shape: tuple[int, int], rng: np.random.Generator, rotate: int, dtype: str) -> list[Any]:
    """Random dense weights [N, K] for cuBLAS, of the same total size: their bits as 16-bit integers."""
    import cupy

    n, k = shape
    base_rows = min(n, BASE_ROWS)
    base = cupy.asarray(rng.standard_normal((base_rows, k), np.float32) / 32).astype(float_dtype(dtype))
    return [repeated(base.view(np.int16), n // base_rows, shift) for shift in range(copies_of(2 * n * k, rotate))]


def products(multiply: Product, x: Any, w: Matrix, y: Any) -> list[Call]:
    """y = x @ copy.T for each copy in turn."""
    turns = rotation(w.copies, w.packed, 2 * y.size * x.shape[1])
    return [lambda c=c: multiply(x, c, y) for c in turns]  # type: ignore[misc]


def dequantized(cublas: Cublas) -> Product:
    """The product by decoding the whole matrix to the type of x, then cuBLAS."""
    return lambda x, w, y: cublas(x, w.dequantize(x.dtype), y)


def check(stream: Any, multiply: Product, x: Any, w: Matrix, y: Any, tolerance: float) -> float:
    """The relative RMS error of a product against float64; ArithmeticError beyond `tolerance` or for a hole in y."""
    import cupy

    poison(y)
    cupy.cuda.Device().synchronize()
    with stream:
        multiply(x, w.copies[0], y)
    stream.synchronize()
    values = wide(y)
    holes = int(cupy.count_nonzero(~cupy.isfinite(values)))
    exact = wide(x).astype(np.float64) @ w.sample.T
    off = values[:, cupy.asarray(w.rows)].astype(np.float64) - exact
    error = float(cupy.sqrt((off**2).mean() / (exact**2).mean()))
    if holes or not error <= tolerance:
        raise ArithmeticError(f"wrong product: relative RMS error {error:.3g}, {holes} outputs not finite")
    return float(f"{error:.3g}")


def poison(y: Any) -> None:
    """Fill an array with NaN of any floating type: all bits are set."""
    y.view(np.uint8).fill(0xFF)


def wide(array: Any) -> Any:
    """The numbers of an array as float32; CuPy computes with no bfloat16."""
    if array.dtype.name != "bfloat16":
        return array.astype(np.float32)
    return (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
