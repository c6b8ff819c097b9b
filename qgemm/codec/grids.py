"""Grids of the IQ types: points of 8 or 4 codes, and the point that replaces codes that are no point.

The points come from the gguf package. As in ggml, codes that are no point have neighbours: the points at the few
smallest distances, the nearest first, equally near ones by their number; the neighbour of the least weighted error
replaces the codes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from gguf import quants
from numpy.typing import NDArray

from qgemm.once import Once

from .packing import Bytes, Floats, Halves
from .search import Codes, nearest_int, total

Indices = NDArray[np.int64]
Levels = NDArray[np.int8]

# The number of different distances of neighbours, by grid.
DISTANCES = {"IQ2_XXS": 2, "IQ2_XS": 2, "IQ2_S": 1, "IQ3_XXS": 2, "IQ3_S": 3, "IQ1_S": 3}
CHUNK = 256  # codes whose distances are computed at a time

_grids: Once[Grid] = Once()
_levels: Once[Levels] = Once()


class Grid(NamedTuple):
    """points [p, dims] of codes below base. Codes are the digits of a number to this base, the lowest digit first.

    point_of [base^dims]: the point with this number, or -1; its neighbours are then
    neighbours[starts[number] : starts[number] + counts[number]].
    """

    points: Codes
    base: int
    point_of: Indices
    starts: Indices
    counts: Indices
    neighbours: Indices

    def numbers(self, codes: Codes) -> Indices:
        """Codes [dims, n] -> their numbers [n]."""
        numbers: Indices = self.base ** np.arange(len(codes)) @ codes
        return numbers

    def closest(self, numbers: Indices, x: Floats, weights: Floats, levels: Floats) -> Indices:
        """Numbers [n] of codes -> points [n]; codes that are no point get the neighbour of the least weighted error.

        x, weights [dims, n]; levels [n, base]: the level of each code.
        """
        points = self.point_of[numbers]
        missing = np.flatnonzero(points < 0)
        if not len(missing):
            return points
        counts = self.counts[numbers[missing]]
        starts = np.cumsum(counts) - counts
        owner = np.repeat(np.arange(len(missing)), counts)
        candidates = self.neighbours[np.arange(len(owner)) - starts[owner] + self.starts[numbers[missing]][owner]]
        column = missing[owner]
        error = np.zeros(len(owner), np.float32)
        for i in range(len(x)):  # one by one, as in C
            difference = levels[column, self.points[candidates, i]] - x[i, column]
            error += weights[i, column] * difference * difference
        least = np.minimum.reduceat(error, starts)
        best = np.flatnonzero(error == least[owner])[::-1]
        points[missing] = candidates[starts]
        points[missing[owner[best]]] = candidates[best]  # written last: the first of several that are equally good
        return points


def grid(name: str) -> Grid:
    """The grid of a codec of the gguf package, built at first use."""
    return _grids.get(name, lambda: _built(name))


def levels(name: str) -> Levels:
    """The points of that grid [p, dims] as levels, read-only integers, read at first use."""
    return _levels.get(name, lambda: _read(name))


def _read(name: str) -> Levels:
    codec = getattr(quants, name)
    codec.init_grid()
    values: Levels = codec.grid.reshape(codec.grid.shape[-2:]).astype(np.int8)
    values.flags.writeable = False
    return values


def signed(magnitudes: Levels, signs: Bytes) -> Levels:
    """Magnitudes [n, b, 8] and their signs, bit i of [n, b] for level i -> levels with these signs."""
    minus = np.unpackbits(signs[..., None], axis=-1, bitorder="little").astype(np.int8)
    values: Levels = (magnitudes ^ -minus) + minus
    return values


def odd_scales(d: Halves, sc: Bytes, unit: float = 1) -> Floats:
    """d [n], sc [n, groups] -> d * (2 sc + 1) * unit, a power of two."""
    odd = 2 * sc.astype(np.float32) + np.float32(1)
    with np.errstate(invalid="ignore", over="ignore"):  # d may be any bit pattern
        scale: Floats = d.astype(np.float32)[:, None] * odd * np.float32(unit)
    return scale


def with_parity(signs: Bytes) -> Bytes:
    """Bytes of seven signs -> bytes of eight signs, an even number of which is 1."""
    folded = signs ^ signs >> np.uint8(4)
    folded ^= folded >> np.uint8(2)
    folded ^= folded >> np.uint8(1)
    return signs | folded << np.uint8(7)


def _built(name: str) -> Grid:
    codec = getattr(quants, name)
    points: Codes = np.searchsorted(np.array(codec.grid_map), levels(name)).astype(np.int32)
    base, dims = len(codec.grid_map), points.shape[1]
    powers = base ** np.arange(dims)
    numbers = np.arange(base**dims)
    index = np.full(len(numbers), -1)
    index[points @ powers] = np.arange(len(points))
    off = np.flatnonzero(index < 0)
    first, count = np.zeros_like(index), np.zeros_like(index)
    lists = []
    for start in range(0, len(off), CHUNK):
        part = off[start : start + CHUNK]
        codes = part[:, None] // powers % base
        squares = (codes**2).sum(axis=1)[:, None] + (points**2).sum(axis=1)
        distances = squares - 2 * np.rint(codes.astype(np.float64) @ points.T).astype(np.int64)
        reach = distances.min(axis=1)
        for _ in range(DISTANCES[name] - 1):
            reach = np.where(distances > reach[:, None], distances, np.iinfo(np.int64).max).min(axis=1)
        row, point = np.nonzero(distances <= reach[:, None])
        lists.append(point[np.lexsort((point, distances[row, point], row))])
        count[part] = np.bincount(row, minlength=len(part))
    first[off] = np.cumsum(count[off]) - count[off]
    return Grid(points, base, index, first, count, np.concatenate(lists))


def rounded(inverse: Floats, x: Floats, base: int) -> Codes:
    """1 / scale [n], x [dims, n] -> codes of x; the level of a code is 2 * code + 1 times the scale."""
    codes: Codes = np.clip(nearest_int(np.float32(0.5) * (inverse * x - np.float32(1))), 0, base - 1)
    return codes


def sums(weights: Floats, x: Floats, levels: Floats) -> tuple[Floats, Floats]:
    """weights, x, levels [weights of a group, n] -> sum(w x q) and sum(w q q), [n] each."""
    return total(weights * x * levels), total(weights * levels * levels)
