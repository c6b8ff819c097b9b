"""Weights as numbers on the host: whole tensors, and the rows that an embedding asks for."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from qgemm.codec.format import float_dtype
from qgemm.tensor import Tensor

from . import native

LEAST = 1 << 16  # weights: NumPy decodes fewer before a compiler has started


def dequantize(w: Tensor, dtype: DTypeLike) -> NDArray[Any]:
    """See `Tensor.dequantize`."""
    if w.ndim and prod(w.shape) >= LEAST and w.format.levels is not None:
        values = np.empty((prod(w.shape[:-1]), w.shape[-1]), float_dtype(dtype))
        if native.decode(w.format, _rows(w), None, values):
            return values.reshape(w.shape)
    return w.format.dequantize(w.blocks, dtype)


def gather(w: Tensor, index: NDArray[np.int64], values: NDArray[Any]) -> None:
    """Rows of a matrix by an index [n] of rows that it has, as values [n, K], contiguous, of a float dtype."""
    if not values.size or native.decode(w.format, _rows(w), np.ascontiguousarray(index), values):
        return
    values[...] = w.format.dequantize(w.blocks[index], values.dtype)


def _rows(w: Tensor) -> NDArray[Any]:
    blocks = w.blocks
    return blocks.reshape(-1, blocks.shape[-1])
