"""Activations of "a8" products: blocks of q8_1 whose scale and sum keep the 11 bits of float16 at any magnitude.

    offset  bytes  field
         0      4  d   float32 scale / UNIT
         4      4  s   float32 sum of the 32 values / UNIT: d * sum(q), from the unrounded d
         8     32  qs  byte j: value j, signed

Where d and s of ggml's q8_1 are in the normal range of float16 (2^-14 to 65504), these are the same numbers, and so are
products. Beyond it ggml's are subnormal, zero or infinite, while these still have 11 bits: kernels rely on exact
products of d. Blocks whose largest magnitude is below 3.7e-37 are zero.

UNIT: products are summed in this unit, so that no term overflows where y is finite, up to the largest float32 x.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .format import Blocks, Format, Levels
from .packing import Floats
from .scales import signed_codes

UNIT = 2.0**19
DTYPE = np.dtype([("d", "<f4"), ("s", "<f4"), ("qs", "i1", 32)])


def encode(x: Floats) -> Blocks:
    """Values [n, 32] -> blocks [n]: q as in q8_1; a block with NaN or infinity has NaN as its scale and sum."""
    q, exact = signed_codes(x)
    d = exact * np.float32(1 / UNIT)
    blocks = np.empty(len(x), DTYPE)
    blocks["d"] = to_half_precision(d)
    blocks["s"] = to_half_precision(d * q.sum(axis=1, dtype=np.int32).astype(np.float32))
    blocks["qs"] = q
    return blocks


def levels(blocks: Blocks) -> Levels:
    """Blocks [n] -> codes [n, 1, 32], scale [n, 1]."""
    return Levels(blocks["qs"][:, None], (blocks["d"] * np.float32(UNIT))[:, None])


def of_q8_1(blocks: Blocks) -> Blocks:
    """Blocks of q8_1, for example from a file -> the same numbers as blocks of activations."""
    converted = np.empty(blocks.shape, DTYPE)
    for name in ("d", "s"):
        converted[name] = blocks[name].astype(np.float32) * np.float32(1 / UNIT)
    converted["qs"] = blocks["qs"]
    return converted


def scale_and_sum(blocks: Blocks) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The d and s of blocks of activations or of q8_1, in units of 1."""
    unit = UNIT if blocks.dtype == DTYPE else 1.0
    return blocks["d"].astype(np.float64) * unit, blocks["s"].astype(np.float64) * unit


def to_half_precision(values: Floats) -> Floats:
    """Values rounded to 11 bits, to nearest even, as float16 rounds in its normal range; NaN and infinity become NaN.

    Veltkamp's splitting: the tests try every significand. Finite values are below 2^128 / (2^13 + 1).
    """
    with np.errstate(invalid="ignore"):
        above = values * np.float32(2**13 + 1)
        return above + (values - above)


FORMAT = Format("q8_1_f32", DTYPE["qs"].shape[0], DTYPE, encode, levels, formula="d * q")
