"""Weights as codes of eight bits, one scale for each row and 256 columns: what "a8_g128" makes of any integer format.

    b = the largest magnitude that a weight of these columns could have, by its scale and minimum and any code
    s = b / 127,    q = round(w / s) in -127..127

The bound b follows from scales and minimums alone, so that a kernel knows it before it has looked at a code. ggml's
encoders use nearly all of the range of codes, which makes it as good as the largest weight itself: q4_0's extreme
weight has code 0 by definition. docs/kernels/eight_bits.md has the error of each format.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .format import Blocks, Format, Levels
from .group_activations import codes, unit
from .packing import Floats

COLUMNS = 256  # that share a scale: a super-block of the K-quants


class EightBits(NamedTuple):
    """Weights [N, K] as codes, int8 [N, K], and their scale, float32 [N, ceil(K / COLUMNS)]."""

    codes: NDArray[np.int8]
    scale: Floats


def level_range(fmt: Format) -> tuple[float, float]:
    """The least and the greatest level of a format: of code - zero, of its codebook's values, of its grid's.

    A zero that each group has of its own is part of the minimum.
    """
    if fmt.codebook is not None and fmt.grid is None:
        return float(fmt.codebook.min()), float(fmt.codebook.max())
    if fmt.largest:
        return -fmt.largest, fmt.largest
    lowest, highest = fmt.code_range
    return float(lowest - (fmt.zero or 0)), float(highest - (fmt.zero or 0))


def eight_bits(fmt: Format, blocks: Blocks, k: int) -> EightBits:
    """Blocks [N, b] of rows of K weights -> codes of eight bits and their scales."""
    found = fmt.decode_levels(blocks.reshape(-1))
    largest = _bounds(fmt, found, len(blocks), k)
    values = found.values().reshape(len(blocks), k)
    count = largest.shape[1]
    padded = np.zeros((len(blocks), count, COLUMNS), np.float32)
    padded.reshape(len(blocks), -1)[:, :k] = values
    q = codes(padded, largest).reshape(len(blocks), -1)[:, :k]
    return EightBits(q, unit(largest))


def _bounds(fmt: Format, found: Levels, rows: int, k: int) -> Floats:
    """The bound b of each row and COLUMNS columns, [rows, ceil(K / COLUMNS)]; NaN or infinite where a scale is."""
    found = found.zeros_as_minimums()
    assert found.scale is not None, "integer formats have scales"
    with np.errstate(invalid="ignore", over="ignore"):
        minimum = np.float32(0) if found.minimum is None else found.minimum
        ends = (np.abs(found.scale * np.float32(level) + minimum) for level in level_range(fmt))
        of_group = np.maximum(*ends).reshape(rows, -1)  # NaN wins
    groups = COLUMNS // fmt.group
    padded = np.zeros((rows, -(-k // COLUMNS), groups), np.float32)
    padded.reshape(rows, -1)[:, : of_group.shape[1]] = of_group
    largest: Floats = padded.max(axis=2)
    return largest
