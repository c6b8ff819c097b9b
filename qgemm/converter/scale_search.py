"""The search for better scales, over ranges of a tensor that start and end at any block.

The search of a block weighs errors by the mean square of the whole row (codec/search.py). A row longer than a range is
read once for that and then searched in parts, so that memory stays bounded for rows of any length.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from qgemm.codec.format import CHUNK, Blocks, Format
from qgemm.codec.packing import Floats
from qgemm.codec.search import search, sum_of_squares
from qgemm.files.imatrix import Importance
from qgemm.locks import new_lock

from .weight import Weight

EQUAL_IMPORTANCE = np.ones(1, np.float32)  # for every column, where there is no importance matrix


def block_search(weight: Weight, fmt: Format, importance: Importance | None) -> Callable[[Floats, int], Blocks]:
    """(weights of a range, index of the first) -> blocks. importance: of the weight's columns, as planned."""
    *_, n, k = (1, *weight.shape)
    means = _MeanSquares(weight, k)

    def column_importance(row: int, start: int, stop: int) -> Floats:
        return EQUAL_IMPORTANCE if importance is None else importance_of_columns(weight, importance, row, start, stop)

    def row_importance(first: int, rows: int) -> Floats:
        """The importance of the columns of whole rows, which may belong to several matrices."""
        numbers = np.arange(first, first + rows) // n
        matrices, indices = np.unique(numbers, return_inverse=True)
        if importance is None or len(matrices) == 1:
            return column_importance(first, 0, k)
        return np.stack([column_importance(int(matrix) * n, 0, k) for matrix in matrices])[indices]

    def encode(x: Floats, start: int) -> Blocks:
        x = x.reshape(-1)
        blocks, offset = [], 0
        while offset < x.size:
            row, column = divmod(start + offset, k)
            rows = (x.size - offset) // k if column == 0 else 0
            size = rows * k or min(k - column, x.size - offset)
            part = x[offset : offset + size]
            if rows:
                blocks.append(search(fmt, part.reshape(rows, k), row_importance(row, rows)))
            else:
                blocks.append(search(fmt, part[None], column_importance(row, column, column + size), means.of_row(row)))
            offset += size
        return blocks[0] if len(blocks) == 1 else np.concatenate(blocks)

    return encode


def importance_of_columns(weight: Weight, importance: Importance, row: int, start: int, stop: int) -> Floats:
    """The importance of columns of a row; each matrix of several has its own."""
    *_, n, k = (1, *weight.shape)
    first = row // n * k if weight.size > n * k else 0
    return importance.read(first + start, first + stop)


def importance_of_range(weight: Weight, importance: Importance, start: int, stop: int) -> Floats:
    """The importance of each weight of a range or, if it is whole rows of one matrix, of the columns of a row."""
    *_, n, k = (1, *weight.shape)
    first, last = start // k, -(-stop // k)
    if start % k == stop % k == 0 and first // n == (last - 1) // n:
        return importance_of_columns(weight, importance, first, 0, k)
    ends = ((row, max(start - row * k, 0), min(stop - row * k, k)) for row in range(first, last))
    return np.concatenate([importance_of_columns(weight, importance, *end) for end in ends])


class _MeanSquares:
    """The mean square of each row, computed on first use."""

    def __init__(self, weight: Weight, k: int) -> None:
        self.weight, self.k = weight, k
        self.cache: dict[int, np.float32] = {}
        self.lock = new_lock()  # several threads may search parts of one row

    def of_row(self, row: int) -> np.float32:
        """The mean square of a row, which is read in parts."""
        with self.lock:
            if row not in self.cache:
                assert self.weight.values is not None
                step = max(1, CHUNK // self.weight.step) * self.weight.step
                total, end = np.float32(0), (row + 1) * self.k
                for start in range(row * self.k, end, step):
                    total = sum_of_squares(self.weight.values(start, min(start + step, end)), total)
                self.cache[row] = total / np.float32(self.k)
            return self.cache[row]
