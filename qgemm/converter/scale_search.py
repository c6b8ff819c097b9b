"""The search for better scales, over ranges of a tensor that begin and end anywhere between blocks.

Each block's search weighs by the mean square of its whole row (codec/search.py). A row longer than a range is gone
through once for that, and then searched in parts, so that memory is bounded for rows of any length.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock

import numpy as np

from qgemm.codec.format import CHUNK, Blocks, Format
from qgemm.codec.packing import Floats
from qgemm.codec.search import search, sum_of_squares
from qgemm.files.imatrix import Importance

from .weight import Weight

ALIKE = np.ones(1, np.float32)  # the importance of every column where none is known


def searcher(weight: Weight, fmt: Format, importance: Importance | None) -> Callable[[Floats, int], Blocks]:
    """(weights of a range, the number of its first) -> blocks; importance: of the weight's columns, as planned."""
    *_, n, k = (1, *weight.shape)
    means = _MeanSquares(weight, k)

    def of_columns(row: int, start: int, stop: int) -> Floats:
        return ALIKE if importance is None else columns_of(weight, importance, row, start, stop)

    def of_rows(first: int, rows: int) -> Floats:
        """The importance of whole rows, of one matrix or several."""
        numbers = np.arange(first, first + rows) // n
        each, which = np.unique(numbers, return_inverse=True)
        if importance is None or len(each) == 1:
            return of_columns(first, 0, k)
        return np.stack([of_columns(int(expert) * n, 0, k) for expert in each])[which]

    def found(x: Floats, start: int) -> Blocks:
        x = x.reshape(-1)
        made, at = [], 0
        while at < x.size:
            row, column = divmod(start + at, k)
            rows = (x.size - at) // k if column == 0 else 0
            size = rows * k or min(k - column, x.size - at)
            part = x[at : at + size]
            if rows:
                made.append(search(fmt, part.reshape(rows, k), of_rows(row, rows)))
            else:
                made.append(search(fmt, part[None], of_columns(row, column, column + size), means.of(row)))
            at += size
        return made[0] if len(made) == 1 else np.concatenate(made)

    return found


def columns_of(weight: Weight, importance: Importance, row: int, start: int, stop: int) -> Floats:
    """The importance of some columns of a row: of several matrices each has its own."""
    *_, n, k = (1, *weight.shape)
    first = row // n * k if weight.size > n * k else 0
    return importance.read(first + start, first + stop)


def range_of(weight: Weight, importance: Importance, start: int, stop: int) -> Floats:
    """The importance of the weights of a range, or, if it is whole rows of one matrix, of a row."""
    *_, n, k = (1, *weight.shape)
    first, last = start // k, -(-stop // k)
    if start % k == stop % k == 0 and first // n == (last - 1) // n:
        return columns_of(weight, importance, first, 0, k)
    ends = ((row, max(start - row * k, 0), min(stop - row * k, k)) for row in range(first, last))
    return np.concatenate([columns_of(weight, importance, *end) for end in ends])


class _MeanSquares:
    """The mean square of each row, found when it is asked for."""

    def __init__(self, weight: Weight, k: int) -> None:
        self.weight, self.k = weight, k
        self.known: dict[int, np.float32] = {}
        self.lock = Lock()  # many threads have parts of one row

    def of(self, row: int) -> np.float32:
        """That of a row, of which a few weights are in memory at a time."""
        with self.lock:
            if row not in self.known:
                assert self.weight.values is not None
                most = max(1, CHUNK // self.weight.step) * self.weight.step
                total, end = np.float32(0), (row + 1) * self.k
                for start in range(row * self.k, end, most):
                    total = sum_of_squares(self.weight.values(start, min(start + most, end)), total)
                self.known[row] = total / np.float32(self.k)
            return self.known[row]
