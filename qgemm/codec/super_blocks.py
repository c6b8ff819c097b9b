"""Encoders of the K-quants: groups of a super-block are fitted one by one, then their scales are rounded to integers.

Bytes are those of ggml's C: float32, sums in the order of the weights, candidates in its order. Groups are columns
[weights of a group, groups of all super-blocks], so that a sum over a group is one over rows (search.py).

With an importance matrix squared errors weigh importance * sqrt(some times the mean square of the super-block + x * x),
of q6_k the importance alone, and the integers of a group's scale and minimum are searched as well.
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
from .search import LEAST, STEPS, Fit, Steps, affine, nearest_int, symmetric, total

WEIGHTS = 256
SHARE = 512  # super-blocks at a time: what lies in a cache, of arrays that are worth a call
POLISHED = 5  # times that single integers are moved

Codes = NDArray[np.int32]


class Affine(NamedTuple):
    """w = d * sc * q - dmin * m, q in 0..most, sc and m in 0..most_scale for each of `groups` groups.

    steps: that are tried without an importance. rooted: whether errors weigh sqrt(mean square of the group) + |x| then,
    else |x|. means: how many times the mean square of a super-block counts beside x * x where there is an importance.
    spills: whether an sc or m beyond most_scale, which may be left where nothing weighs, is stored with all its bits,
    the upper ones in the place of others, rather than as most_scale.
    """

    most: int
    groups: int
    most_scale: int
    steps: Steps
    rooted: bool
    means: float
    spills: bool


class Symmetric(NamedTuple):
    """w = d * sc * (q - zero), sc in -most_scale..most_scale - 1 for each of `groups` groups.

    moved: whether single codes are moved without an importance, rather than scales tried. means: as of Affine; None:
    the importance alone weighs, and sc are rounded as without one. least, empty: a super-block whose groups all have
    smaller scales has these sc, and d and q are 0.
    """

    zero: int
    groups: int
    most_scale: int
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
    return in_shares(x, importance, lambda values, of: pack(*fitted_with_minimums(kind, values, of)))


@compilable
def fitted_with_minimums(kind: Affine, x: Floats, importance: Floats | None) -> FitAffine:
    """x, importance [n, 256] -> d, dmin [n], sc, m [n, groups], codes [n, 256]; n > 1 for NumPy."""
    n, columns = len(x), to_columns(x, kind.groups)
    if importance is None:
        weights = np.abs(columns)
        if kind.rooted:
            weights = np.sqrt(total(columns * columns) / np.float32(len(columns))) + weights
        fit = affine(columns, weights, kind.most, kind.steps)
    else:
        weights = to_columns(importance, kind.groups) * spread_of(x, columns, kind.groups, kind.means)
        fit = affine(columns, weights, kind.most, STEPS)
    assert fit.minimum is not None
    scales, minimums = fit.scale.reshape(n, -1), -fit.minimum.reshape(n, -1)
    if importance is None:
        (d, sc), (dmin, m) = _rounded(scales, kind.most_scale), _rounded(minimums, kind.most_scale)
    else:
        of = total(weights).reshape(n, -1)
        (d, sc), (dmin, m) = integers(scales, of, kind.most_scale), integers(minimums, of, kind.most_scale)
        sc, m = _stored(kind, sc, m)
    half, half_min = to_float16(d), to_float16(dmin)
    scale, minimum = (
        (of.astype(np.float32)[:, None] * numbers).reshape(-1) for of, numbers in ((half, sc), (half_min, m))
    )
    codes = np.clip(nearest_int((columns + minimum) / scale), 0, kind.most)
    return half, half_min, sc, m, _rows(np.where(scale != 0, codes, fit.codes), n)


def without_minimums(kind: Symmetric, x: Floats, importance: Floats | None, pack: PackSymmetric) -> Blocks:
    """x, importance [n, 256] -> blocks [n]; pack: (d [n], sc [n, groups], codes [n, 256]) -> blocks."""
    return in_shares(x, importance, lambda values, of: pack(*fitted_without_minimums(kind, values, of)))


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
        of = symmetric(scales.T.copy(), total(weights).reshape(n, -1).T.copy(), kind.most_scale)
        half, sc = to_float16(of.scale), (of.codes - kind.most_scale).T.astype(np.int8)
        empty = np.zeros(n, np.bool_)
    scale = (half.astype(np.float32)[:, None] * sc).reshape(-1)
    codes = np.clip(nearest_int(columns / scale), -kind.zero, kind.zero - 1) + kind.zero
    found = _rows(np.where(scale != 0, codes, fit.codes), n)
    found[empty] = 0
    return half, sc, found


def _stored(kind: Affine, sc: Bytes, m: Bytes) -> tuple[Bytes, Bytes]:
    """sc, m [n, groups] of up to eight bits -> as a block gives them back."""
    if not kind.spills:
        most = np.uint8(kind.most_scale)
        return np.minimum(sc, most), np.minimum(m, most)
    if kind.most_scale == 63:
        return unpack_sixes(pack_sixes(sc, m))
    both = sc | m << np.uint8(4)
    return both & np.uint8(15), both >> np.uint8(4)


def in_shares(x: Floats, importance: Floats | None, made: Callable[[Floats, Floats | None], Blocks]) -> Blocks:
    """The blocks of all values, some at a time."""
    count = len(x)
    if count < 2:  # NumPy would sum a single column in another order
        x = np.concatenate([x, np.zeros((2, WEIGHTS), np.float32)])
        importance = None if importance is None else np.concatenate([importance, np.ones((2, WEIGHTS), np.float32)])
    bounds = [*range(0, max(1, len(x) - 1), SHARE), len(x)]  # the last share has two at least
    with np.errstate(all="ignore"):  # candidates of no worth may overflow
        found = [
            made(x[start:stop], None if importance is None else importance[start:stop])
            for start, stop in pairwise(bounds)
        ]
    return np.concatenate(found)[:count]


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


def _rounded(values: Floats, most: int) -> tuple[Floats, Bytes]:
    """Scales of groups [n, groups] -> the largest over `most`, and the integers that are nearest."""
    largest = np.maximum(values.max(axis=1), np.float32(0))
    inverse = np.where(largest > 0, np.float32(most) / largest, np.float32(0))
    found = nearest_int(inverse[:, None] * values).astype(np.uint8)  # what is negative becomes the largest
    return largest / np.float32(most), np.minimum(found, np.uint8(most))


def _rounded_signed(values: Floats, kind: Symmetric) -> tuple[Halves, NDArray[np.int8], NDArray[np.bool_]]:
    """Scales of groups [n, groups] -> d, the integers nearest to them over it, and which super-blocks are empty.

    The scale of largest magnitude becomes -most_scale.
    """
    most = kind.most_scale
    magnitude = np.abs(values)
    largest = np.take_along_axis(values, magnitude.argmax(axis=1)[:, None], 1)[:, 0]
    inverse = np.float32(-most) / largest
    empty = magnitude.max(axis=1) < np.float32(kind.least)
    half = np.where(empty, np.float16(0), to_float16(np.float32(1) / inverse))
    found = np.clip(nearest_int(inverse[:, None] * values), -most, most - 1).astype(np.int8)
    found[empty] = kind.empty
    return half, found, empty


def integers(values: Floats, weights: Floats, most: int) -> tuple[Floats, Bytes]:
    """Scales [n, groups] and what each weighs -> a factor and integers up to `most` of the least weighted error.

    Nine factors around the largest over `most` are tried, then single integers moved while that helps.
    """
    x, w = np.ascontiguousarray(values.T), np.ascontiguousarray(weights.T)
    largest = np.maximum(x.max(axis=0), np.float32(0))
    inverse = np.float32(most) / largest

    def error(tried: Floats, codes: Codes) -> Floats:
        difference = x - np.float32(1) / tried * codes.astype(np.float32)
        return total(w * difference * difference)

    best = error(inverse, nearest_int(inverse * x) & 255)  # bytes, so that -1 is 255
    for step in (*range(-4, 0), *range(1, 5)):
        tried = (np.float32(0.1) * np.float32(step) + np.float32(most)) / largest
        found = error(tried, np.minimum(nearest_int(tried * x), most))
        better = found < best
        best, inverse = np.where(better, found, best), np.where(better, tried, inverse)
    codes, factor = _polished(x, w, np.minimum(nearest_int(inverse * x), most), None, most)
    empty = largest < LEAST
    return np.where(empty, np.float32(0), factor), np.where(empty, 0, codes).T.astype(np.uint8)


def _moved(x: Floats, weights: Floats, zero: int) -> Fit:
    """x, weights [weights of a group, n], n > 1: w = scale * (code - zero), codes moved one by one."""
    magnitude = np.abs(x)
    largest = np.take_along_axis(x, magnitude.argmax(axis=0)[None], 0)[0]
    first = np.clip(nearest_int(np.float32(-zero) / largest * x), -zero, zero - 1)
    codes, scale = _polished(x, weights, first, -zero, zero - 1)
    empty = magnitude.max(axis=0) < LEAST
    return Fit(np.where(empty, 0, codes + zero), np.where(empty, np.float32(0), scale))


def _polished(x: Floats, w: Floats, first: Codes, least: int | None, most: int) -> tuple[Codes, Floats]:
    """Integers [groups, n] moved one by one where the error of x - factor * integer becomes less -> they, factor.

    A column is done with the first pass that moves none of its integers. least: None where none becomes negative.
    """
    kept = 255 if least is None else -1  # bits: where no integer becomes negative they are unsigned bytes
    codes, levels = first & kept, first.astype(np.float32)
    products, norms = total(w * x * levels), total(w * levels * levels)
    going = np.ones(codes.shape[1], np.bool_)
    for _ in range(POLISHED):
        moved = np.zeros_like(going)
        for i in range(len(codes)):
            old = codes[i].astype(np.float32)
            product, norm = products - w[i] * x[i] * old, norms - w[i] * old * old
            new = np.minimum(nearest_int(x[i] * norm / product), most)
            if least is not None:
                new = np.maximum(new, least)
            level = new.astype(np.float32)
            tried = going & (product > 0) & (new != codes[i])
            tried &= norm > 0 if least is None else tried
            product, norm = product + w[i] * x[i] * level, norm + w[i] * level * level
            better = tried & (norm > 0) & (product * product * norms > products * products * norm)
            codes[i] = np.where(better, new & kept, codes[i])
            products, norms = np.where(better, product, products), np.where(better, norm, norms)
            moved |= better
        going &= moved
    return codes, np.where(norms > 0, products / norms, np.float32(0))
