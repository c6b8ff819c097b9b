"""Encoders of the IQ2 and IQ3 types: points of a grid fit the magnitudes of a group, signs are stored separately.

w = d * (sc + 1/2) / 4 * level of the point, with a sign for each weight: here d * (2 sc + 1) * (2 code + 1). Bytes are
those of ggml's C: float32, sums in the order of the weights, candidates in its order. Groups are columns [weights of a
group, groups of all super-blocks]; each has several points, of 8 or 4 weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .compiled import compilable
from .format import Blocks
from .grids import Grid, Indices, grid, rounded, sums
from .packing import Bytes, Floats, Halves, to_float16
from .search import Codes, nearest_int, total
from .super_blocks import in_shares, integers, spread_of, to_columns

MAX_SCALE = 15  # sc has four bits
MAGNITUDES = 8  # weights whose signs are a byte, or seven bits and their parity


class Lattice(NamedTuple):
    """How ggml fits a type: groups of `size` weights by the points of a grid.

    paired: the signs of eight weights have an even number of minuses; if need be the least important weight changes its
    sign. steps, step: the inverse scales tried, from -steps to steps times step around that of the largest code. least:
    groups without a larger magnitude are zeros. fudge: a factor of d. means: with an importance, the factor of the mean
    square of the super-block beside x * x. flat: without an importance, the factor of twice that mean; None: the type
    requires an importance. refit_all: where some codes were no point, all points of a group are chosen once more, not
    only these. first_fit: the largest code comes from a fit of integers, after which all points are chosen once more.
    gapless: signs and low bytes of points of a group of zeros are left out, and later ones move up. ggml writes such
    bytes and reads other weights from them.
    """

    grid: str
    size: int
    paired: bool
    steps: int
    step: float
    least: float
    fudge: float
    means: float
    flat: float | None
    refit_all: bool = False
    first_fit: bool = False
    gapless: bool = False


Pack = Callable[[Halves, Bytes, Indices, Bytes], Blocks]


def encode(kind: Lattice, x: Floats, importance: Floats | None, pack: Pack) -> Blocks:
    """x, importance [n, 256] -> blocks [n].

    pack: (d [n], sc [n, groups], points [n, points of 256 weights], signs [n, 32]) -> blocks [n].
    """
    return in_shares(x, importance, lambda values, imatrix: pack(*_encoded(kind, values, imatrix)))


def _encoded(kind: Lattice, x: Floats, importance: Floats | None) -> tuple[Halves, Bytes, Indices, Bytes]:
    scales, points, signs, empty = fitted(kind, x, importance)
    greatest = scales.max(axis=1)
    d = greatest / np.float32(31)
    sc = np.clip(nearest_int(np.float32(0.5) * ((np.float32(1) / d)[:, None] * scales - 1)), 0, MAX_SCALE)
    none = greatest == 0
    sc[none] = 0
    if kind.paired:
        points[none], signs[none] = 0, 0
    if kind.gapless:
        order = np.argsort(empty, axis=1, kind="stable")
        points = (points & ~255) | _ordered(points & 255, order)
        signs = _ordered(signs, order)
    return to_float16(d * np.float32(kind.fudge)), sc.astype(np.uint8), points, signs


class Fit(NamedTuple):
    """Fitted super-blocks: scales [n, groups], points [n, points of 256 weights], signs [n, 32], empty [n, groups]."""

    scales: Floats
    points: Indices
    signs: Bytes
    empty: NDArray[np.bool_]


@compilable
def fitted(kind: Lattice, x: Floats, importance: Floats | None) -> Fit:
    """x, importance [n, 256], n > 1 for NumPy -> Fit; empty: groups of zeros."""
    n, groups = len(x), x.shape[1] // kind.size
    columns = to_columns(x, groups)
    if importance is not None:
        weights = to_columns(importance, groups) * spread_of(x, columns, groups, kind.means)
    else:
        assert kind.flat is not None
        weights = columns * columns
        if kind.flat:
            mean = np.float32(2) * total(np.ascontiguousarray((x * x).T)) / np.float32(x.shape[1])
            weights = np.float32(kind.flat) * np.repeat(mean, groups) + weights
    magnitudes, signs = _signs(kind, columns, weights)
    largest = magnitudes.max(axis=0)
    empty = largest < np.float32(kind.least)
    points = _Points(grid(kind.grid), magnitudes, np.sqrt(weights))
    if kind.first_fit:
        scale, _ = integers(magnitudes.T, weights.T, points.grid.base + 1)
        largest = scale * np.float32(points.grid.base)
        empty |= largest <= 0
    else:
        scale = largest / np.float32(2 * points.grid.base - 1)
    scale, indices = _searched(kind, points, magnitudes, weights, largest, scale)
    signs[:, scale < 0] ^= np.uint8(127 if kind.paired else 255)
    scale = np.where(empty, np.float32(0), np.abs(scale))
    indices[:, empty], signs[:, empty] = 0, 0
    return Fit(scale.reshape(n, groups), indices.T.reshape(n, -1), signs.T.reshape(n, -1), empty.reshape(n, groups))


def _signs(kind: Lattice, x: Floats, weights: Floats) -> tuple[Floats, Bytes]:
    """x, weights [size, n] -> magnitudes to fit [size, n], signs [size / 8, n], bit i for weight i.

    The magnitude of a weight that changes its sign is negative.
    """
    negative = ~(x >= 0)
    shape = (-1, MAGNITUDES, x.shape[1])
    minus, fitted = negative.reshape(shape).astype(np.uint8), np.where(negative, -x, x).reshape(shape)
    if kind.paired:
        odd = minus.sum(axis=1) % 2 == 1
        cheapest = (weights * x * x).reshape(shape).argmin(axis=1)[:, None]
        changed = np.zeros_like(minus)
        np.put_along_axis(changed, cheapest, odd[:, None].astype(np.uint8), 1)
        minus ^= changed
        fitted = np.where(changed > 0, -fitted, fitted)
    signs = np.packbits(minus, axis=1, bitorder="little")[:, 0]
    return fitted.reshape(x.shape), signs & np.uint8(127) if kind.paired else signs


def _ordered(values: NDArray[Any], order: NDArray[np.intp]) -> NDArray[Any]:
    """Values [n, groups * values of a group] with the groups in this order [n, groups]."""
    parts = values.reshape(*order.shape, -1)
    return np.take_along_axis(parts, order[:, :, None], 1).reshape(values.shape)


class _Points:
    """The points of groups as columns: x, weights [size, n], split into [dims, size / dims * n]."""

    def __init__(self, points: Grid, x: Floats, weights: Floats) -> None:
        self.grid, self.shape = points, x.shape
        self.x, self.weights = self._split(x), self._split(weights)

    def _split(self, values: Floats) -> Floats:
        dims = self.grid.points.shape[1]
        parts = values.reshape(-1, dims, self.shape[1]).swapaxes(0, 1)
        return np.ascontiguousarray(parts).reshape(dims, -1)

    def closest(self, inverse: Floats, scale: Floats) -> tuple[Indices, NDArray[np.bool_]]:
        """1 / scale and scale [n] -> points [size / dims, n], and whether the rounded codes were points."""
        parts = self.x.shape[1] // self.shape[1]
        numbers = self.grid.numbers(rounded(np.tile(inverse, parts), self.x, self.grid.base))
        levels = np.tile(scale, parts)[:, None] * (2 * np.arange(self.grid.base) + 1).astype(np.float32)
        indices = self.grid.closest(numbers, self.x, self.weights, levels)
        return indices.reshape(parts, -1), (self.grid.point_of[numbers] >= 0).reshape(parts, -1)

    def levels(self, points: Indices) -> Floats:
        """Points [size / dims, n] -> 2 * code + 1 [size, n]."""
        codes: Codes = self.grid.points[points].swapaxes(1, 2).reshape(self.shape)
        return (2 * codes + 1).astype(np.float32)


def _searched(
    kind: Lattice, points: _Points, x: Floats, weights: Floats, largest: Floats, scale: Floats
) -> tuple[Floats, Indices]:
    """Scales [n] and points [size / dims, n] of the candidate of the least weighted error, fitted once more."""
    indices = np.zeros((points.x.shape[1] // x.shape[1], x.shape[1]), np.int64)
    exact = np.full(indices.shape, not kind.refit_all)
    best = np.zeros_like(scale)
    for step in range(-kind.steps, kind.steps + 1):
        inverse = (np.float32(2 * points.grid.base - 1) + np.float32(step) * np.float32(kind.step)) / largest
        tried, on_grid = points.closest(inverse, np.float32(1) / inverse)
        products, norms = sums(weights, x, points.levels(tried))
        better = (norms > 0) & (products * products > best * norms)
        scale = np.where(better, products / norms, scale)
        best = np.where(better, scale * products, best)
        indices, exact = np.where(better, tried, indices), np.where(better, on_grid, exact)
    refit = ~exact.all(axis=0) & (scale > 0)
    if kind.first_fit:
        refit, exact = scale > 0, np.zeros_like(exact)
    tried, _ = points.closest(np.float32(1) / scale, scale)
    indices = np.where(refit & (kind.refit_all | ~exact), tried, indices)
    products, norms = sums(weights, x, points.levels(indices))
    return np.where(refit & (norms > 0), products / norms, scale), indices
