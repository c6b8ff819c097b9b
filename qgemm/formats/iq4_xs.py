"""iq4_xs: super-blocks of 8 groups of 32 weights, w = d * sc * codebook[q], sc in -32..31 a group, q as in iq4_nl.

offset  bytes  field
     0      2  d         float16 scale of the sc
     2      2  scales_h  bits 2g and 2g + 1: the high two bits of sc + 32 of group g
     4      4  scales_l  the low four bits of sc + 32: of group 2i in the low nibble of byte i, of 2i + 1 in the high
     8    128  qs        byte 16 g + j: weight 32 g + j in the low nibble, weight 32 g + j + 16 in the high   (j < 16)

Codes lie in a device tile as those of iq4_nl.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from qgemm.codec.compiled import compilable
from qgemm.codec.format import Blocks, Encoding, Format, Levels, TileLayout
from qgemm.codec.packing import (
    HALVES,
    Bytes,
    Floats,
    pack_nibbles,
    reciprocal,
    to_float16,
    unpack_nibbles,
    unpack_slots,
)
from qgemm.codec.search import nearest_int, total

from . import iq4_nl

DTYPE = np.dtype([("d", "<f2"), ("scales_h", "<u2"), ("scales_l", "u1", 4), ("qs", "u1", 128)])
GROUPS, ZERO = 8, 32
SLOTS = {"qs": tuple(32 * g + weight for g in range(GROUPS) for weight in HALVES)}
SHARE = 256  # super-blocks at a time: they fit in a core's cache


def encode(x: Floats, importance: Floats | None = None) -> Blocks:
    """Values [n, 256] and their importance -> blocks [n]: groups as blocks of iq4_nl, their scales rounded.

    An importance is multiplied by sqrt(twice the mean square of the super-block + x^2).
    """
    blocks = np.empty(len(x), DTYPE)
    for start in range(0, len(x), SHARE):
        part = slice(start, start + SHARE)
        blocks[part] = _encoded(x[part], None if importance is None else importance[part])
    return blocks


def _encoded(x: Floats, importance: Floats | None) -> Blocks:
    d, sc, codes = fitted(x, importance)
    blocks, biased = np.empty(len(x), DTYPE), (sc + np.int8(ZERO)).astype(np.uint16)
    low = (biased & 15).astype(np.uint8)
    blocks["d"] = to_float16(d)
    blocks["scales_l"] = low[:, ::2] | low[:, 1::2] << np.uint8(4)
    blocks["scales_h"] = ((biased >> 4) << np.arange(0, 16, 2, dtype=np.uint16)).sum(axis=1, dtype=np.uint16)
    blocks["qs"] = pack_nibbles(codes.reshape(-1, 32)).reshape(-1, 128)
    return blocks


@compilable
def fitted(x: Floats, importance: Floats | None) -> tuple[Floats, NDArray[np.int8], Bytes]:
    """Super-blocks [n, 256] and their importance -> d [n], sc [n, 8], codes [n, 256]."""
    groups = x.reshape(-1, 32)
    with np.errstate(all="ignore"):  # losing candidates may overflow
        squares = x * x
        weights = squares.reshape(-1, 32)
        if importance is not None:
            twice = (
                np.repeat(squares, 2, axis=0) if len(x) == 1 else squares
            )  # NumPy would sum a single column in another order
            means = (total(np.ascontiguousarray(twice.T)) * np.float32(2 / 256))[: len(x)]
            weights = (importance * np.sqrt(means[:, None] + squares)).reshape(-1, 32)
        scales = iq4_nl.scales(groups, weights).reshape(-1, GROUPS)
        largest = np.take_along_axis(scales, np.abs(scales).argmax(axis=1)[:, None], 1)[:, 0]
        d = -largest / np.float32(ZERO)
        sc = np.clip(nearest_int(reciprocal(d)[:, None] * scales), -ZERO, ZERO - 1)
        inverse = reciprocal((d[:, None] * sc.astype(np.float32)).reshape(-1))
        codes = iq4_nl.nearest(inverse[:, None] * groups)
    return d, sc.astype(np.int8), codes.reshape(x.shape)


def levels(blocks: Blocks) -> Levels:
    """Blocks [n] -> codebook[q] as codes [n, 8, 32], scale d * sc [n, 8]."""
    codes = iq4_nl.VALUES.take(unpack_nibbles(blocks["qs"].reshape(-1, 16))).reshape(-1, GROUPS, 32)
    low = unpack_slots(blocks["scales_l"], 4)
    high = blocks["scales_h"][:, None] >> np.arange(0, 16, 2, dtype=np.uint16) & np.uint16(3)
    sc = (low | high.astype(np.uint8) << np.uint8(4)).astype(np.float32) - np.float32(ZERO)
    with np.errstate(invalid="ignore", over="ignore"):  # inf * 0 is data here
        return Levels(codes, blocks["d"].astype(np.float32)[:, None] * sc)


FORMAT = Format(
    "iq4_xs", 256, DTYPE, encode, levels, ggml_type=23, formula="d * sc * codebook[q]", codebook=iq4_nl.CODEBOOK,
    tile=TileLayout(slots=SLOTS, to_tile=iq4_nl.to_tile, from_tile=iq4_nl.from_tile, code_exponent=0, pair_lookup=True),
    encoding=Encoding(weighted=encode),
)  # fmt: skip
