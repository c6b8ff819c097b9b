"""The extremes from which the encoders derive their scales, with ggml's choice among equals."""

from __future__ import annotations

import numpy as np

from ..bits import Floats, at


def absmax(x: Floats) -> Floats:
    """Values [n, w] -> the largest magnitude of each row, [n]."""
    return folded(np.maximum, np.abs(x))


def signed_absmax(x: Floats) -> Floats:
    """Values [n, w] -> the value of largest magnitude in each row, [n]: the first wins, +0 if all are zero."""
    least, greatest = folded(np.minimum, x), folded(np.maximum, x)
    largest = np.where(greatest > -least, greatest, least)
    tied = np.flatnonzero(greatest == -least)
    if tied.size:
        rows = x[tied]
        largest[tied] = at(rows, np.abs(rows).argmax(axis=1))
    return np.where(largest == 0, np.float32(0), largest)


def extremes(x: Floats) -> tuple[Floats, Floats]:
    """Values [n, w] -> the least and the greatest of each row, [n] each: the first wins among -0 and +0."""
    least, greatest = folded(np.minimum, x), folded(np.maximum, x)
    for found, index in ((least, np.argmin), (greatest, np.argmax)):
        zeros = np.flatnonzero(found == 0)
        if zeros.size:
            rows = x[zeros]
            found[zeros] = at(rows, index(rows, axis=1))
    return least, greatest


def folded(least_or_greatest: np.ufunc, x: Floats) -> Floats:
    """Values [n, w], w a power of two -> the least or the greatest of each row, [n], with any sign if it is zero.

    Neighbours are compared until one is left: 4x faster than reductions of short rows (NumPy 2.4).
    """
    n = len(x)
    found = np.ascontiguousarray(x).reshape(-1)
    while found.size > n:
        found = least_or_greatest(found[0::2], found[1::2])
    return found
