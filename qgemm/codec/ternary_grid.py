"""Encoders of the IQ1 types: the sorted values of a group are split in three, then fitted by points of a grid.

w = d * (2 sc + 1) * (code - 1 + delta), code in 0..2, delta 1/8 or -1/8 for a group or half of one. In ascending order
the lowest values of a group have code 0, the highest code 2; all splits are tried with both deltas. Eight codes that
are no point of the grid become the neighbour of the least weighted error. Bytes are those of ggml's C: float32, sums in
the order of the weights, candidates in its order. Groups are columns [weights of a group, groups of all super-blocks].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .compiled import compilable
from .format import Blocks
from .grids import Indices, grid
from .packing import Bytes, Floats, Halves, to_float16
from .search import nearest_int, total
from .super_blocks import in_shares, spread_of, to_columns

DELTA = np.float32(0.125)
LEVELS = np.stack([np.arange(-1, 2, dtype=np.float32) + delta for delta in (DELTA, -DELTA)])  # [sign of delta, code]
DIMS = 8
MAX_SCALE = 7  # sc has three bits

Flags = NDArray[np.bool_]


class Ternary(NamedTuple):
    """How ggml fits a type: `groups` of a super-block, `parts` of a group with a delta of their own, 1 or 2.

    least: groups without a larger magnitude are zeros. fudge: a factor of d. refit: whether d is fitted once more to
    all points and sc.
    """

    groups: int
    parts: int
    least: float
    fudge: float
    refit: bool = False


class Fit(NamedTuple):
    """Fitted super-blocks: d [n], sc [n, groups], points [n, 32], minus [n, 32]: whether delta is -1/8."""

    d: Floats
    sc: Bytes
    points: Indices
    minus: Flags


Pack = Callable[[Halves, Bytes, Indices, Flags], Blocks]


def encode(kind: Ternary, x: Floats, importance: Floats | None, pack: Pack) -> Blocks:
    """x, importance [n, 256] -> blocks [n]; pack: (d [n], sc [n, groups], points [n, 32], minus [n, 32]) -> blocks."""

    def encoded(values: Floats, imatrix: Floats | None) -> Blocks:
        fit = fitted(kind, values, imatrix)
        return pack(to_float16(fit.d * np.float32(kind.fudge)), fit.sc, fit.points, fit.minus)

    return in_shares(x, importance, encoded)


@compilable
def fitted(kind: Ternary, x: Floats, importance: Floats | None) -> Fit:
    """x, importance [n, 256] -> Fit; n > 1 for NumPy."""
    n, columns = len(x), to_columns(x, kind.groups)
    weights = columns * columns
    if importance is not None:
        weights = to_columns(importance, kind.groups) * spread_of(x, columns, kind.groups, 2)
    fit = _fitted(columns, weights, kind.least, kind.parts)
    d, sc = _rounded(fit.scale.reshape(n, kind.groups))
    if kind.refit:
        d = _refitted(x, weights, fit, d, sc)
    return Fit(d, sc, fit.points.T.reshape(n, -1), fit.minus.T.reshape(n, -1))


class _Groups(NamedTuple):
    """Groups as columns: scale [n], points and minus [size / 8, n]; empty [n]: groups of zeros."""

    scale: Floats
    points: Indices
    minus: Flags
    empty: Flags


def _fitted(x: Floats, weights: Floats, least: float, parts: int) -> _Groups:
    """x, weights [size, n]; groups whose magnitudes are below `least` are empty. parts: deltas of a group, 1 or 2."""
    order = np.argsort(x, axis=0, kind="stable")
    scale, low, high, choice = (_split_once if parts == 1 else _split_halves)(x, weights, order)
    empty = (np.abs(x).max(axis=0) < np.float32(least)) | (choice < 0)
    rank = np.arange(len(x))[:, None]
    codes = np.empty(x.shape, np.int32)
    np.put_along_axis(codes, order, (rank >= low).astype(np.int32) + (rank >= high), 0)
    negative = scale < 0
    codes = np.where(negative, 2 - codes, codes)
    choice = np.where(negative, 2**parts - 1 - choice, choice)
    scale = np.abs(scale)
    halves = np.stack([choice >> parts - 1 - part & 1 for part in range(parts)]) > 0
    minus = np.repeat(halves, len(x) // DIMS // parts, axis=0)
    grid_points = grid("IQ1_S")

    def split(values: NDArray[np.float32]) -> Floats:
        return np.ascontiguousarray(values.reshape(-1, DIMS, values.shape[1]).swapaxes(0, 1)).reshape(DIMS, -1)

    numbers = grid_points.numbers(split(codes))  # type: ignore[arg-type]
    levels = np.tile(scale, len(minus))[:, None] * LEVELS[minus.reshape(-1).astype(np.intp)]
    points = grid_points.closest(numbers, split(x), split(weights), levels).reshape(minus.shape)
    products, norms = _products(weights, x, _levels(points, minus))
    refit = (grid_points.point_of[numbers] < 0).reshape(minus.shape).any(axis=0) & (products > 0) & (norms > 0)
    scale = np.where(refit, products / norms, scale)
    points[:, empty], minus[:, empty] = 0, False
    return _Groups(np.where(empty, np.float32(0), scale), points, minus, empty)


def _rounded(scales: Floats) -> tuple[Floats, Bytes]:
    """Scales [n, groups] -> d [n], sc [n, groups]; both are 0 for super-blocks of zeros."""
    greatest = scales.max(axis=1)
    d = greatest / np.float32(15)
    sc = np.clip(nearest_int(np.float32(0.5) * ((np.float32(1) / d)[:, None] * scales - 1)), 0, MAX_SCALE)
    return d, np.where(greatest[:, None] == 0, 0, sc).astype(np.uint8)


def _refitted(x: Floats, weights: Floats, fit: _Groups, d: Floats, sc: Bytes) -> Floats:
    """The d [n] of the least error for super-blocks x [n, 256] with fitted points and sc [n, groups]."""
    n, groups = sc.shape
    levels = _levels(fit.points, fit.minus) * (2 * sc.reshape(-1) + 1).astype(np.float32)
    wide = [np.ascontiguousarray(values.T).reshape(n, -1) for values in (weights, levels)]
    weights_of_blocks, by = (to_columns(values, 1) for values in wide)
    products, norms = _products(weights_of_blocks, to_columns(x, 1), by)
    scale = np.where(norms > 0, products / norms, d)
    return np.where(sc.any(axis=1) | (fit.scale.reshape(n, groups).max(axis=1) > 0), scale, np.float32(0))


def _levels(points: Indices, minus: Flags) -> Floats:
    """Points and minus [size / 8, n] -> code - 1 + delta, [size, n]."""
    codes = grid("IQ1_S").points[points].swapaxes(1, 2)
    levels: Floats = LEVELS[minus.astype(np.intp)[:, None], codes]
    return levels.reshape(-1, points.shape[1])


def _products(weights: Floats, x: Floats, levels: Floats) -> tuple[Floats, Floats]:
    """All [size, n] -> sum w q x, sum w q q, [n] each."""
    weighted = weights * levels
    return total(weighted * x), total(weighted * levels)


class _Best:
    """The best of splits, one after the other: scale, low, high and choice [n], as `_split_once` returns them."""

    def __init__(self, x: Floats) -> None:
        self.scale = np.abs(x).max(axis=0)
        self.score = np.full(x.shape[1], -np.finfo(np.float32).max)
        self.low, self.high = np.zeros((2, x.shape[1]), np.int64)
        self.choice = np.full(x.shape[1], -1)

    def take(self, products: Floats, norms: Floats, low: int, high: int, choice: int) -> None:
        better = np.flatnonzero((norms > 0) & (products * products > self.score * norms))
        if len(better):
            products = products[better]
            self.scale[better] = scale = products / norms[better]
            self.score[better] = scale * products
            self.low[better], self.high[better], self.choice[better] = low, high, choice

    def splits(self) -> tuple[Floats, Indices, Indices, Indices]:
        return self.scale, self.low, self.high, self.choice


def _split_once(x: Floats, weights: Floats, order: NDArray[np.intp]) -> tuple[Floats, Indices, Indices, Indices]:
    """x, weights [size, n], order of ascending x -> scale, number of codes 0, number of codes 0 and 1, delta's sign.

    The sign is 0 for plus, 1 for minus, -1 where all weights are 0.
    """
    size, best = len(x), _Best(x)
    sum_x, sum_w = (_running(np.take_along_axis(values, order, 0)) for values in (weights * x, weights))
    for low in range(size + 1):
        for high in range(low, size + 1):
            parts_x = sum_x[low] - sum_x[0], sum_x[high] - sum_x[low], sum_x[size] - sum_x[high]
            parts_w = sum_w[low] - sum_w[0], sum_w[high] - sum_w[low], sum_w[size] - sum_w[high]
            for choice, levels in enumerate(LEVELS):
                products = parts_x[0] * levels[0] + parts_x[1] * levels[1] + parts_x[2] * levels[2]
                first, second, third = (part * level * level for part, level in zip(parts_w, levels, strict=True))
                best.take(products, first + second + third, low, high, choice)
    return best.splits()


def _split_halves(x: Floats, weights: Floats, order: NDArray[np.intp]) -> tuple[Floats, Indices, Indices, Indices]:
    """`_split_once` with a delta for either half of a group: its sign in bit 1 for the first, bit 0 for the second.

    Sums cover each half alone; the sum over a split follows from running sums by the differences of the levels.
    """
    size, best = len(x), _Best(x)
    products, ordered_weights = (np.take_along_axis(values, order, 0) for values in (weights * x, weights))
    first = order < size // 2
    running_x, running_w = (
        [_running(np.where(half, values, np.float32(0))) for half in (first, ~first)]
        for values in (products, ordered_weights)
    )
    squares = LEVELS * LEVELS
    ends = [
        [(sum_x[size] * levels[2], sum_w[size] * levels[2] * levels[2]) for levels in LEVELS]
        for sum_x, sum_w in zip(running_x, running_w, strict=True)
    ]
    steps = [(square[0] - square[1], square[1] - square[2]) for square in squares]
    for low in range(size + 1):
        for high in range(low, size + 1):
            tried = []
            for half in range(2):
                both = running_x[half][low] + running_x[half][high]
                sum_w = running_w[half]
                tried.append([
                    (end_x - both, end_w + sum_w[low] * step[0] + sum_w[high] * step[1])
                    for (end_x, end_w), step in zip(ends[half], steps, strict=True)
                ])  # fmt: skip
            for choice in range(4):
                upper, lower = tried[0][choice >> 1], tried[1][choice & 1]
                best.take(upper[0] + lower[0], upper[1] + lower[1], low, high, choice)
    return best.splits()


def _running(values: Floats) -> Floats:
    """Values [size, n] -> running sums, beginning with 0, [size + 1, n]."""
    return np.concatenate([np.zeros((1, values.shape[1]), np.float32), np.cumsum(values, axis=0, dtype=np.float32)])
