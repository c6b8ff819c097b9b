"""Activations of "a8_g128" and "a8_g256" products: codes of eight bits, a scale for each token and group of columns.

    offset  bytes  field
         0      4  d   float32 scale, of all blocks of a group: four of 128 columns, eight of 256
         4     32  qs  byte j: value j, signed, -127 to 127

d = absmax / 127 of the group, q = x / d rounded to the nearest, halves away from zero. The last group of a row may be
shorter. Groups whose largest magnitude is below LEAST are zero; one that holds NaN or infinity has NaN for its scale.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .format import Blocks, Format, Levels
from .packing import Floats
from .scales import absmax

GROUPS = {"a8_g128": 128, "a8_g256": 256}  # columns that share a scale, by activation
GROUP = min(GROUPS.values())  # in which every one has the same scale
LEAST = 2.0**-119  # of a largest magnitude whose 127 / magnitude is finite in float32, with room to spare
DTYPE = np.dtype([("d", "<f4"), ("qs", "i1", 32)])
BLOCKS = GROUP // DTYPE["qs"].shape[0]  # of such a group


def encode_rows(x: NDArray[np.float32], group: int = GROUP) -> Blocks:
    """Values [M, K], K a multiple of 32 -> blocks [M, K / 32], a scale for so many columns."""
    m, count = len(x), x.shape[1] // FORMAT.weights
    in_group = group // FORMAT.weights
    padded = np.zeros((m, -(-count // in_group), group), np.float32)
    padded.reshape(m, -1)[:, : x.shape[1]] = x
    largest = absmax(padded.reshape(-1, group)).reshape(m, -1)
    q = codes(padded, largest).reshape(m, -1, FORMAT.weights)
    blocks = np.empty((m, count), DTYPE)
    blocks["d"] = unit(largest).repeat(in_group, axis=1)[:, :count]
    blocks["qs"] = q[:, :count]
    return blocks


def unit(largest: Floats) -> Floats:
    """What a code of eight bits counts in, where the largest magnitude is this; NaN where it is not finite."""
    with np.errstate(invalid="ignore", over="ignore"):
        d = np.where(largest < np.float32(LEAST), np.float32(0), largest / np.float32(127))
        return np.where(np.isfinite(largest), d, np.float32(np.nan))


def codes(values: Floats, largest: Floats) -> NDArray[np.int8]:
    """Values [..., w] -> their codes in the unit of `largest` [...]; zero where that is not finite."""
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        known = (largest >= np.float32(LEAST)) & np.isfinite(largest)
        inverse = np.where(known, np.float32(127) / largest, np.float32(0))
        scaled = values * inverse[..., None]
        scaled = np.where(np.isfinite(scaled), scaled, np.float32(0))
        return np.trunc(scaled + np.copysign(np.float32(0.49999997), scaled)).astype(np.int8)


def levels(blocks: Blocks) -> Levels:
    """Blocks [n] -> codes [n, 1, 32], scale [n, 1]."""
    return Levels(blocks["qs"][:, None], blocks["d"][:, None])


FORMATS = {
    kind: Format(f"i8_g{group}", DTYPE["qs"].shape[0], DTYPE, None, levels, formula="d * q")
    for kind, group in GROUPS.items()
}
FORMAT = FORMATS["a8_g128"]


def activation_of(fmt: Format) -> str | None:
    """The activation that such blocks are prepared for, if any."""
    return next((kind for kind, each in FORMATS.items() if each == fmt), None)
