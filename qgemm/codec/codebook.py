"""Codebooks: the levels that codes stand for, and the search for the level nearest to a value.

The number of edges below a value is the number of its nearest level. Edges are exact: no rounding of a midpoint sends a
value to the wrong side, and the rule for ties decides a value halfway between two levels.
"""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache
from statistics import NormalDist
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from qgemm.errors import CodebookError

from .packing import Bytes, Floats

AnyFloat = TypeVar("AnyFloat", np.float32, np.float64)


def normal_float(bits: int) -> Floats:
    """2^bits levels, ascending from -1 to 1: the means of N(0, 1) in bins of equal probability, over the largest.

    The mean between the quantiles p and q of the distribution is (density(p) - density(q)) / (bin's probability).
    """
    normal, bins = NormalDist(), 2**bits
    density = [normal.pdf(normal.inv_cdf(i / bins)) for i in range(bins // 2, bins)] + [0.0]
    upper = -np.diff(density)
    upper /= upper[-1]
    return np.concatenate([-upper[::-1], upper]).astype(np.float32)  # negatives of each other bit for bit


def checked(codebook: ArrayLike, bits: int, who: str) -> Floats:
    """A codebook as a read-only copy [2^bits] float32 in the same order; CodebookError for an array that is none."""
    try:
        array = np.asarray(codebook)
    except ValueError as error:  # rows of different lengths
        raise CodebookError(f"{who}: a codebook is a list of numbers: {error}") from None
    if array.dtype.kind not in "fiu" and array.dtype.name != "bfloat16":
        raise CodebookError(f"{who}: a codebook holds numbers, got {array.dtype}")
    with np.errstate(over="ignore"):  # a level beyond float32 becomes infinite and is refused below
        levels = array.astype(np.float32)
    if levels.shape != (2**bits,):
        raise CodebookError(f"{who}: a codebook holds {2**bits} levels, got an array of shape {levels.shape}")
    if not np.isfinite(levels).all():
        index = int(np.isfinite(levels).argmin())
        raise CodebookError(f"{who}: a level must be finite in float32, level {index} is {levels[index]:g}")
    levels.flags.writeable = False
    return levels


def edges(levels: Floats, upward: NDArray[np.bool_], number: type[AnyFloat]) -> NDArray[AnyFloat]:
    """Ascending distinct levels [n] -> edges [n - 1]: the level nearest to v is number sum(v > edges).

    number: the type of v and of the edges. upward [n - 1]: whether a v halfway between two levels goes to the upper
    one. An edge is the largest number of its type that belongs to the lower level, so the answer is exact for every v.
    """
    values = []
    for low, high, up in zip(levels[:-1], levels[1:], upward, strict=True):
        middle = (Fraction(float(low)) + Fraction(float(high))) / 2
        edge = number(float(middle))
        while Fraction(float(edge)) > middle or (up and Fraction(float(edge)) == middle):
            edge = np.nextafter(edge, number(-np.inf))
        values.append(edge)
    return np.array(values, number)


def search(codebook: Floats) -> tuple[Floats, Bytes]:
    """Codebook [codes] with n distinct levels -> their edges [n - 1] and lowest codes [n], levels ascending."""
    return _search(codebook.tobytes())


@lru_cache(64)
def _search(codebook: bytes) -> tuple[Floats, Bytes]:
    levels, codes = np.unique(np.frombuffer(codebook, np.float32), return_index=True)
    return edges(levels, codes[1:] < codes[:-1], np.float32), codes.astype(np.uint8)


MIN_ABSMAX = np.float32(1e-8)  # the least divisor of a block, so that blocks of zeros can be divided
SCALE = 2.0**64  # multiplies edges and values, so that none of their products underflows
BINS = 128  # 65 rounded up to a power of two
SLACK = 2.0**-18  # exceeds the rounding errors of 32 / d and of its product with a value


def below_bins(between: Floats) -> tuple[NDArray[np.intp], bool]:
    """Edges [n] -> the number of edges before each bin of values in -1..1, [BINS], and whether no bin has two edges.

    A value v is in bin 32 + round(32 v), or in a neighbour within SLACK of it. So v must be compared with the edges of
    its own bin only: edges before the bin are below v, edges after it are not.
    """
    ends = (np.arange(BINS + 1) - BINS / 4 - 0.5) / (BINS / 4)
    near = between.astype(np.float64)
    before, through = np.searchsorted(near, ends[:-1] - SLACK), np.searchsorted(near, ends[1:] + SLACK)
    return before, bool((through - before <= 1)[: BINS // 2 + 1].all())


def product_edges(between: Floats) -> tuple[Floats, Floats]:
    """Edges [n] in -2..2 -> e [n], h [n]: float32(x / d) is above an edge where (e * d - SCALE * x) + h * d < 0.

    For float32 x and d, MIN_ABSMAX <= d < 2^16, either bracket rounded once. With c, the middle between the edge and
    the next float, the quotient is rounded to more than the edge where x > c * d. h is c - edge, less its last place
    where c itself is rounded up. For x / d from the edge to the next float, the difference has 24 bits and is not
    rounded; elsewhere it is too far from 0 for h to change its sign.
    """
    following = np.nextafter(between, np.float32(np.inf)).astype(np.float64)
    halves = SCALE / 2 * (following - between)
    halves[between.view(np.uint32) % 2 == 1] *= 1 - 2.0**-24
    return between * np.float32(SCALE), halves.astype(np.float32)


def short_edges(between: Floats) -> Floats | None:
    """Edges [n] in -2..2 -> e [n] such that float32(x / d) is above an edge where e * d - x < 0; else None.

    For x and d below 2^16 of at most 11 bits, which float16 and bfloat16 have, and d = MIN_ABSMAX. With c as above: no
    x is c * d, which has more bits or is less than any x, so the largest x below c * d must be the largest up to e * d,
    for each of 2^10 + 1 divisors. e is the edge or the next float: at most one quotient of 11 bits lies between them.
    """
    divisors = np.append(np.arange(1024.0, 2048.0), float(MIN_ABSMAX))

    def largest(e: NDArray[np.float64]) -> NDArray[np.float64]:
        mantissa, exponent = np.frexp(e[:, None] * divisors)
        return np.asarray(np.ldexp(np.floor(2048 * mantissa), exponent))

    following = np.nextafter(between, np.float32(np.inf))
    low, high = between.astype(np.float64), following.astype(np.float64)
    target = largest((low + high) / 2)
    low_fits, high_fits = ((largest(e) == target).all(axis=1) for e in (low, high))
    low_fits |= (low <= 0) & (low >= -(2.0**-149))  # no quotient lies in this range: the least is 2^-133 / 2^16
    return np.where(low_fits, between, following) if (low_fits | high_fits).all() else None


def nearest(values: Floats, codebook: Floats) -> Bytes:
    """Values [...] -> codes [...] of their nearest levels; the lowest code of levels that are equally near.

    Exact for codebooks in any order, also with duplicates. NaN gets any code.
    """
    between, codes = search(codebook)
    number = np.zeros(values.shape, np.uint8)
    for (
        edge
    ) in between:  # 15 comparisons are 15x faster than np.searchsorted with its mispredicted branches (NumPy 2.4)
        number += values > edge
    return number if np.array_equal(codes, np.arange(len(codes))) else codes.take(number)
