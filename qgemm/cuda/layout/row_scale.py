"""Units of weights: the powers of two that bring each row of a matrix into the range of half for the prefill kernel."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from qgemm.codec.format import Format

from . import tile as tiles

LEVEL = -9  # 2^LEVEL is the unit of levels: up to 128 of them are normal halves, and so is 2^(24 + LEVEL)
EXPONENTS = -112, 116  # least and most of a unit of weights
FLOATS = -126, 127  # exponents of the least and the greatest power of two in float32
CODES = -24  # 2^CODES, half's smallest number, is the unit of codes masked out of words from bit 0 on
DIGITS = CODES + 8  # 2^DIGITS is the unit of digits to the base 3, which stand eight bits higher
HEADROOM = 3  # between the largest weight in these units and 2^15, at least
GRID_FRACTION = 3  # bits below half's smallest number, of weights of grids: their scales are eighths of halves
MAX_HALF = 15  # 2^MAX_HALF is the largest half that is a power of two


class RowExponentRange(NamedTuple):
    """The unit of a row whose weights are at most `bound`: 2^weight, with bound < 2^e and weight = e + above.

    min_weight, max_weight: limits of weight. level: 2^level is the unit of levels, 2^(weight + level) that of scales.
    """

    level: int
    above: int
    min_weight: int
    max_weight: int

    def weight(self, bound: float) -> int:
        """The exponent that RowExponent in kernels/gemm/row_exponent.cuh computes."""
        exponent = int(np.float32(bound).view(np.uint32) >> 23) - 126  # bound < 2^exponent
        return max(self.min_weight, min(exponent + self.above, self.max_weight))


def range_of(fmt: Format) -> RowExponentRange:
    """The range for a format.

    No scale or weight overflows half: the largest code times its scale is below 2^15, too. Where one multiply-add turns
    codes that are subnormal halves into weights, scales include the power of two that codes lack (`folded`). Weights of
    halves are multiples of 2^-24, weights of grids of 2^-27, so scales times at most this power lose no bits of
    subnormal halves.
    """
    code_exponent, factors = tiles.code_exponent(fmt), tiles.scale_factors(fmt)
    folded = factors > 0
    masked = CODES if fmt.tile.digits is None else DIGITS
    level = -code_exponent if code_exponent is not None else masked if folded else LEVEL
    below = 1 - int(np.frexp(tiles.largest_code(fmt))[1])  # 2^-below is at most the largest code
    halves = folded and factors != 3
    smallest = CODES - (GRID_FRACTION if fmt.tile.grid is not None else 0)
    least = smallest - level if halves else max(EXPONENTS[0], -FLOATS[1] - level)
    max_exponent = min(EXPONENTS[1], -FLOATS[0] - level)
    return RowExponentRange(level, max(HEADROOM, below - level) - MAX_HALF, least, max_exponent)
