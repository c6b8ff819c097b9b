"""q4_0: 32 weights share one scale, w = d * (q - 8) with q in 0..15.

offset  bytes  field
     0      2  d   float16 scale
     2     16  qs  byte j: weight j in the low nibble, weight j + 16 in the high
"""

from __future__ import annotations

import numpy as np

from qgemm.codec.format import Blocks, Format, Levels, TileLayout
from qgemm.codec.packing import HALVES, Floats, pack_nibbles, reciprocal, to_codes, unpack_nibbles
from qgemm.codec.scales import blocks_of, signed_absmax

DTYPE = np.dtype([("d", "<f2"), ("qs", "u1", 16)])
ZERO = 8


def encode(x: Floats) -> Blocks:
    """Values [n, 32] -> blocks [n]: d = signed absmax / -8, q = min(15, trunc(x / d + 8.5))."""
    d = signed_absmax(x) / np.float32(-ZERO)
    q = to_codes(x * reciprocal(d)[:, None] + np.float32(ZERO + 0.5), 15)
    return pack(Levels(q, d, zero=ZERO))


def pack(levels: Levels) -> Blocks:
    """Codes [n, 32] uint8, scale [n] -> blocks [n]."""
    blocks = blocks_of(levels, DTYPE)
    blocks["qs"] = pack_nibbles(levels.codes)
    return blocks


def levels(blocks: Blocks) -> Levels:
    """Blocks [n] -> codes [n, 1, 32], scale [n, 1], zero 8."""
    return Levels(unpack_nibbles(blocks["qs"])[:, None], blocks["d"].astype(np.float32)[:, None], zero=ZERO)


FORMAT = Format(
    "q4_0", 32, DTYPE, encode, levels, ggml_type=2, formula="d * (q - 8)", pack=pack,
    tile=TileLayout(slots={"qs": HALVES}),
)  # fmt: skip
