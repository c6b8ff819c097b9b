"""Activations of "a8_g256" and "e4m3_g256" products: bytes, a scale for each token and 256 columns.

    offset  bytes  field
         0      4  d   float32 scale, the same in the eight blocks of a group
         4     32  qs  byte j: value j, signed, -127 to 127; of "e4m3_g256" the code of a number of codec/e4m3.py

d = absmax / 127 of the group, q = x / d rounded to the nearest, halves away from zero; of "e4m3_g256" d = absmax / 448
and q the nearest number, halves to the even code. The last group of a row may be shorter. Groups whose largest
magnitude is below LEAST are zero; one that holds NaN or infinity has NaN for its scale.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from . import e4m3
from .format import Blocks, Format, Levels
from .packing import Bytes, Floats
from .scales import absmax

INTEGER = {"a8_g256": 256}  # columns that share a scale, by activation
E4M3 = "e4m3_g256"
GROUPS = {**INTEGER, E4M3: 256}
GROUP = min(GROUPS.values())  # in which every one has the same scale
LEAST = 2.0**-119  # of a largest magnitude whose 448 / magnitude is finite in float32, with room to spare
DTYPE = np.dtype([("d", "<f4"), ("qs", "i1", 32)])
BLOCKS = GROUP // DTYPE["qs"].shape[0]  # of such a group


def encode_rows(x: NDArray[np.float32], kind: str) -> Blocks:
    """Values [M, K], K a multiple of 32 -> blocks [M, K / 32] for an activation of GROUPS."""
    m, count, group = len(x), x.shape[1] // FORMAT.weights, GROUPS[kind]
    in_group = group // FORMAT.weights
    padded = np.zeros((m, -(-count // in_group), group), np.float32)
    padded.reshape(m, -1)[:, : x.shape[1]] = x
    largest = absmax(padded.reshape(-1, group)).reshape(m, -1)
    q = (e4m3_codes if kind == E4M3 else codes)(padded, largest).reshape(m, -1, FORMAT.weights)
    blocks = np.empty((m, count), DTYPE)
    blocks["d"] = unit(largest, largest_code(kind)).repeat(in_group, axis=1)[:, :count]
    blocks["qs"] = q[:, :count].view(np.int8)
    return blocks


def largest_code(kind: str) -> float:
    """The largest number that a byte stands for."""
    return e4m3.LARGEST if kind == E4M3 else 127


def unit(largest: Floats, most: float = 127) -> Floats:
    """What a code counts in, where the largest magnitude is this and has code `most`; NaN where it is not finite."""
    with np.errstate(invalid="ignore", over="ignore"):
        d = np.where(largest < np.float32(LEAST), np.float32(0), largest / np.float32(most))
        return np.where(np.isfinite(largest), d, np.float32(np.nan))


def codes(values: Floats, largest: Floats) -> NDArray[np.int8]:
    """Values [..., w] -> their codes in the unit of `largest` [...]; zero where that is not finite."""
    scaled = _scaled(values, largest, 127)
    return np.trunc(scaled + np.copysign(np.float32(0.49999997), scaled)).astype(np.int8)


def e4m3_codes(values: Floats, largest: Floats) -> Bytes:
    """Values [..., w] -> e4m3 codes in the unit of `largest` [...]; zero where that is not finite."""
    return e4m3.encode(_scaled(values, largest, e4m3.LARGEST))


def _scaled(values: Floats, largest: Floats, most: float) -> Floats:
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        known = (largest >= np.float32(LEAST)) & np.isfinite(largest)
        inverse = np.where(known, np.float32(most) / largest, np.float32(0))
        scaled = values * inverse[..., None]
        return np.where(known[..., None] & np.isfinite(scaled), scaled, np.float32(0))


def levels(blocks: Blocks) -> Levels:
    """Blocks [n] -> codes [n, 1, 32], scale [n, 1]."""
    return Levels(blocks["qs"][:, None], blocks["d"][:, None])


def e4m3_levels(blocks: Blocks) -> Levels:
    """Blocks [n] -> numbers as codes [n, 1, 32], scale [n, 1]."""
    return Levels(e4m3.NUMBERS[blocks["qs"].view(np.uint8)][:, None], blocks["d"][:, None])


FORMATS = {
    kind: Format(f"i8_g{group}", DTYPE["qs"].shape[0], DTYPE, None, levels, formula="d * q")
    for kind, group in INTEGER.items()
}
FORMATS[E4M3] = Format(E4M3, DTYPE["qs"].shape[0], DTYPE, None, e4m3_levels, formula="d * number")
FORMAT = FORMATS["a8_g256"]


def multiplies(activation: str, fmt: Format) -> bool:
    """Whether a kind of activations is one that weights of a format can be multiplied by."""
    return activation == "a16" or (fmt.e4m3 if activation == E4M3 else fmt.integer)


def activation_of(fmt: Format) -> str | None:
    """The activation that such blocks are prepared for, if any."""
    return next((kind for kind, each in FORMATS.items() if each == fmt), None)
