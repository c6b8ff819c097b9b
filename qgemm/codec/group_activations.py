"""Activations of "a8_g256" and "e4m3_g256" products: bytes, and a scale for each token and 256 columns.

    offset  bytes  field
         0      4  d   float32 scale, the same in the eight blocks of a group
         4     32  qs  byte j: value j, signed, -127 to 127; in "e4m3_g256" the code of a number of codec/e4m3.py

d = absmax / 127 of the group, q = x / d rounded to the nearest, halves away from zero; in "e4m3_g256" d = absmax / 448
and q the nearest number, ties to even codes. The last group of a row may be shorter. Groups whose largest magnitude is
below MIN_MAGNITUDE are zero; a group with NaN or infinity has NaN as its scale.
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
GROUP_COLUMNS = {**INTEGER, E4M3: 256}
GROUP = min(GROUP_COLUMNS.values())  # columns with one scale in every activation
MIN_MAGNITUDE = 2.0**-119  # the quotient of 448 and a larger magnitude is finite in float32, with a margin
DTYPE = np.dtype([("d", "<f4"), ("qs", "i1", 32)])
BLOCKS = GROUP // DTYPE["qs"].shape[0]  # blocks in a GROUP


def encode_rows(x: NDArray[np.float32], kind: str) -> Blocks:
    """Values [M, K], K a multiple of 32 -> blocks [M, K / 32] for an activation of GROUP_COLUMNS."""
    m, count, group = len(x), x.shape[1] // FORMAT.weights, GROUP_COLUMNS[kind]
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


def unit(largest: Floats, max_code: float = 127) -> Floats:
    """The scale by which the largest magnitude gets code `max_code`; NaN where it is not finite."""
    with np.errstate(invalid="ignore", over="ignore"):
        d = np.where(largest < np.float32(MIN_MAGNITUDE), np.float32(0), largest / np.float32(max_code))
        return np.where(np.isfinite(largest), d, np.float32(np.nan))


def codes(values: Floats, largest: Floats) -> NDArray[np.int8]:
    """Values [..., w] -> codes by the scale of `largest` [...]; zero where that is not finite."""
    scaled = _scaled(values, largest, 127)
    return np.trunc(scaled + np.copysign(np.float32(0.49999997), scaled)).astype(np.int8)


def e4m3_codes(values: Floats, largest: Floats) -> Bytes:
    """Values [..., w] -> e4m3 codes by the scale of `largest` [...]; zero where that is not finite."""
    return e4m3.encode(_scaled(values, largest, e4m3.LARGEST))


def _scaled(values: Floats, largest: Floats, max_code: float) -> Floats:
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        usable = (largest >= np.float32(MIN_MAGNITUDE)) & np.isfinite(largest)
        inverse = np.where(usable, np.float32(max_code) / largest, np.float32(0))
        scaled = values * inverse[..., None]
        return np.where(usable[..., None] & np.isfinite(scaled), scaled, np.float32(0))


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
    """Whether weights of a format can be multiplied by this kind of activations."""
    return activation == "a16" or (fmt.e4m3 if activation == E4M3 else fmt.integer)


def activation_of(fmt: Format) -> str | None:
    """The activation whose blocks have this format, if any."""
    return next((kind for kind, fmt_of_kind in FORMATS.items() if fmt_of_kind == fmt), None)
