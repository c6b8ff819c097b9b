"""Codebooks: the levels that codes stand for, and the search for the level nearest to a value.

A level is found by counting the edges below the value. Edges are exact: no rounding of a midpoint sends a value to
the wrong side, and a value just between two levels goes where the rule for ties sends it.
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
    """A codebook as a read-only copy [2^bits] float32, in its order; CodebookError if it cannot be one."""
    try:
        given = np.asarray(codebook)
    except ValueError as error:  # rows of different lengths
        raise CodebookError(f"{who}: a codebook is a list of numbers: {error}") from None
    if given.dtype.kind not in "fiu" and given.dtype.name != "bfloat16":
        raise CodebookError(f"{who}: a codebook holds numbers, got {given.dtype}")
    with np.errstate(over="ignore"):  # beyond float32 is infinite, and refused below
        levels = given.astype(np.float32)
    if levels.shape != (2**bits,):
        raise CodebookError(f"{who}: a codebook holds {2**bits} levels, got an array of shape {levels.shape}")
    if not np.isfinite(levels).all():
        index = int(np.isfinite(levels).argmin())
        raise CodebookError(f"{who}: a level must be finite in float32, level {index} is {levels[index]:g}")
    levels.flags.writeable = False
    return levels


def edges(levels: Floats, upward: NDArray[np.bool_], number: type[AnyFloat]) -> NDArray[AnyFloat]:
    """Ascending distinct levels [n] -> edges [n - 1]: the level nearest to v is number sum(v > edges).

    number: the type of v and of the edges. upward [n - 1]: whether a v just between two levels goes to the upper one.
    An edge is the largest number of its type that goes down, so the answer is exact for every v.
    """
    found = []
    for low, high, up in zip(levels[:-1], levels[1:], upward, strict=True):
        middle = (Fraction(float(low)) + Fraction(float(high))) / 2
        edge = number(float(middle))
        while Fraction(float(edge)) > middle or (up and Fraction(float(edge)) == middle):
            edge = np.nextafter(edge, number(-np.inf))
        found.append(edge)
    return np.array(found, number)


def search(codebook: Floats) -> tuple[Floats, Bytes]:
    """Codebook [codes] -> of its n distinct levels, in ascending order, the edges [n - 1] and the lowest codes [n]."""
    return _search(codebook.tobytes())


@lru_cache(64)
def _search(codebook: bytes) -> tuple[Floats, Bytes]:
    levels, codes = np.unique(np.frombuffer(codebook, np.float32), return_index=True)
    return edges(levels, codes[1:] < codes[:-1], np.float32), codes.astype(np.uint8)


LEAST = np.float32(1e-8)  # a block without a larger magnitude is divided by this, so that zeros are
SCALE = 2.0**64  # of edges and values, so that no product of theirs underflows
BINS = 128  # a power of two, for 65 of them
SLACK = 2.0**-18  # of values; more than the roundings of 32 / d and of what is multiplied by it


def below_bins(between: Floats) -> tuple[NDArray[np.intp], bool]:
    """Edges [n] -> of each bin of values in -1..1 how many edges are in bins before it, [BINS]; whether no bin has two.

    A value v is in bin 32 + round(32 v), or next to it if within SLACK of it. So v must be compared with the edges of
    its own bin only: those before it are below v, those after it are not.
    """
    ends = (np.arange(BINS + 1) - BINS / 4 - 0.5) / (BINS / 4)
    near = between.astype(np.float64)
    before, through = np.searchsorted(near, ends[:-1] - SLACK), np.searchsorted(near, ends[1:] + SLACK)
    return before, bool((through - before <= 1)[: BINS // 2 + 1].all())


def product_edges(between: Floats) -> tuple[Floats, Floats]:
    """Edges [n] in -2..2 -> e [n], h [n]: float32(x / d) is above an edge where (e * d - SCALE * x) + h * d < 0.

    For float32 x and d, LEAST <= d < 2^16, either bracket rounded once. With c, the middle between the edge and the
    next float, the quotient is rounded to more than the edge where x > c * d. h is c - edge, less its last place where
    c itself is rounded up. For x / d from the edge to the next float, the difference has 24 bits and is not rounded;
    elsewhere it is too far from 0 for h to change its sign.
    """
    following = np.nextafter(between, np.float32(np.inf)).astype(np.float64)
    halves = SCALE / 2 * (following - between)
    halves[between.view(np.uint32) % 2 == 1] *= 1 - 2.0**-24
    return between * np.float32(SCALE), halves.astype(np.float32)


def short_edges(between: Floats) -> Floats | None:
    """Edges [n] in -2..2 -> e [n], if there are such: float32(x / d) is above an edge where e * d - x < 0.

    For x and d below 2^16 of at most 11 bits, which float16 and bfloat16 have, and d = LEAST. With c as above: no x is
    c * d, which has more bits or is less than any, so the largest x below c * d must be the largest up to e * d, with
    each of 2^10 + 1 divisors. e is the edge or the next float: of quotients of 11 bits, one at most lies between them.
    """
    divisors = np.append(np.arange(1024.0, 2048.0), float(LEAST))

    def largest(e: NDArray[np.float64]) -> NDArray[np.float64]:
        mantissa, exponent = np.frexp(e[:, None] * divisors)
        return np.asarray(np.ldexp(np.floor(2048 * mantissa), exponent))

    following = np.nextafter(between, np.float32(np.inf))
    low, high = between.astype(np.float64), following.astype(np.float64)
    wanted = largest((low + high) / 2)
    low_fits, high_fits = ((largest(e) == wanted).all(axis=1) for e in (low, high))
    low_fits |= (low <= 0) & (low >= -(2.0**-149))  # no quotient is between those: the least is 2^-133 / 2^16
    return np.where(low_fits, between, following) if (low_fits | high_fits).all() else None


def nearest(values: Floats, codebook: Floats) -> Bytes:
    """Values [...] -> the code of the level nearest to each, [...]; the lowest code of those equally near.

    Exact, for codebooks of any order, with duplicates as well. NaN gets any code.
    """
    between, codes = search(codebook)
    number = np.zeros(values.shape, np.uint8)
    for edge in between:  # 15 comparisons are 15x faster than np.searchsorted, which guesses branches (NumPy 2.4)
        number += values > edge
    return number if np.array_equal(codes, np.arange(len(codes))) else codes.take(number)
