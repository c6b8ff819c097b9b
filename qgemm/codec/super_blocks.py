"""Encoders of the K-quants: groups of a super-block are fitted one by one, then their scales are rounded to integers.

Bytes are those of ggml's C: float32, sums in the order of the weights, candidates in its order. Groups are columns
[weights of a group, groups of all super-blocks], so that a sum over a group is one over rows (search.py).

Without an importance matrix the squared errors of a group weigh sqrt(mean square of the group) + |x|, of q6_k x * x;
with one importance * sqrt(twice the mean square of the super-block + x * x), of q6_k the importance alone. The integers
of a group's scale and minimum are then searched as well.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .format import Blocks
from .packing import Bytes, Floats, Halves, to_float16
from .search import LEAST, STEPS, Steps, affine, nearest_int, symmetric, total

WEIGHTS = 256
SHARE = 64  # super-blocks at a time: what lies in a core's cache
SIXES = 63  # the largest of six bits
EIGHTS = 128  # the magnitude of the least of eight signed bits
POLISHED = 5  # times that `_integers` looks for better single integers

Pack = Callable[[Halves, Halves, Bytes, Bytes, Bytes], Blocks]


def with_minimums(
    x: Floats, importance: Floats | None, most: int, steps: Steps, groups: int, pack: Pack
) -> Blocks:  # fmt: skip
    """x [n, 256], importance [n, 256] or None -> blocks [n] of w = d * sc * q - dmin * m, q in 0..most.

    steps: that are tried without an importance. pack: (d, dmin [n], sc, m [n, groups], codes [n, 256]) -> blocks.
    """
    return _in_shares(x, importance, lambda values, of: pack(*_with_minimums(values, of, most, steps, groups)))


def _with_minimums(x: Floats, importance: Floats | None, most: int, steps: Steps, groups: int) -> tuple[Any, ...]:
    n, columns = len(x), _columns(x, groups)
    if importance is None:
        means = total(columns * columns) / np.float32(len(columns))
        weights, tried = np.sqrt(means) + np.abs(columns), steps
    else:
        squares = total(np.ascontiguousarray((x * x).T))
        means = np.repeat(np.float32(2) * squares / np.float32(WEIGHTS), groups)
        weights, tried = _columns(importance, groups) * np.sqrt(means + columns * columns), STEPS
    fit = affine(columns, weights, most, tried)
    assert fit.minimum is not None
    scales, minimums = fit.scale.reshape(n, groups), -fit.minimum.reshape(n, groups)
    if importance is None:
        (d, sc), (dmin, m) = _rounded(scales), _rounded(minimums)
    else:
        of = total(weights).reshape(n, groups)
        (d, sc), (dmin, m) = _integers(scales, of), _integers(minimums, of)
    half, half_min = to_float16(d), to_float16(dmin)
    scale, minimum = (
        (of.astype(np.float32)[:, None] * numbers).reshape(-1) for of, numbers in ((half, sc), (half_min, m))
    )
    codes = np.clip(nearest_int((columns + minimum) / scale), 0, most)
    codes = np.where(scale != 0, codes, fit.codes).astype(np.uint8)
    return half, half_min, sc, m, np.ascontiguousarray(codes.T).reshape(n, WEIGHTS)


def without_minimums(
    x: Floats, importance: Floats | None, zero: int, groups: int, pack: Callable[..., Blocks]
) -> Blocks:  # fmt: skip
    """x [n, 256], importance [n, 256] or None -> blocks [n] of w = d * sc * (q - zero), sc of eight signed bits.

    pack: (d [n], sc [n, groups], codes [n, 256]) -> blocks.
    """
    return _in_shares(x, importance, lambda values, of: pack(*_without_minimums(values, of, zero, groups)))


def _without_minimums(x: Floats, importance: Floats | None, zero: int, groups: int) -> tuple[Any, ...]:
    n, columns = len(x), _columns(x, groups)
    fit = symmetric(columns, columns * columns if importance is None else _columns(importance, groups), zero)
    scales = fit.scale.reshape(n, groups)
    magnitude = np.abs(scales)
    largest = np.take_along_axis(scales, magnitude.argmax(axis=1)[:, None], 1)[:, 0]
    inverse = np.float32(-EIGHTS) / largest
    empty = magnitude.max(axis=1) < LEAST
    half = np.where(empty, np.float16(0), to_float16(np.float32(1) / inverse))
    sc = np.minimum(nearest_int(inverse[:, None] * scales), EIGHTS - 1).astype(np.int8)
    sc[empty] = 0
    scale = (half.astype(np.float32)[:, None] * sc).reshape(-1)
    codes = np.clip(nearest_int(columns / scale), -zero, zero - 1) + zero
    codes = np.where(scale != 0, codes, fit.codes)
    codes = np.ascontiguousarray(codes.T).reshape(n, WEIGHTS)
    codes[empty] = 0
    return half, sc, codes.astype(np.uint8)


def _in_shares(x: Floats, importance: Floats | None, made: Callable[[Floats, Floats | None], Blocks]) -> Blocks:
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


def _columns(values: Floats, groups: int) -> Floats:
    """Super-blocks [n, 256] -> groups as columns [256 / groups, n * groups]."""
    return np.ascontiguousarray(values.reshape(len(values) * groups, WEIGHTS // groups).T)


def _rounded(values: Floats) -> tuple[Floats, Bytes]:
    """Scales of groups [n, groups] -> the largest over 63, and the integers of six bits that are nearest."""
    largest = np.maximum(values.max(axis=1), np.float32(0))
    inverse = np.where(largest > 0, np.float32(SIXES) / largest, np.float32(0))
    found = nearest_int(inverse[:, None] * values).astype(np.uint8)  # what is negative becomes the largest
    return largest / np.float32(SIXES), np.minimum(found, np.uint8(SIXES))


def _integers(values: Floats, weights: Floats) -> tuple[Floats, Bytes]:
    """Scales [n, groups] and what each weighs -> a factor and integers of six bits of the least weighted error.

    Nine factors around the largest over 63 are tried, then single integers moved while that helps.
    """
    x, w = np.ascontiguousarray(values.T), np.ascontiguousarray(weights.T)
    largest = np.maximum(x.max(axis=0), np.float32(0))
    inverse = np.float32(SIXES) / largest

    def error(tried: Floats, codes: NDArray[np.int32]) -> Floats:
        difference = x - np.float32(1) / tried * codes.astype(np.float32)
        return total(w * difference * difference)

    best = error(inverse, nearest_int(inverse * x))
    for step in (*range(-4, 0), *range(1, 5)):
        tried = (np.float32(0.1) * np.float32(step) + np.float32(SIXES)) / largest
        found = error(tried, np.minimum(nearest_int(tried * x), SIXES))
        better = found < best
        best, inverse = np.where(better, found, best), np.where(better, tried, inverse)
    codes = np.minimum(nearest_int(inverse * x), SIXES)
    levels = codes.astype(np.float32)
    products, norms = total(w * x * levels), total(w * levels * levels)
    codes, products, norms = _polished(x, w, codes, products, norms)
    empty = largest < LEAST
    factor = np.where(norms > 0, products / norms, np.float32(0))
    return np.where(empty, np.float32(0), factor), np.where(empty, 0, codes).T.astype(np.uint8)


def _polished(
    x: Floats, w: Floats, codes: NDArray[np.int32], products: Floats, norms: Floats
) -> tuple[NDArray[np.int32], Floats, Floats]:
    """Integers moved one by one, where the error with the best factor becomes less; columns that stand still stay."""
    codes, going = codes.copy(), np.ones(codes.shape[1], np.bool_)
    for _ in range(POLISHED):
        moved = np.zeros_like(going)
        for i in range(len(codes)):
            old = codes[i].astype(np.float32)
            product, norm = products - w[i] * x[i] * old, norms - w[i] * old * old
            new = np.minimum(nearest_int(x[i] * norm / product), SIXES)
            level = new.astype(np.float32)
            tried = going & (product > 0) & (norm > 0) & (new != codes[i])
            product, norm = product + w[i] * x[i] * level, norm + w[i] * level * level
            better = tried & (product * product * norms > products * products * norm)
            codes[i] = np.where(better, new, codes[i])
            products, norms = np.where(better, product, products), np.where(better, norm, norms)
            moved |= better
        going &= moved
    return codes, products, norms
