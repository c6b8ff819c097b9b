"""Scales of encoders, and the extremes that they derive from, with ggml's choice among equal values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .format import Blocks, Levels
from .packing import Floats, pick, reciprocal, round_away, to_codes, to_float16


class StoredScale(NamedTuple):
    """How a block stores its scale: the field's dtype, the suffix of a format's name, the codec from and to float32,
    and the least magnitude of a scale that is refused."""

    dtype: str
    suffix: str
    encode: Callable[[Floats], NDArray[Any]]
    decode: Callable[[NDArray[Any]], Floats]
    limit: float


def absmax(x: Floats) -> Floats:
    """Values [n, w] -> the largest magnitude of each row, [n]."""
    magnitudes = np.ascontiguousarray(x).view(np.int32) & 0x7FFFFFFF  # as bits they compare like numbers
    return folded(np.maximum, magnitudes).view(np.float32)


def signed_absmax(x: Floats) -> Floats:
    """Values [n, w] -> the value of largest magnitude in each row, [n]: the first wins, +0 if all are zero."""
    least, greatest = bounds(x)
    largest = np.where(greatest > -least, greatest, least)
    tied = np.flatnonzero(greatest == -least)
    if tied.size:
        rows = x[tied]
        largest[tied] = pick(rows, np.abs(rows).argmax(axis=1))
    return np.where(largest == 0, np.float32(0), largest)


def extremes(x: Floats) -> tuple[Floats, Floats]:
    """Values [n, w] -> the least and the greatest of each row, [n] each: the first wins among -0 and +0."""
    least, greatest = bounds(x)
    for extreme, index in ((least, np.argmin), (greatest, np.argmax)):
        zeros = np.flatnonzero(extreme == 0)
        if zeros.size:
            rows = x[zeros]
            extreme[zeros] = pick(rows, index(rows, axis=1))
    return least, greatest


def bounds(x: Floats) -> tuple[Floats, Floats]:
    """Values [n, w], w a power of two -> the least and the greatest of each row, [n] each, with any sign if zero.

    They are compared as integers: over strided operands NumPy 2.4 compares integers twice as fast as floats.
    """
    numbers = in_order(np.ascontiguousarray(x).view(np.int32))
    least, greatest = (in_order(folded(op, numbers)).view(np.float32) for op in (np.minimum, np.maximum))
    return least, greatest


def in_order(bits: NDArray[np.int32]) -> NDArray[np.int32]:
    """The bits of floats as integers in the order of the floats, and back: below zero all but the sign are inverted."""
    ordered = bits >> 31
    ordered &= 0x7FFFFFFF
    ordered ^= bits
    return ordered


def folded(least_or_greatest: np.ufunc, x: NDArray[np.int32]) -> NDArray[np.int32]:
    """Numbers [n, w], w a power of two -> the least or the greatest of each row, [n].

    Neighbours are compared until one is left: 4x faster than reductions of short rows (NumPy 2.4).
    """
    rest = x.reshape(-1)
    while rest.size > len(x):
        rest = least_or_greatest(rest[0::2], rest[1::2])
    return rest


def with_minimum(x: Floats, top: int) -> Levels:
    """Values [n, w] -> codes [n, w] uint8 in 0..top, d = (max - min) / top and m = min, [n] each."""
    least, greatest = extremes(x)
    d = (greatest - least) / np.float32(top)
    return Levels(to_codes((x - least[:, None]) * reciprocal(d)[:, None] + np.float32(0.5), top), d, least)


def signed_codes(x: Floats) -> tuple[NDArray[np.int8], Floats]:
    """Values [n, w] -> codes q [n, w], d [n]: d = absmax / 127, q = x / d rounded half away from zero."""
    d = absmax(x) / np.float32(127)
    return to_codes(round_away(x * reciprocal(d)[:, None]), 127, np.int8), d


def blocks_of(levels: Levels, dtype: np.dtype[Any]) -> Blocks:
    """New blocks [n] with the scale [n] as d and the minimum [n], if any, as m; the caller fills in the codes."""
    assert levels.scale is not None
    blocks = np.empty(len(levels.codes), dtype)
    blocks["d"] = to_float16(levels.scale)
    if levels.minimum is not None:
        blocks["m"] = to_float16(levels.minimum)
    return blocks


def ternary(x: Floats, lost: int) -> tuple[NDArray[np.uint8], NDArray[np.float16]]:
    """Values [n, w] -> codes 0, 1, 2 for -d, 0, d [n, w], and d [n], the largest magnitude of each row.

    lost: the code of a weight whose quotient by a subnormal d is not finite: the result of C's conversion.
    """
    largest = absmax(x)
    with np.errstate(all="ignore"):  # callers refuse values that are not finite
        signs = round_away(x * reciprocal(largest)[:, None])
    return to_codes(signs + np.float32(1 - lost), 2 - lost) + np.uint8(lost), to_float16(largest)
