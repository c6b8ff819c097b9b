"""Weights as numbers on the host: whole tensors, and rows of a matrix, as an embedding reads them."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qgemm.codec.float_types import DType
from qgemm.codec.format import float_dtype
from qgemm.tensor import Tensor

from . import native

MIN_WEIGHTS = 1 << 16  # NumPy decodes fewer before a compiler has started


def dequantize(w: Tensor, dtype: DType) -> NDArray[Any]:
    """The weights [..., N, K] of `Tensor.dequantize`, by C where that is faster."""
    if w.ndim and prod(w.shape) >= MIN_WEIGHTS and w.format.levels is not None:
        values = np.empty((prod(w.shape[:-1]), w.shape[-1]), float_dtype(dtype))
        if native.decode(w.format, _rows(w), None, values):
            return values.reshape(w.shape)
    return w.format.dequantize(w.blocks, dtype)


def gather(w: Tensor, index: NDArray[np.int64], dtype: DType) -> NDArray[Any]:
    """Rows of a matrix by an index of rows that it has, as new values [*index.shape, K]."""
    flat = index.reshape(-1)
    values = np.empty((flat.size, w.shape[1]), float_dtype(dtype))
    if values.size and not native.decode(w.format, _rows(w), np.ascontiguousarray(flat), values):
        values[...] = w.format.dequantize(w.blocks[flat], values.dtype)
    return values.reshape(*index.shape, w.shape[1])


def _rows(w: Tensor) -> NDArray[Any]:
    blocks = w.blocks
    return blocks.reshape(-1, blocks.shape[-1])
