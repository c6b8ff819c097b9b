"""Encoders of the K-quants: groups of a super-block are fitted one by one, then their scales are rounded to integers.

Bytes are those of ggml's C: float32, sums in the order of the weights, candidates in its order. Groups are columns
[weights of a group, groups of all super-blocks], so that a sum over a group is a sum over rows (search.py).

With an importance matrix squared errors weigh importance * sqrt(means * mean square of the super-block + x * x), in
q6_k the importance alone, and the integers of the scale and minimum of a group are searched as well.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .compiled import compilable
from .format import Blocks
from .packing import Bytes, Floats, Halves, pack_sixes, to_float16, unpack_sixes
from .search import MIN_MAGNITUDE, WEIGHTED_STEPS, Fit, Steps, affine, nearest_int, symmetric, total

WEIGHTS = 256
SHARE = 512  # super-blocks at a time: they fit in a cache, and arrays are long enough for NumPy
POLISHED = 5  # passes that move single integers

Codes = NDArray[np.int32]


class Affine(NamedTuple):
    """w = d * sc * q - dmin * m, q in 0..max_code, sc and m in 0..max_scale for each of `groups` groups.

    steps: scales tried without an importance. rooted: without an importance errors weigh sqrt(mean square of the group)
    + |x|, else |x|. means: with an importance, the factor of the mean square of a super-block beside x * x. spills: an
    sc or m beyond max_scale, which can occur where all weights of errors are 0, is stored with all its bits, whose
    upper ones overwrite others, instead of as max_scale.
    """

    max_code: int
    groups: int
    max_scale: int
    steps: Steps
    rooted: bool
    means: float
    spills: bool


class Symmetric(NamedTuple):
    """w = d * sc * (q - zero), sc in -max_scale..max_scale - 1 for each of `groups` groups.

    moved: without an importance single codes are moved instead of trying scales. means: as in Affine; None: errors
    weigh the importance alone, and sc are rounded as without one. least, empty: a super-block whose groups all have
    scales below `least` gets sc = empty, d = 0 and q = 0.
    """

    zero: int
    groups: int
    max_scale: int
    moved: bool
    means: float | None
    least: float
    empty: int


FitAffine = tuple[Halves, Halves, Bytes, Bytes, Bytes]
FitSymmetric = tuple[Halves, NDArray[np.int8], Bytes]
PackAffine = Callable[[Halves, Halves, Bytes, Bytes, Bytes], Blocks]
PackSymmetric = Callable[[Halves, NDArray[np.int8], Bytes], Blocks]


def with_minimums(kind: Affine, x: Floats, importance: Floats | None, pack: PackAffine) -> Blocks:
    """x, importance [n, 256] -> blocks [n]; pack: (d, dmin [n], sc, m [n, groups], codes [n, 256]) -> blocks."""
    return in_shares(x, importance, lambda values, imatrix: pack(*fitted_with_minimums(kind, values, imatrix)))


@compilable
def fitted_with_minimums(kind: Affine, x: Floats, importance: Floats | None) -> FitAffine:
    """x, importance [n, 256] -> d, dmin [n], sc, m [n, groups], codes [n, 256]; n > 1 for NumPy."""
    n, columns = len(x), to_columns(x, kind.groups)
    if importance is None:
        weights = np.abs(columns)
        if kind.rooted:
            weights = np.sqrt(total(columns * columns) / np.float32(len(columns))) + weights
        fit = affine(columns, weights, kind.max_code, kind.steps)
    else:
        weights = to_columns(importance, kind.groups) * spread_of(x, columns, kind.groups, kind.means)
        fit = affine(columns, weights, kind.max_code, WEIGHTED_STEPS)
    assert fit.minimum is not None
    scales, minimums = fit.scale.reshape(n, -1), -fit.minimum.reshape(n, -1)
    if importance is None:
        (d, sc), (dmin, m) = _rounded(scales, kind.max_scale), _rounded(minimums, kind.max_scale)
    else:
        group_weights = total(weights).reshape(n, -1)
        d, sc = integers(scales, group_weights, kind.max_scale)
        dmin, m = integers(minimums, group_weights, kind.max_scale)
        sc, m = _stored(kind, sc, m)
    half, half_min = to_float16(d), to_float16(dmin)
    scale, minimum = (
        (factor.astype(np.float32)[:, None] * numbers).reshape(-1) for factor, numbers in ((half, sc), (half_min, m))
    )
    codes = np.clip(nearest_int((columns + minimum) / scale), 0, kind.max_code)
    return half, half_min, sc, m, _rows(np.where(scale != 0, codes, fit.codes), n)


def without_minimums(kind: Symmetric, x: Floats, importance: Floats | None, pack: PackSymmetric) -> Blocks:
    """x, importance [n, 256] -> blocks [n]; pack: (d [n], sc [n, groups], codes [n, 256]) -> blocks."""
    return in_shares(x, importance, lambda values, imatrix: pack(*fitted_without_minimums(kind, values, imatrix)))


@compilable
def fitted_without_minimums(kind: Symmetric, x: Floats, importance: Floats | None) -> FitSymmetric:
    """x, importance [n, 256] -> d [n], sc [n, groups], codes [n, 256]; n > 1 for NumPy."""
    n, columns = len(x), to_columns(x, kind.groups)
    if importance is None:
        fit = (_moved if kind.moved else symmetric)(columns, columns * columns, kind.zero)
    else:
        weights = to_columns(importance, kind.groups)
        if kind.means is not None:
            weights = weights * spread_of(x, columns, kind.groups, kind.means)
        fit = symmetric(columns, weights, kind.zero)
    scales = fit.scale.reshape(n, -1)
    if importance is None or kind.means is None:
        half, sc, empty = _rounded_signed(scales, kind)
    else:
        scale_fit = symmetric(scales.T.copy(), total(weights).reshape(n, -1).T.copy(), kind.max_scale)
        half, sc = to_float16(scale_fit.scale), (scale_fit.codes - kind.max_scale).T.astype(np.int8)
        empty = np.zeros(n, np.bool_)
    scale = (half.astype(np.float32)[:, None] * sc).reshape(-1)
    codes = np.clip(nearest_int(columns / scale), -kind.zero, kind.zero - 1) + kind.zero
    rows = _rows(np.where(scale != 0, codes, fit.codes), n)
    rows[empty] = 0
    return half, sc, rows


def _stored(kind: Affine, sc: Bytes, m: Bytes) -> tuple[Bytes, Bytes]:
    """sc, m [n, groups] of up to eight bits -> as a block stores and returns them."""
    if not kind.spills:
        max_scale = np.uint8(kind.max_scale)
        return np.minimum(sc, max_scale), np.minimum(m, max_scale)
    if kind.max_scale == 63:
        return unpack_sixes(pack_sixes(sc, m))
    both = sc | m << np.uint8(4)
    return both & np.uint8(15), both >> np.uint8(4)


def in_shares(x: Floats, importance: Floats | None, encode: Callable[[Floats, Floats | None], Blocks]) -> Blocks:
    """The blocks of all values, SHARE at a time."""
    count = len(x)
    if count < 2:  # NumPy would sum a single column in another order
        x = np.concatenate([x, np.zeros((2, WEIGHTS), np.float32)])
        importance = None if importance is None else np.concatenate([importance, np.ones((2, WEIGHTS), np.float32)])
    bounds = [*range(0, max(1, len(x) - 1), SHARE), len(x)]  # the last share has at least two
    with np.errstate(all="ignore"):  # candidates that lose may overflow
        shares = [
            encode(x[start:stop], None if importance is None else importance[start:stop])
            for start, stop in pairwise(bounds)
        ]
    return np.concatenate(shares)[:count]


def to_columns(values: Floats, groups: int) -> Floats:
    """Super-blocks [n, 256] -> groups as columns [256 / groups, n * groups]."""
    return np.ascontiguousarray(values.reshape(len(values) * groups, WEIGHTS // groups).T)


def _rows(codes: Codes, n: int) -> Bytes:
    """The inverse of `to_columns`, for codes."""
    return np.ascontiguousarray(codes.astype(np.uint8).T).reshape(n, WEIGHTS)


def spread_of(x: Floats, columns: Floats, groups: int, means: float) -> Floats:
    """sqrt(means * mean square of the super-block + x * x), of every weight, as columns."""
    squares = np.float32(means) * total(np.ascontiguousarray((x * x).T)) / np.float32(WEIGHTS)
    spread: Floats = np.sqrt(np.repeat(squares, groups) + columns * columns)
    return spread


def _rounded(values: Floats, max_scale: int) -> tuple[Floats, Bytes]:
    """Scales of groups [n, groups] -> the largest over max_scale, and the nearest integers."""
    largest = np.maximum(values.max(axis=1), np.float32(0))
    inverse = np.where(largest > 0, np.float32(max_scale) / largest, np.float32(0))
    integers = nearest_int(inverse[:, None] * values).astype(
        np.uint8
    )  # a negative integer wraps and becomes the largest
    return largest / np.float32(max_scale), np.minimum(integers, np.uint8(max_scale))


def _rounded_signed(values: Floats, kind: Symmetric) -> tuple[Halves, NDArray[np.int8], NDArray[np.bool_]]:
    """Scales of groups [n, groups] -> d, the integers nearest to scale / d, and which super-blocks are empty.

    The scale of largest magnitude becomes -max_scale.
    """
    max_scale = kind.max_scale
    magnitude = np.abs(values)
    largest = np.take_along_axis(values, magnitude.argmax(axis=1)[:, None], 1)[:, 0]
    inverse = np.float32(-max_scale) / largest
    empty = magnitude.max(axis=1) < np.float32(kind.least)
    half = np.where(empty, np.float16(0), to_float16(np.float32(1) / inverse))
    integers = np.clip(nearest_int(inverse[:, None] * values), -max_scale, max_scale - 1).astype(np.int8)
    integers[empty] = kind.empty
    return half, integers, empty


def integers(values: Floats, weights: Floats, max_integer: int) -> tuple[Floats, Bytes]:
    """Scales [n, groups] and their weights -> the factor and integers up to max_integer of the least weighted error.

    Tries nine factors around the largest over max_integer, then moves single integers while that helps.
    """
    x, w = np.ascontiguousarray(values.T), np.ascontiguousarray(weights.T)
    largest = np.maximum(x.max(axis=0), np.float32(0))
    inverse = np.float32(max_integer) / largest

    def error(tried: Floats, codes: Codes) -> Floats:
        difference = x - np.float32(1) / tried * codes.astype(np.float32)
        return total(w * difference * difference)

    best = error(inverse, nearest_int(inverse * x) & 255)  # bytes, so that -1 is 255
    for step in (*range(-4, 0), *range(1, 5)):
        tried = (np.float32(0.1) * np.float32(step) + np.float32(max_integer)) / largest
        new_error = error(tried, np.minimum(nearest_int(tried * x), max_integer))
        better = new_error < best
        best, inverse = np.where(better, new_error, best), np.where(better, tried, inverse)
    codes, factor = _polished(x, w, np.minimum(nearest_int(inverse * x), max_integer), None, max_integer)
    empty = largest < MIN_MAGNITUDE
    return np.where(empty, np.float32(0), factor), np.where(empty, 0, codes).T.astype(np.uint8)


def _moved(x: Floats, weights: Floats, zero: int) -> Fit:
    """x, weights [weights of a group, n], n > 1: w = scale * (code - zero), codes moved one by one."""
    magnitude = np.abs(x)
    largest = np.take_along_axis(x, magnitude.argmax(axis=0)[None], 0)[0]
    first = np.clip(nearest_int(np.float32(-zero) / largest * x), -zero, zero - 1)
    codes, scale = _polished(x, weights, first, -zero, zero - 1)
    empty = magnitude.max(axis=0) < MIN_MAGNITUDE
    return Fit(np.where(empty, 0, codes + zero), np.where(empty, np.float32(0), scale))


def _polished(x: Floats, w: Floats, first: Codes, least: int | None, max_integer: int) -> tuple[Codes, Floats]:
    """Integers [groups, n], moved one by one where that lowers the error of x - factor * integer, and the factor.

    A column ends with the first pass that moves none of its integers. least: None where no integer is negative.
    """
    mask = 255 if least is None else -1  # bits: where no integer becomes negative they are unsigned bytes
    codes, levels = first & mask, first.astype(np.float32)
    products, norms = total(w * x * levels), total(w * levels * levels)
    going = np.ones(codes.shape[1], np.bool_)
    for _ in range(POLISHED):
        moved = np.zeros_like(going)
        for i in range(len(codes)):
            old = codes[i].astype(np.float32)
            product, norm = products - w[i] * x[i] * old, norms - w[i] * old * old
            new = np.minimum(nearest_int(x[i] * norm / product), max_integer)
            if least is not None:
                new = np.maximum(new, least)
            level = new.astype(np.float32)
            tried = going & (product > 0) & (new != codes[i])
            tried &= norm > 0 if least is None else tried
            product, norm = product + w[i] * x[i] * level, norm + w[i] * level * level
            better = tried & (norm > 0) & (product * product * norms > products * products * norm)
            codes[i] = np.where(better, new & mask, codes[i])
            products, norms = np.where(better, product, products), np.where(better, norm, norms)
            moved |= better
        going &= moved
    return codes, np.where(norms > 0, products / norms, np.float32(0))
