"""q3_0: 32 weights share one scale, w = d * (q - 4) with q in 0..7; no file has it.

offset  bytes  field
     0      2  d   float16 scale
     2      8  qs  byte j, bits 2i and 2i + 1: the low two bits of weight 8 i + j
    10      4  qh  bit j: the third bit of weight j (little-endian)
"""

from __future__ import annotations

import numpy as np

from qgemm.codec.format import Blocks, Format, Levels, TileLayout
from qgemm.codec.packing import (
    IN_ORDER,
    Floats,
    pack_planes,
    pack_slots,
    reciprocal,
    to_codes,
    unpack_planes,
    unpack_slots,
)
from qgemm.codec.scales import blocks_of, signed_absmax

DTYPE = np.dtype([("d", "<f2"), ("qs", "u1", 8), ("qh", "u1", 4)])
SLOTS = {"qs": tuple(8 * i + j for j in range(8) for i in range(4)), "qh": IN_ORDER}
ZERO = 4


def encode(x: Floats) -> Blocks:
    """Values [n, 32] -> blocks [n]: d = signed absmax / -4, q = min(7, trunc(x / d + 4.5))."""
    d = signed_absmax(x) / np.float32(-ZERO)
    return pack(Levels(to_codes(x * reciprocal(d)[:, None] + np.float32(ZERO + 0.5), 7), d, zero=ZERO))


def pack(levels: Levels) -> Blocks:
    """Codes [n, 32] uint8, scale [n] -> blocks [n]."""
    blocks = blocks_of(levels, DTYPE)
    blocks["qs"] = pack_planes(levels.codes & np.uint8(3), 2)
    blocks["qh"] = pack_slots(levels.codes >> np.uint8(2), 1)
    return blocks


def levels(blocks: Blocks) -> Levels:
    """Blocks [n] -> codes [n, 1, 32], scale [n, 1], zero 4."""
    codes = unpack_planes(blocks["qs"], 2) | unpack_slots(blocks["qh"], 1) << np.uint8(2)
    return Levels(codes[:, None], blocks["d"].astype(np.float32)[:, None], zero=ZERO)


FORMAT = Format(
    "q3_0", 32, DTYPE, encode, levels, formula="d * (q - 4)", pack=pack,
    tile=TileLayout(slots=SLOTS, bytes_are_levels=True),
)  # fmt: skip
