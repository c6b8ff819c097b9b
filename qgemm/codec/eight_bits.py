"""Weights requantized to eight bits, one scale for each row and 256 columns: "a8_g256" for any integer format.

    b = the largest magnitude that a weight of these columns could have, by its scale and minimum and any code
    s = b / 127,    q = round(w / s) in -127..127

The bound b follows from scales and minimums alone, so that a kernel knows it before it reads a code. ggml's encoders
use nearly the whole range of codes, which makes b as good as the largest weight itself: the extreme weight of q4_0 has
code 0 by definition. docs/kernels/eight_bits.md has the error of each format.

"e4m3_g256" converts formats whose scales are powers of two to e4m3 numbers:

    s = the largest scale of these columns * 2^e, e the least for which no weight is above 448 s
    q = the number nearest to w / s

q is w / s exactly where w / s is a multiple of 2^-9: in mxfp4 wherever a scale is at least 2^-14 of the largest. Below
that a weight is off by at most 2^-15 of the largest scale, half of e4m3's least number.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from . import e4m3
from .format import Blocks, Format, Levels
from .group_activations import GROUP, codes, unit
from .packing import Bytes, Floats

COLUMNS = GROUP  # with one scale, as in x: a super-block of the K-quants


class EightBits(NamedTuple):
    """Weights [N, K] as codes, int8 [N, K], and their scale, float32 [N, ceil(K / COLUMNS)]."""

    codes: NDArray[np.int8]
    scale: Floats


class E4m3Weights(NamedTuple):
    """Weights [N, K] as codes of e4m3, uint8 [N, K], and their scale, float32 [N, ceil(K / COLUMNS)]."""

    codes: Bytes
    scale: Floats


def level_range(fmt: Format) -> tuple[float, float]:
    """The least and the greatest level of a format: code - zero, or the values of its codebook or grid.

    A zero of each group counts as part of its minimum.
    """
    if fmt.codebook is not None and fmt.tile.grid is None:
        return float(fmt.codebook.min()), float(fmt.codebook.max())
    if fmt.declared_max_level:
        return -fmt.declared_max_level, fmt.declared_max_level
    lowest, highest = fmt.code_range
    return float(lowest - (fmt.zero or 0)), float(highest - (fmt.zero or 0))


def eight_bits(fmt: Format, blocks: Blocks, k: int) -> EightBits:
    """Blocks [N, b] of rows of K weights -> codes of eight bits and their scales."""
    levels = fmt.decode_levels(blocks.reshape(-1))
    largest = _bounds(fmt, levels, len(blocks), k)
    values = levels.values().reshape(len(blocks), k)
    count = largest.shape[1]
    padded = np.zeros((len(blocks), count, COLUMNS), np.float32)
    padded.reshape(len(blocks), -1)[:, :k] = values
    q = codes(padded, largest).reshape(len(blocks), -1)[:, :k]
    return EightBits(q, unit(largest))


def e4m3_exponent(fmt: Format) -> int:
    """e such that the scale of weights as e4m3 numbers is the largest scale of these columns times 2^e."""
    return -int(np.log2(e4m3.LARGEST / max(map(abs, level_range(fmt)))))


def e4m3_weights(fmt: Format, blocks: Blocks, k: int) -> E4m3Weights:
    """Blocks [N, b] of rows of K weights -> codes of e4m3 and their scales."""
    levels = fmt.decode_levels(blocks.reshape(-1))
    assert levels.scale is not None, "a power of two"
    scales = levels.scale.reshape(len(blocks), -1)
    largest = _largest(fmt, scales, k)
    ratio = scales / largest.repeat(COLUMNS // fmt.group, axis=1)[:, : scales.shape[1]]
    shift = np.float32(2.0 ** -e4m3_exponent(fmt))
    values = levels.codes.reshape(*scales.shape, fmt.group).astype(np.float32) * (ratio * shift)[..., None]
    return E4m3Weights(e4m3.encode(values).reshape(len(blocks), k), largest / shift)


def _bounds(fmt: Format, levels: Levels, rows: int, k: int) -> Floats:
    """The bound b of each row and COLUMNS columns, [rows, ceil(K / COLUMNS)]; NaN or infinite where a scale is."""
    levels = levels.zeros_as_minimums()
    assert levels.scale is not None, "integer formats have scales"
    with np.errstate(invalid="ignore", over="ignore"):
        minimum = np.float32(0) if levels.minimum is None else levels.minimum
        ends = (np.abs(levels.scale * np.float32(level) + minimum) for level in level_range(fmt))
        return _largest(fmt, np.maximum(*ends).reshape(rows, -1), k)  # NaN wins


def _largest(fmt: Format, of_groups: Floats, k: int) -> Floats:
    """Numbers [rows, groups of a row] -> the largest of each row and COLUMNS columns, [rows, ceil(K / COLUMNS)]."""
    padded = np.zeros((len(of_groups), -(-k // COLUMNS), COLUMNS // fmt.group), np.float32)
    padded.reshape(len(of_groups), -1)[:, : of_groups.shape[1]] = of_groups
    largest: Floats = padded.max(axis=2)
    return largest
