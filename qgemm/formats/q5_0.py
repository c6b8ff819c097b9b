"""q5_0: 32 weights share one scale, w = d * (q - 16) with q in 0..31.

offset  bytes  field
     0      2  d   float16 scale
     2      4  qh  bit j: the fifth bit of weight j (little-endian)
     6     16  qs  byte j: the low four bits of weight j in the low nibble, of weight j + 16 in the high
"""

from __future__ import annotations

import numpy as np

from qgemm.codec.format import Blocks, Format, Levels, TileLayout
from qgemm.codec.layouts import overlapping
from qgemm.codec.packing import HALVES, IN_ORDER, Floats, pack_fives, reciprocal, to_codes, unpack_fives
from qgemm.codec.scales import blocks_of, signed_absmax

DTYPE = np.dtype([("d", "<f2"), ("qh", "u1", 4), ("qs", "u1", 16)])
ZERO = 16


def encode(x: Floats) -> Blocks:
    """Values [n, 32] -> blocks [n]: d = signed absmax / -16, q = min(31, trunc(x / d + 16.5))."""
    d = signed_absmax(x) / np.float32(-ZERO)
    q = to_codes(x * reciprocal(d)[:, None] + np.float32(ZERO + 0.5), 31)
    return pack(Levels(q, d, zero=ZERO))


def pack(levels: Levels) -> Blocks:
    """Codes [n, 32] uint8, scale [n] -> blocks [n]."""
    blocks = blocks_of(levels, DTYPE)
    blocks["qs"], blocks["qh"] = pack_fives(levels.codes)
    return blocks


def levels(blocks: Blocks) -> Levels:
    """Blocks [n] -> codes [n, 1, 32], scale [n, 1], zero 16."""
    codes = unpack_fives(blocks["qs"], blocks["qh"])
    return Levels(codes[:, None], blocks["d"].astype(np.float32)[:, None], zero=ZERO)


FORMAT = Format(
    "q5_0", 32, DTYPE, encode, levels, ggml_type=6, formula="d * (q - 16)", pack=pack,
    tile=TileLayout(slots={"qs": HALVES, "qh": IN_ORDER}, to_tile=overlapping.to_tile, from_tile=overlapping.from_tile),
)  # fmt: skip
