"""q6_0: 32 weights share one scale, w = d * (q - 32) with q in 0..63; no file has it.

offset  bytes  field
     0      2  d   float16 scale
     2      8  qh  byte j: the high two bits of weights j, j + 16, j + 8, j + 24, from bit 0 on
    10     16  qs  byte j: the low four bits of weight j in the low nibble, of weight j + 16 in the high
"""

from __future__ import annotations

import numpy as np

from qgemm.codec.format import Blocks, Format, Levels, TileLayout
from qgemm.codec.layouts import overlapping
from qgemm.codec.packing import (
    HALVES,
    Floats,
    pack_nibbles,
    pack_slots,
    reciprocal,
    to_codes,
    unpack_nibbles,
    unpack_slots,
)
from qgemm.codec.scales import blocks_of, signed_absmax

DTYPE = np.dtype([("d", "<f2"), ("qh", "u1", 8), ("qs", "u1", 16)])
HIGH = tuple(weight for j in range(8) for weight in (j, j + 16, j + 8, j + 24))


def encode(x: Floats) -> Blocks:
    """Values [n, 32] -> blocks [n]: d = signed absmax / -32, q = min(63, trunc(x / d + 32.5))."""
    d = signed_absmax(x) / np.float32(-32)
    return pack(Levels(to_codes(x * reciprocal(d)[:, None] + np.float32(32.5), 63), d, zero=32))


def pack(levels: Levels) -> Blocks:
    """Codes [n, 32] uint8, scale [n] -> blocks [n]."""
    blocks = blocks_of(levels, DTYPE)
    blocks["qs"] = pack_nibbles(levels.codes & np.uint8(15))
    blocks["qh"] = pack_slots(levels.codes[:, HIGH] >> np.uint8(4), 2)
    return blocks


def levels(blocks: Blocks) -> Levels:
    """Blocks [n] -> codes [n, 1, 32], scale [n, 1], zero 32."""
    codes = unpack_nibbles(blocks["qs"])
    codes[:, HIGH] |= unpack_slots(blocks["qh"], 2) << np.uint8(4)
    return Levels(codes[:, None], blocks["d"].astype(np.float32)[:, None], zero=32)


FORMAT = Format(
    "q6_0", 32, DTYPE, encode, levels, formula="d * (q - 32)", pack=pack,
    tile=TileLayout(slots={"qs": HALVES, "qh": HIGH}, to_tile=overlapping.to_tile, from_tile=overlapping.from_tile),
)  # fmt: skip
